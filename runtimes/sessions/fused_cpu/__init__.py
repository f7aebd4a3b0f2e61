"""The fused operator for the CPU: a C++ library that is built once on a machine."""

from runtimes.sessions.fused_cpu.library import build, built, ignored

__all__ = ["build", "built", "ignored"]
