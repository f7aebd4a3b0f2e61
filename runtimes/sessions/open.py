"""Opens the right session for a folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.contract.engine import BUILD
from runtimes.contract.session import Session
from runtimes.contract.spec import SPEC

# The file that marks a folder's kind, and the session class for it: each is imported only when needed.
SESSIONS = {
    BUILD: ("runtimes.sessions.tensorrt.session", "TrtSession"),  # before SPEC, which an engine has too
    SPEC: ("runtimes.sessions.onnx_runtime", "OrtSession"),
    "config.json": ("trainer.run.session", "TorchSession"),
}

MAX_THREADS = 1024


def open_session(path: Path | str, *, threads: int | None = None) -> Session:
    """A session for an artefact (ONNX Runtime), an engine (TensorRT) or a run folder (PyTorch, needs `xl-export[train]`).

    threads: CPU threads, all that this process may use when None; PyTorch has one number for the whole process, and an
    engine takes none.
    Raises ArtefactError for a folder that is neither or is damaged, StreamError for an impossible number of threads.
    """
    folder = Path(path)
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise StreamError(f"threads is {threads}; expected 1 to {MAX_THREADS}.")
    if not folder.is_dir():
        raise ArtefactError(
            f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}; give a run, an artefact or an engine."
        )
    for marker, (module, name) in SESSIONS.items():
        if (folder / marker).is_file():
            session: Session = getattr(import_module(module), name).open(folder, threads=threads)
            return session
    raise ArtefactError(
        f"{folder} is neither an artefact (it has no {SPEC}) nor a run (it has no config.json) nor an engine (no {BUILD}); "
        "make them with `xl-export train`, `xl-export export` and `xl-export build`."
    )
