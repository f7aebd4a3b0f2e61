"""The real Triton Inference Server: the program in the package nvidia-pytriton, with its Python backend.

It needs an environment of its own, because this backend wants NumPy 1. TRITON_ENVIRONMENT names one that
exists; otherwise one is made in `build/triton` (300 MB).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("nvidia-pytriton==0.7.0", "numpy<2", "onnxruntime>=1.25", "click>=8.1")
SECONDS = 120  # until a server must have loaded its models


class MissingError(Exception):
    """One sentence that says what the server lacks and how to get it."""


def environment() -> Path:
    """The virtual environment with the server. Raises MissingError where it cannot be made."""
    folder = Path(os.environ.get("TRITON_ENVIRONMENT") or ROOT / "build" / "triton")
    if not (folder / "ready").exists():
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES]
        for command in ([sys.executable, "-m", "venv", folder], install):
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if done.returncode:
                raise MissingError(
                    f"{' '.join(PACKAGES)} could not be installed in {folder} ({done.stderr.strip()[-300:]})."
                )
        (folder / "ready").touch()
    if not (_packages(folder) / "pytriton" / "tritonserver" / "bin" / "tritonserver").is_file():
        raise MissingError(f"nvidia-pytriton in {folder} holds no tritonserver for this machine.")
    return folder


def _packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python3.*")) / "site-packages"


@contextlib.contextmanager
def serving(folder: Path, repository: Path, *, scratch: Path, strict: bool = True) -> Iterator[str]:
    """A server over a model repository; yields the address of its gRPC service on this machine.

    folder: of `environment`. scratch: an empty folder for its files; `log` holds what it says. strict:
    whether all models must load.
    """
    program = _packages(folder) / "pytriton" / "tritonserver"
    version = next((folder / "lib").glob("python3.*")).name.removeprefix("python")
    backends = scratch / "backends"
    shutil.copytree(program / "backends", backends)
    stub = program / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, backends / "python")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = {
        "model-repository": repository,
        "backend-directory": backends,
        "cache-directory": program / "caches",
        "grpc-address": "127.0.0.1",
        "grpc-port": address.rpartition(":")[2],
        "allow-http": "false",
        "allow-metrics": "false",
        "exit-timeout-secs": "5",
        "exit-on-error": str(strict).lower(),
        "strict-readiness": str(strict).lower(),
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    prefix = f"--backend-config=python,shm-region-prefix-name=xl{os.getpid()}_{address.rpartition(':')[2]}"
    libraries = [str(program.parents[1] / "nvidia_pytriton.libs"), os.environ.get("LD_LIBRARY_PATH", "")]
    variables = os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    with open(scratch / "log", "wb") as log:
        server = subprocess.Popen(
            [program / "bin" / "tritonserver", *words, prefix], stdout=log, stderr=log, env=variables
        )
    try:
        _wait(server, address, scratch / "log")
        yield address
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        server.kill()
        server.wait()


def _wait(server: subprocess.Popen, address: str, log: Path) -> None:
    """Returns when all models are ready."""
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(address) as client:
        for _ in range(SECONDS * 5):
            with contextlib.suppress(triton.InferenceServerException):
                if client.is_server_ready():
                    return
            assert server.poll() is None, log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)
    raise AssertionError(log.read_text(errors="replace")[-4000:])
