"""The module of TensorRT or TensorRT-RTX, imported when it is needed, with a log that errors can quote."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from runtimes.base.errors import MissingPackageError, absent, broken_error, install
from runtimes.contract.engine import NAMES, PACKAGES, Flavour

# The first TensorRT that writes memory in place, and in which a node says whether its plugin or its function
# body is used. The ONNX Attention operator came in 10.14.
OLDEST_RELEASE = (10, 15)


def load_tensorrt(flavour: Flavour) -> Any:
    """The module `tensorrt` or `tensorrt_rtx`; raises MissingPackageError with the command that installs
    it.
    """
    package = PACKAGES[flavour]
    name = NAMES[flavour]
    try:
        trt = import_module(package)
    except (ImportError, OSError) as error:  # OSError: bindings whose library cannot be loaded
        if absent(error) != package:
            raise broken_error(name, error, install=f"run {_install(flavour)}") from error
        raise MissingPackageError(
            f"{name} is not installed and this step needs it; run {_install(flavour)}."
        ) from error
    if flavour == "tensorrt" and tuple(int(part) for part in trt.__version__.split(".")[:2]) < OLDEST_RELEASE:
        raise MissingPackageError(
            f"TensorRT {trt.__version__} is installed and {'.'.join(map(str, OLDEST_RELEASE))} or newer is "
            f"needed; run {_install(flavour)}; on a Jetson that is JetPack 7.2.2 or newer, and on JetPack 6 "
            "run the artefact with ONNX Runtime."
        )
    return trt


def _install(flavour: Flavour) -> str:
    if flavour == "rtx":
        return install("tensorrt-rtx")
    return install("tensorrt") + ", or on Jetson `apt install python3-libnvinfer`"


def fresh_log(trt: Any) -> Any:
    """The logger of this process, emptied. It prints nothing and keeps texts in its lists `errors` and
    `warnings`.
    """
    log = _make_log(trt)
    log.errors.clear()
    log.warnings.clear()
    return log


@functools.cache
def _make_log(trt: Any) -> Any:
    """The one logger of this process: TensorRT keeps the first one that it gets."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.warnings: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.errors.append(" ".join(message.split()))
            elif severity == trt.ILogger.Severity.WARNING:
                self.warnings.append(" ".join(message.split()))

        def last_error(self) -> str:
            """The last error, as a part of a sentence."""
            return self.errors[-1].rstrip(".") if self.errors else "it gave no reason"

    return Log()
