"""Finds the session class for a folder by the file that marks its kind."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from runtimes.base.errors import ArtefactError, ConfigError, MissingPackageError, StreamError
from runtimes.base.folders import refuse_dataset, refuse_no_folder
from runtimes.base.ranges import Range
from runtimes.base.records import to_json
from runtimes.base.sealed import refuse_other_identity
from runtimes.base.signature import signed_identity
from runtimes.base.startup import prepare_libraries
from runtimes.contract.device import Device
from runtimes.contract.sampling import read_sampling
from runtimes.contract.session import Opener, Session
from runtimes.contract.spec import BUILD, SPEC

# The file that marks a folder's kind, and the class or module that opens it, which is imported when it is
# needed.
OPENERS = {
    BUILD: "runtimes.sessions.tensorrt.session:TrtSession",  # before SPEC, which an engine has too
    SPEC: "runtimes.sessions.artefact:",  # with the colon, an ImportError in it passes unchanged
    "config.json": "trainer.run.session:TorchSession",
}

THREADS = Range(1, 1024, whole=True)


def open_session(
    path: Path | str,
    *,
    threads: int | None = None,
    device: Device | str = "auto",
    expected_identity: str | None = None,
    public_key: Path | str | None = None,
) -> Session:
    """A session for an artefact (ONNX Runtime), an engine (TensorRT) or a run (PyTorch).

    threads: the number of CPU threads; all CPUs that this process may use when None. PyTorch has one number
    for the whole process. An engine accepts none. device: `auto`, or the name of what computes, such as `cpu`
    or `cuda:1`. With `auto` it is the best that passes a small test when the folder is opened; if something
    better is installed and cannot be used, a warning says why, once. expected_identity: the only
    `Session.identity` that is accepted. public_key: a PEM file; only an artefact whose spec.json (an engine
    whose build.json) was signed with its private key is accepted, and the extra `sign` is needed. Both are
    verified before a model is loaded. Raises ArtefactError for a folder
    of another kind or a damaged one, StreamError for an impossible number of threads, ConfigError for a
    device that is unknown or that does not compute such a folder, and MissingPackageError for one that cannot
    be used here.
    """
    if threads is not None:
        THREADS.check("threads", threads, StreamError)
    folder = Path(path)
    chosen = Device.parse(device)
    opener = opener_of(folder)
    if public_key is not None:
        sealed = _sealed_file(folder)
        signed = signed_identity(sealed, Path(public_key))
        refuse_other_identity(sealed, signed, expected_identity)
        expected_identity = signed  # whatever happens to the folder since, what is opened was signed
    sampler = read_sampling(folder)
    session = opener.open(folder, threads=threads, device=chosen, identity=expected_identity)
    session.sampler = sampler
    return session


def _sealed_file(folder: Path) -> Path:
    """The file whose SHA-256 is the identity of an artefact or an engine, which lists all others."""
    for name in (BUILD, SPEC):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"{folder} is neither an artefact nor an engine, and only these are signed; export it, or open it "
        "without a key."
    )


def describe(path: Path | str) -> dict[str, Any]:
    """The facts of an artefact, an engine or a run, as `info` prints them (see `Opener.describe`).

    Artefacts and engines are described from their verified files, so this needs none of ONNX Runtime,
    TensorRT and PyTorch.
    """
    folder = Path(path)
    facts = opener_of(folder).describe(folder)
    return facts | {"sampling": to_json(read_sampling(folder))}


def opener_of(folder: Path) -> Opener:
    """What opens the model in a folder; raises UserError for a folder that holds none."""
    refuse_no_folder(folder, give="a run, an artefact or an engine")
    for marker, opener in OPENERS.items():
        if (folder / marker).is_file():
            prepare_libraries()  # before the module loads PyTorch or ONNX Runtime
            try:
                return cast(Opener, resolve_name(opener))
            except ModuleNotFoundError as error:
                if not opener.startswith(f"{error.name}"):
                    raise
                package = opener.partition(".")[0]
                raise MissingPackageError(
                    f"Python does not find the package {package} of xl-export; rename a file or folder named "
                    f"{package} next to your script or in the working folder."
                ) from error
    refuse_dataset(folder, give="a run, an artefact or an engine")
    if (folder / "config.pbtxt").is_file() or any(folder.glob("*/config.pbtxt")):
        raise ArtefactError(
            f"{folder} is a model repository for Triton Inference Server, which loads it; give the artefact "
            "or the engine that it was written from."
        )
    if inside := sorted({path.parent for marker in OPENERS for path in folder.glob(f"*/{marker}")}):
        raise ArtefactError(
            f"{folder} is no run, artefact or engine; {inside[0]} in it looks like one, so give that."
        )
    raise ArtefactError(
        f"{folder} is neither an artefact (it has no {SPEC}) nor a run (it has no config.json) nor an engine "
        f"(it has no {BUILD}); make them with `xl-export train`, `xl-export export` and `xl-export build`."
    )
