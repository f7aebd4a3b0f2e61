"""Settings of this process that must be made before PyTorch or ONNX Runtime loads.

Nothing here happens at import. A command calls `start_command` when it starts; functions that load one of
these libraries for users of the Python interface call `prepare_libraries` or `load_onnxruntime`. Training
calls `prepare_training`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from runtimes.base.errors import MissingPackageError, absent, broken_error, install

# What a user has set stays as it is.
DEFAULTS = {
    # Waiting threads of PyTorch should sleep. If they spin, they slow down each other and every other job:
    # on two busy cores training was six times slower, and evaluation 30 to 75 times. See also
    # `prepare_training`.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The wheels of ONNX Runtime for Linux report to their maker from release 1.29 on, onnxruntime-genai's
    # too: a device identifier and a queue of events appear in the user's cache as soon as the package is
    # imported.
    "ORT_DISABLE_TELEMETRY": "1",
}
SPIN = "GOMP_SPINCOUNT"  # how often a thread of libgomp looks for work before it sleeps
SPINS = "10000"
BUSY_SAMPLE_SECONDS = 0.1  # in which the CPU use of other jobs is measured
IDLE_SHARE = 0.2  # the largest share of the CPUs that an idle machine uses
IDLE_CPUS = 1.0  # the most CPUs that an idle machine uses
FATAL = 4  # ONNX Runtime's highest severity: its errors become exceptions, and their text says the same

_in_command = False
_own: set[str] = set()  # the variables that were set here


def prepare_libraries() -> None:
    """Sets the environment variables of `DEFAULTS` that the user has not set."""
    for name, value in DEFAULTS.items():
        if name not in os.environ:
            os.environ[name] = value
            _own.add(name)


def prepare_training() -> None:
    """`prepare_libraries`, and on an idle machine lets threads of PyTorch spin a moment before they sleep.

    A training step has thousands of parallel pieces, and waking a thread takes longer than most of them:
    spinning halved the time of a step of a small model. Two trainings on the same two cores are 2.6 times as
    slow with it, so it is not done if other jobs are running now. Finding out takes a tenth of a second.
    Settings of the user are kept. A process started by another one of this project inherits its decision.
    """
    prepare_libraries()
    decided = SPIN in os.environ or "OMP_WAIT_POLICY" not in _own or "torch" in sys.modules
    if not decided and _is_idle():
        os.environ[SPIN] = SPINS


def _is_idle() -> bool:
    """Whether other processes hardly use the CPUs now; False if the system does not report it."""
    from runtimes.base.machine import available_cpus, busy_cpus

    try:
        return busy_cpus(BUSY_SAMPLE_SECONDS) <= min(IDLE_CPUS, IDLE_SHARE * available_cpus())
    except OSError:
        return False


def start_command() -> None:
    """Notes that this process is a command of this project.

    Libraries are prepared then, and write no log of their own.
    """
    global _in_command
    _in_command = True
    prepare_libraries()


def load_onnxruntime() -> ModuleType:
    """The package onnxruntime, imported after `prepare_libraries`. In a command, its own log is silent.

    Raises MissingPackageError if it is not installed, or cannot be loaded, as when a library of the system is
    too old for it.
    """
    prepare_libraries()
    try:
        import onnxruntime
    except (ImportError, OSError) as error:
        if absent(error) == "onnxruntime":
            raise MissingPackageError(
                f"ONNX Runtime is not installed; run {install('cpu')}, or {install('gpu')} on a machine with "
                "an NVIDIA GPU."
            ) from error
        raise broken_error("onnxruntime", error, install="run `pip install -U onnxruntime`") from error

    if _in_command:  # its allocator, for one, logs to the logger of the process, not to the session's
        onnxruntime.set_default_logger_severity(FATAL)
    module: ModuleType = onnxruntime
    return module
