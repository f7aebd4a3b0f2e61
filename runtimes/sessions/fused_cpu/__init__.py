"""The fused operator for the CPU: a C++ library, compiled on a machine or brought by the package."""

from runtimes.sessions.fused_cpu.library import build, built, compiled, ignored, scorer, variant

__all__ = ["build", "built", "compiled", "ignored", "scorer", "variant"]
