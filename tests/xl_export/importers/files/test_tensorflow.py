"""TensorFlow checkpoints are read by TensorFlow, in a process of its own. A stand-in for the package is used
where it is not installed, and the package itself where it is.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.commands import refused, xl
from tests.xl_export.importers.oracles import DATA, assert_same_tensors, read
from tests.xl_export.importers.tensorflow_variables import variables_of
from xl_export.importers import tensorflow_checkpoint
from xl_export.importers.shared.checkpoint import Checkpoint
from xl_export.importers.tensorflow_checkpoint import find_prefix

BYTES = DATA / "kimiyoung-enwik8"
VOCAB = ("--vocab", BYTES / "cache.pt")
INSTALLED = importlib.util.find_spec("tensorflow") is not None
STAND_IN = '''
"""Reads checkpoints as TensorFlow does, from an .npz file in the place of the data."""
import os, numpy

class Type:
    def __init__(self, dtype): self.as_numpy_dtype = dtype.type

class Reader:
    def __init__(self, prefix):
        if open(prefix + ".index").read() == "kill":
            os.abort()
        if open(prefix + ".index").read() != "whole":
            raise RuntimeError("Unable to open table file\\nsecond line")
        self.arrays = numpy.load(prefix + ".data-00000-of-00001")
    def get_variable_to_shape_map(self):
        found = {name: list(self.arrays[name].shape) for name in self.arrays}
        return found | ({"huge": [1 << 40]} if "huge" in found else {})
    def get_variable_to_dtype_map(self): return {name: Type(self.arrays[name].dtype) for name in self.arrays}
    def get_tensor(self, name): return self.arrays[name]

class train:
    load_checkpoint = Reader
'''


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    """The model of an oracle, whose variables are then written as TensorFlow has them."""
    return read(BYTES)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packages" / "tensorflow").mkdir(parents=True)
    (tmp_path / "packages" / "tensorflow" / "__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "packages")


def write(folder: Path, variables: dict[str, np.ndarray], index: str = "whole") -> Path:
    """A checkpoint as the stand-in reads it; returns its prefix."""
    folder.mkdir(exist_ok=True)
    (folder / "model.ckpt-7.index").write_text(index)
    with open(folder / "model.ckpt-7.data-00000-of-00001", "wb") as stream:
        np.savez(stream, **variables)
    (folder / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/model.ckpt-7"\n')
    return folder / "model.ckpt-7"


def check_model(source: Path, model: Checkpoint) -> Checkpoint:
    found = read(source, BYTES / "cache.pt")
    assert_same_tensors(model, found, without={"positions.frequencies"})  # which TensorFlow computes
    return found


@pytest.mark.usefixtures("stand_in")
def test_prefix_file_and_folder_give_the_same_model(model: Checkpoint, tmp_path: Path) -> None:
    prefix = write(tmp_path / "source", variables_of(model))
    assert "data 1" in check_model(prefix, model).files
    for path in (prefix.parent, prefix.parent / "checkpoint", *prefix.parent.glob("model.ckpt-7.*")):
        assert find_prefix(path) == prefix
    (prefix.parent / "checkpoint").unlink()
    assert find_prefix(prefix.parent) == prefix


@pytest.mark.usefixtures("stand_in")
def test_what_tensorflow_cannot_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    words = "is a TensorFlow checkpoint that TensorFlow could not read"
    prefix = write(tmp_path / "source", {}, "broken")
    refused(xl("import", prefix, "--describe", *VOCAB), f"{words} (Unable to open table file); give")
    write(prefix.parent, {}, "kill")
    refused(xl("import", prefix, "--describe", *VOCAB), f"{words} (its reader ended with status -")
    write(prefix.parent, {"huge": np.zeros(1, np.float32)})
    refused(xl("import", prefix, "--describe", *VOCAB), words, "it claims 4,398,046,511,104 bytes")
    write(prefix.parent, {"other": np.zeros(1, np.float32)})
    refused(
        xl("import", prefix, "--describe", *VOCAB),
        "holds the tensors of a model that is not known here, such as other",
    )


@pytest.mark.usefixtures("stand_in")
def test_no_module_of_the_current_folder_is_executed(
    model: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has that folder first on its module path, and a stranger's files may lie there."""
    prefix, here = write(tmp_path / "source", variables_of(model)), tmp_path / "here"
    here.mkdir()
    for name in ("numpy", "tensorflow", "sitecustomize"):
        (here / f"{name}.py").write_text(f"open({str(here / 'executed')!r}, 'w')")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", f"{here}:.:")
    check_model(prefix, model)
    assert not (here / "executed").exists()


