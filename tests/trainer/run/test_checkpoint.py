"""A run on disk: what is saved comes back, and what does not fit is refused with the file and tensor
named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import trainer.run.checkpoint as checkpoint
from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.files import write_json
from trainer.run.checkpoint import load_run, load_tensors, save_tensors
from trainer.run.config import TrainConfig

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2, 3]), "empty": torch.zeros(2, 0, 4)}


@pytest.fixture
def trained(stopped: Callable[..., Path], make_config: Callable[..., TrainConfig]) -> Path:
    return stopped(make_config(steps=2), None)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = TENSORS | {
        "view": torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    save_tensors(path, tensors, {"step": "3", "text": "é"})
    loaded, facts = load_tensors(path, expected=tensors)
    assert facts == {"step": "3", "text": "é"}
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    ("tensors", "expected", "message"),
    [
        ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}, "lacks the tensor b"),
        ({"a": torch.ones(2), "c": torch.ones(1)}, {"a": torch.ones(2)}, "has the tensor c"),
        ({"a": torch.ones(6)}, {"a": torch.ones(6, 1)}, r"a is torch\.float32 \[6\], expected .* \[6, 1\]"),
        (
            {"a": torch.ones(2).half()},
            {"a": torch.ones(2)},
            r"a is torch\.float16 .*, expected torch\.float32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor], message: str
) -> None:
    save_tensors(tmp_path / "x.safetensors", tensors)
    with pytest.raises(ArtefactError, match=rf"x\.safetensors.*{message}"):
        load_tensors(tmp_path / "x.safetensors", expected=expected)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:100], "is missing or damaged"),
        (lambda data: data[:-1], "is missing or damaged"),
        (lambda data: (1 << 60).to_bytes(8, "little") + data[8:], "is missing or damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "was altered: the SHA-256 of its tensors"),
    ],
    ids=["header cut", "data cut", "absurd header size", "another bit"],
)
def test_a_damaged_file_is_refused_and_named(
    trained: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    path = trained / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ArtefactError, match=rf"model\.safetensors {words}"):
        load_run(trained)
    path.unlink()
    with pytest.raises(ArtefactError, match=r"model\.safetensors is missing or damaged"):
        load_run(trained)


def test_a_run_without_hashes_is_read(trained: Path) -> None:
    path = trained / "model.safetensors"
    tensors = checkpoint.load_tensors(path, expected=load_run(trained).model.state_dict())[0]
    save_file(tensors, path, {"step": "2"})
    assert load_run(trained).config.steps == 2


def test_equal_tensors_and_metadata_make_equal_files(tmp_path: Path) -> None:
    facts = {"step": "3", "text": 'é \x01 \\ "', "other": "\x7f\n"}
    files = [tmp_path / f"{number}.safetensors" for number in range(20)]
    for path in files:
        save_tensors(path, TENSORS, facts)
    assert len({path.read_bytes() for path in files}) == 1
    assert load_tensors(files[0], expected=TENSORS)[1] == facts


def test_the_hash_is_of_names_types_shapes_and_bytes() -> None:
    same = dict(reversed(TENSORS.items()))
    assert checkpoint.tensors_sha256(same) == checkpoint.tensors_sha256(TENSORS)
    others: list[dict[str, Tensor]] = [
        {"c": TENSORS["a"]},
        {"a": TENSORS["a"].view(3, 2)},
        {"a": TENSORS["a"].int()},
        {"a": TENSORS["a"] + 1},
        {"a": TENSORS["a"].bfloat16()},
        {"a": torch.tensor(1.0)},
    ]
    assert len({checkpoint.tensors_sha256(tensors) for tensors in others}) == len(others)


def test_weights_of_another_model_are_refused(trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    config["model"]["d_ff"] = 25
    write_json(trained / "config.json", config)
    with pytest.raises(
        ArtefactError,
        match=r"model\.safetensors: blocks\.0\.expand\.weight is .* \[24, 16\], expected .* \[25, 16\]",
    ):
        load_run(trained)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """The real library on a file that may not grow: it raises an error of its own, not an OSError."""
    import resource
    import signal

    path = tmp_path / "x.safetensors"
    save_tensors(path, TENSORS)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"x\.safetensors could not be written"):
            save_tensors(path, {"a": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
