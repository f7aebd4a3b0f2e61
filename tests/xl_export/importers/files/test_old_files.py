"""What files of other years and setups hold: wrappers of modules, scripts as modules, half numbers."""

from __future__ import annotations

import argparse
import collections
import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.commands import refused, xl
from tests.xl_export.importers.forge import call, in_every_container, name, program, text
from tests.xl_export.importers.oracles import DATA
from xl_export.importers import formats, kimiyoung
from xl_export.importers.pickle import read
from xl_export.importers.pickle.values import Foreign
from xl_export.importers.shared.checkpoint import ImportOptions
from xl_export.importers.shared.pickled_module import module_tensors
from xl_export.importers.shared.state_dict import unwrapped

BYTES = DATA / "kimiyoung-enwik8"


def wrapped(inner: Any, class_name: str) -> Foreign:
    return Foreign(class_name, state={"training": True, "_modules": {"module": inner}})


@pytest.mark.parametrize(
    "classes",
    [
        ["fp16_opt.FP16_Module"],
        ["torch.nn.parallel.data_parallel.DataParallel"],
        ["torch.nn.parallel.distributed.DistributedDataParallel", "fp16_opt.FP16_Module"],
        ["apex.parallel.distributed.DistributedDataParallel"],
    ],
)
def test_modules_around_the_model_are_taken_off(
    classes: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`train.py --fp16` of kimiyoung writes its FP16_Module, and users write what they trained."""
    module = read.read_pickle(BYTES / "model.pt")
    for class_name in reversed(classes):
        module = wrapped(module, class_name)
        (tmp_path / "file").write_bytes(program(name(class_name) + b")\x81}" + text("training") + b"\x88sb"))
        assert read.read_pickle(tmp_path / "file").name == class_name  # it may stand in a file
    for content in (module, {"epoch": 3, "model": module}):
        monkeypatch.setattr(formats, "read_pickle", lambda path, content=content: content)
        opened = formats.open_source(BYTES / "model.pt")
        checkpoint = kimiyoung.PROJECT.read(opened, ImportOptions())
        assert checkpoint.config.layers == 4


def test_a_wrapper_that_may_compute_is_not_taken_off() -> None:
    module = wrapped(read.read_pickle(BYTES / "model.pt"), "mem_transformer.ScaledModel")
    assert unwrapped(module) is module


def test_a_class_of_the_script_itself_is_a_model_too(tmp_path: Path) -> None:
    """A model that was written in a notebook or a training script is of the module `__main__`."""
    state = read.read_pickle(BYTES / "model.pt")
    (tmp_path / "file").write_bytes(program(call("__main__.MemTransformerLM")))
    found = read.read_pickle(tmp_path / "file")
    assert found.name == "__main__.MemTransformerLM"
    found.state = state.state
    assert kimiyoung.PROJECT.recognises(formats.Source(path=BYTES / "model.pt", content=found))
    for container, data in in_every_container(program(call("__main__.run", text("x")))).items():
        (tmp_path / container).write_bytes(data)
        refused(xl("import", tmp_path / container, "--describe"), "calls __main__.run,")


def test_a_checkpoint_of_brain_floats_that_are_not_contiguous(tmp_path: Path) -> None:
    state = dict(module_tensors(read.read_pickle(BYTES / "model.pt"), BYTES))
    turned = {
        key: x.bfloat16().T.contiguous().T if x.dim() == 2 else x.bfloat16() for key, x in state.items()
    }
    turned["r_w_bias"] = state["r_w_bias"].double()
    torch.save(turned, tmp_path / "state.pt")
    options = ("--vocab", BYTES / "cache.pt", "--mem-len", 20, "--segment", 8)
    result = xl("import", tmp_path / "state.pt", "--out", tmp_path / "run", *options)
    assert "weights were stored as bfloat16 and are float32 now" in result.output, result.output
    assert "weights were stored as float64 and are float32 now" in result.output


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_numbers_of_numpy_are_numbers(protocol: int, tmp_path: Path) -> None:
    """As `best_val_loss` of NumPy in a checkpoint, written by NumPy 1 or 2."""
    content = {"loss": np.float64(1.5), "step": np.int64(-3), "half": np.float16(0.5), "on": np.bool_(True)}
    data = pickle.dumps(content, protocol)
    old = data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    for number, written in enumerate([data, old] if protocol == 2 else [data]):
        (tmp_path / f"file{number}").write_bytes(written)
        assert read.read_pickle(tmp_path / f"file{number}") == {
            "loss": 1.5,
            "step": -3,
            "half": 0.5,
            "on": True,
        }


def test_what_a_training_keeps_beside_its_weights_is_passed_over(tmp_path: Path) -> None:
    optimizer = object.__new__(torch.optim.Adam)  # its constructor imports much of PyTorch
    optimizer.__dict__ |= {
        "defaults": {"lr": 0.1},
        "state": collections.defaultdict(dict),
        "param_groups": [],
    }
    scheduler = object.__new__(torch.optim.lr_scheduler.CosineAnnealingLR)
    scheduler.__dict__ |= {"optimizer": optimizer, "T_max": 3}
    content = {
        "optimizer": optimizer,
        "scheduler": scheduler,
        "args": argparse.Namespace(work_dir=Path("/x/y"), begun=datetime.timedelta(3)),
        "version": torch.__version__,
        "losses": collections.deque([1.5]),
        "model": {"key_pe": torch.zeros(2)},
    }
    torch.save(content, tmp_path / "model.pt")
    refused(xl("import", tmp_path / "model.pt", "--describe"), "key_pe is [2], expected 3 dimensions")
