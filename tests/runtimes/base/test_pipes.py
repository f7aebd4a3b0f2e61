"""A pipe, a device or a folder in place of a file is refused at once: nobody may ever write into a pipe."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.files import open_file, read_bytes, read_json, sha256
from runtimes.base.npz import read_npz
from tests.commands import refused, xl


class Waited(BaseException):  # no Exception: it must not become a sentence
    """A call waited for somebody who writes into a pipe."""


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    def wake(number: int, frame: object) -> None:
        raise Waited

    before = signal.signal(signal.SIGALRM, wake)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_only_files_are_opened(pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_file(tmp_path / name) as stream:
            assert stream.read() == b"content"
    for read in (open_file, sha256):
        with pytest.raises(OSError, match="a named pipe and not a file"):
            read(pipe)
        with pytest.raises(OSError, match="a device and not a file"):
            read(Path("/dev/zero"))
        with pytest.raises(IsADirectoryError):
            read(tmp_path)
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "missing")
    with pytest.raises(UserError, match="pipe could not be read: It is a named pipe"):
        read_bytes(pipe)
    with pytest.raises(ArtefactError, match="pipe could not be read: It is a named pipe"):
        read_json(pipe)
    with pytest.raises(ArtefactError, match=r"pipe is not a readable \.npz file .*a named pipe"):
        read_npz(pipe)


def replaced(folder: Path, name: str, copy: Path) -> Path:
    """A copy of a folder in which a pipe has taken the place of one file."""
    shutil.copytree(folder, copy)
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    return copy


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "training.safetensors"])
def test_a_pipe_in_a_run_is_refused(name: str, run: Path, tmp_path: Path) -> None:
    folder = replaced(run, name, tmp_path / "run")
    if name == "training.safetensors":
        refused(xl("train", "--resume", folder), "training.safetensors")
    else:
        refused(xl("info", folder), str(folder))
        refused(xl("import", folder, "--describe"), str(folder))


@pytest.mark.parametrize("name", ["spec.json", "weights.bin", "fused.onnx"])
def test_a_pipe_in_an_artefact_is_refused(name: str, artefacts: dict[str, Path], tmp_path: Path) -> None:
    assert (artefacts["ring"] / name).is_file()
    refused(xl("check", replaced(artefacts["ring"], name, tmp_path / "artefact")), str(tmp_path / "artefact"))


def test_a_pipe_instead_of_a_given_file_is_refused(
    run: Path, artefacts: dict[str, Path], pipe: Path, tmp_path: Path
) -> None:
    refused(xl("eval", artefacts["ring"], "--text", pipe), str(pipe), "a named pipe")
    refused(xl("eval", artefacts["ring"], "--text", "/dev/zero"), "/dev/zero", "a device")
    refused(xl("generate", artefacts["ring"], "--prompt", "a", "--load-memory", pipe), str(pipe))
    refused(xl("train", "tiny", "--text", pipe, "--out", tmp_path / "new"), str(pipe), "a named pipe")
    refused(xl("train", pipe, "--out", tmp_path / "new"), str(pipe))
    refused(xl("train", "tiny", "--data", pipe, "--out", tmp_path / "new"), str(pipe))
    refused(xl("prepare", "enwik8", "--from", pipe, "--out", tmp_path / "new"), str(pipe))
    refused(xl("import", pipe, "--describe"), str(pipe))
    for name in ("pipe.npz", "pipe.safetensors", "pipe.json"):
        os.mkfifo(tmp_path / name)
        refused(xl("import", tmp_path / name, "--describe"), str(tmp_path))
    (tmp_path / "dataset").mkdir()
    for name in ("data.json", "test.bin"):
        os.mkfifo(tmp_path / "dataset" / name)
    refused(xl("eval", artefacts["ring"], "--text", tmp_path / "dataset"), str(tmp_path / "dataset"))
    assert not (tmp_path / "new").exists()


def test_a_pipe_instead_of_checkpoint_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "transfo-xl"}))
    os.mkfifo(tmp_path / "model.safetensors")
    refused(xl("import", tmp_path, "--describe"), str(tmp_path))
