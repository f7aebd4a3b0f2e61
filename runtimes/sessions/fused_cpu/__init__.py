"""The fused operator for the CPU: a C++ library, compiled on a machine or brought by the package."""

from runtimes.sessions.fused_cpu.library import SMALL, build, built, compiled, ignored, scorer, variant

__all__ = ["SMALL", "build", "built", "compiled", "ignored", "scorer", "variant"]
