"""Steps that end in every way that a step can end."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from benchmarks.first_hour.rates import COPY
from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.first_hour.results import NO_GPU


def without_gpu(record: Record) -> None:
    record.fact(NO_GPU, "the driver is not installed")


def measures(record: Record) -> None:
    record.series(COPY, (1e12, 2e12))


def rated(record: Record) -> None:
    record.fact("rate", record.rates.copy)


def right(record: Record, *, word: str) -> None:
    record.check("a check", True, f"{word} is right")


def wrong(record: Record) -> None:
    record.check("a check", True, "right")
    record.check("another", False, "differs by 3 nats")


def raises_in_part(record: Record) -> None:
    with record.attempt("part"):
        raise RuntimeError("CUDA error: an illegal memory access")
    record.check("what comes after", True, "right")


def killed(record: Record) -> None:
    """Leaves a child, as a test runner that is killed leaves its workers."""
    record.check("before the end", True, "kept")
    child = subprocess.Popen(["sleep", "600"])
    record.fact("child", child.pid)
    os.kill(os.getpid(), signal.SIGKILL)


def broken(record: Record) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def silent(record: Record) -> None:
    os._exit(0)


def full(record: Record) -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")


def missing(record: Record) -> None:
    import a_package_that_nobody_has  # type: ignore[import-not-found] # noqa: F401


def elsewhere(record: Record) -> None:
    raise NotHereError("it needs two GPUs.")


def hangs(record: Record) -> None:
    print("begins to wait", flush=True)
    time.sleep(600)


def leaks(record: Record) -> None:
    """Says everything that a report must not say."""
    values = [value for name, value in os.environ.items() if name.startswith("PRIVATE_")]
    text = " and ".join([*values, os.getcwd(), os.environ["HOME"] + "/clients/acme/model.bin"])
    print(text, flush=True)
    record.check(f"check of {text}", False, text)
    record.fact(f"fact of {text}", text)
    record.say(text)
