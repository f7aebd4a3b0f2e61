"""Finds the files of a TensorFlow checkpoint, and reads its variables if TensorFlow is installed.

A checkpoint consists of the files PREFIX.index and PREFIX.data-00000-of-00001, and often PREFIX.meta. The
file `checkpoint` in their folder names the newest prefix.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from torch import Tensor

from runtimes.base.errors import ArtefactError, MissingPackageError, install
from runtimes.base.files import open_file, reading
from xl_export.importers import tensorflow_child
from xl_export.importers.pickle.tensors import read_npz_tensors

PARTS = re.compile(r"(.+)\.(index|meta|data-\d+-of-\d+)", re.DOTALL)
STATE = "checkpoint"
NEWEST = re.compile(rb'\s*model_checkpoint_path:\s*"([^"\n]+)"')
# The process may need START_SECONDS to start, and then the time to read its file at this rate.
START_SECONDS = 300
BYTES_PER_SECOND = 5_000_000
MAX_UNPACKED_RATIO = 4  # variables may be compressed, up to this factor
EXTRA_BYTES = 1 << 20
STATE_BYTES = 1 << 16
# Python puts the current folder first on the module path, and would execute an untrusted numpy.py there.
PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    f"from {tensorflow_child.__name__} import main; sys.exit(main(*sys.argv[1:]))"
)


def find_prefix(path: Path) -> Path | None:
    """Returns the prefix of the checkpoint that a path means; None if it means none.

    path: a prefix, one of the checkpoint's files, the file `checkpoint`, or a folder. Raises ArtefactError
    for a folder with several checkpoints of which none is the newest.
    """
    if path.is_dir():
        return _in_folder(path)
    if path.name == STATE and path.is_file() and _newest(path) is not None:
        return _in_folder(path.parent)
    match = PARTS.fullmatch(path.name)
    if match and path.is_file() and _is_index(_index(path.with_name(match[1]))):
        return path.with_name(match[1])
    return path if _index(path).is_file() else None


def files_of(prefix: Path) -> dict[str, Path]:
    """Returns the files that hold the variables, by role."""
    shards = sorted(
        path
        for path in prefix.parent.iterdir()
        if path.name.startswith(prefix.name + ".data-") and path.is_file()
    )
    return {"model": _index(prefix)} | {f"data {number}": path for number, path in enumerate(shards, 1)}


def read_variables(prefix: Path) -> Mapping[str, Tensor]:
    """Returns the variables of a checkpoint by name, without the optimiser's.

    Raises MissingPackageError if TensorFlow is not installed, ArtefactError if it cannot read the file.
    """
    if PathFinder.find_spec("tensorflow", _module_path()) is None:
        raise MissingPackageError(
            f"{prefix} is a TensorFlow checkpoint and TensorFlow is not installed; run "
            f"{install('tensorflow')}, or make an .npz file of it on another machine "
            "with the lines in `xl-export import --help`."
        )
    size = sum(path.stat().st_size for path in files_of(prefix).values() if path.is_file())
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "variables.npz"
        _run_child(prefix, out, size)
        return read_npz_tensors(out)


def _module_path() -> list[str]:
    """Returns the folders of Python's modules without the current folder, which may hold a stranger's files.

    The folder of this package comes last, because it may be the current one.
    """
    here = os.path.realpath(os.curdir)
    root = str(Path(__file__).resolve().parents[2])
    return [os.path.abspath(path) for path in sys.path if os.path.realpath(path) not in (here, root)] + [root]


def _run_child(prefix: Path, out: Path, size: int) -> None:
    """Lets a process write the variables; raises ArtefactError if it fails or takes too long."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(_module_path())}
    limit = MAX_UNPACKED_RATIO * size + EXTRA_BYTES
    seconds = START_SECONDS + size / BYTES_PER_SECOND
    command = [sys.executable, "-c", PROGRAM, str(prefix.absolute()), str(out), str(limit)]
    reason = "it took too long"
    try:
        ended = subprocess.run(
            command,
            cwd=out.parent,
            env=environment,
            capture_output=True,
            errors="replace",
            timeout=seconds,
        )
        if ended.returncode == 0:
            return
        lines = ended.stderr.strip().splitlines()
        reason = f"its reader ended with status {ended.returncode}"
        if ended.returncode == tensorflow_child.REFUSED_STATUS and lines:
            reason = "".join(c if c.isprintable() else "?" for c in lines[-1][:200]).rstrip(".")
    except subprocess.TimeoutExpired:
        pass
    raise ArtefactError(
        f"{prefix} is a TensorFlow checkpoint that TensorFlow could not read ({reason}); give a checkpoint "
        "whose .index and .data files are whole and lie in one folder."
    )


def _in_folder(folder: Path) -> Path | None:
    newest = _newest(folder / STATE) if (folder / STATE).is_file() else None
    if newest and _index(folder / newest).is_file():
        return folder / newest
    found = sorted(path.name for path in folder.glob("*.index") if _is_index(path))
    if len(found) > 1:
        raise ArtefactError(
            f"{folder} has {len(found)} TensorFlow checkpoints, such as {found[0]} and {found[1]}; name one."
        )
    return folder / found[0].removesuffix(".index") if found else None


def _is_index(path: Path) -> bool:
    """Whether a file has the name of an index, and there are files of variables for it if that is needed.

    The names of many other files end in `.index`.
    """
    prefix = path.name.removesuffix(".index")
    return ".ckpt" in prefix or any(
        other.name.startswith(prefix + ".data-") for other in path.parent.glob("*.data-*")
    )


def _newest(state: Path) -> str | None:
    """Returns the name in the file `checkpoint`; its folder may be on another machine."""
    with reading(state), open_file(state) as stream:
        match = NEWEST.match(stream.read(STATE_BYTES))
    if match is None:
        return None
    name = match[1].decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return name if name.isprintable() and name not in ("", ".", "..") else None


def _index(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".index")