@pytest.mark.usefixtures("stand_in")
def test_a_reader_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "tensorflow" / "__init__.py"
    package.write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(tensorflow_checkpoint, "START_SECONDS", 0.2)
    prefix = write(tmp_path / "source", {})
    refused(xl("import", prefix, "--describe", *VOCAB), "could not read (it took too long)")


def test_a_folder_of_several_checkpoints_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"model.ckpt-{number}.index").write_bytes(b"0")
    refused(xl("import", tmp_path, "--describe"), "2 TensorFlow checkpoints, such as", "name one")
    for name in ("../../model.ckpt-2", "/elsewhere/model.ckpt-2", r"C:\\elsewhere\\model.ckpt-2"):
        (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{name}"\n')
        assert find_prefix(tmp_path) == tmp_path / "model.ckpt-2"
    # A name may not lead to a file outside of the folder, or to one that a terminal would obey.
    tmp_path.with_name(tmp_path.name + ".index").touch()
    (tmp_path / "x\x1b").touch()
    for name in ("elsewhere/", "elsewhere/.", "x\x1b"):
        (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{name}"\n')
        refused(xl("import", tmp_path, "--describe"), "2 TensorFlow checkpoints")


def test_other_files_are_not_taken_for_such_a_checkpoint(tmp_path: Path) -> None:
    for name in ("checkpoint", "model.pt", "words.index"):
        (tmp_path / name).write_bytes(b"0")
        assert find_prefix(tmp_path / name) is None
    assert find_prefix(tmp_path) is None


@pytest.mark.skipif(INSTALLED, reason="TensorFlow is installed")
def test_without_tensorflow_the_extra_and_the_other_way_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorflow.py").touch()  # no package of the current folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    refused(
        xl("import", write(tmp_path, {}), "--describe"),
        "is a TensorFlow checkpoint and TensorFlow is not installed",
        "'tensorflow>=2.13'`",
        "make an .npz file of it",
    )


WRITER = """
import sys, numpy, tensorflow
tensorflow.compat.v1.disable_eager_execution()
v1 = tensorflow.compat.v1
with v1.Session() as session, numpy.load(sys.argv[1]) as arrays:
    variables = [v1.Variable(arrays[name], name=name) for name in arrays.files]
    session.run(v1.global_variables_initializer())
    v1.train.Saver(variables).save(session, sys.argv[2], global_step=7)
"""


def write_with_tensorflow(folder: Path, variables: dict[str, np.ndarray]) -> Path:
    """The prefix of a checkpoint with these variables, as a Saver of TensorFlow 1 writes it."""
    folder.mkdir()
    np.savez(folder.parent / "arrays.npz", **variables)
    arguments = [folder.parent / "arrays.npz", folder / "model.ckpt"]
    subprocess.run([sys.executable, "-c", WRITER, *arguments], check=True)
    return folder / "model.ckpt-7"


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="TensorFlow is not installed: pip install '.[tensorflow]'")
def test_tensorflow_itself_reads_what_it_wrote(model: Checkpoint, tmp_path: Path) -> None:
    """Damage is refused."""
    variables = variables_of(model)
    variables["transformer/r_w_bias/Adam_1"] = np.zeros((4, 12), np.float32)
    prefix = write_with_tensorflow(tmp_path / "source", variables)
    check_model(prefix, model)
    check_model(prefix.parent, model)
    draw = np.random.default_rng(3)
    for path in tensorflow_checkpoint.files_of(prefix).values():
        whole = path.read_bytes()
        at = int(draw.integers(len(whole) - 8))
        path.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
        refused(xl("import", prefix, "--describe", *VOCAB), "TensorFlow could not read (")
        path.write_bytes(whole)
