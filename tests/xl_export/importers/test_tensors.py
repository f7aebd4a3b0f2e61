"""Shapes, strides and sizes that a file gives are checked against what it holds."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runtimes.base.errors import ArtefactError, UserError
from tests.xl_export.importers.forge import (
    call,
    name,
    number,
    numbers,
    program,
    storage,
    tensor,
    text,
    zip_container,
)
from tests.xl_export.importers.test_refusals import refused
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.tensors import read_npz_tensors, read_safetensors

FOUR = {"0": struct.pack("<4f", 1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((5,), (1,), 0),
        ((4,), (1,), 1),
        ((2,), (4,), 0),
        ((2, 2), (2, 1), 1),
        ((1,), (1,), 4),
        ((), (), 4),
        ((0,), (1,), 5),
        ((2, 1 << 40), (1, 0), 0),  # no more bytes than are there, and a terabyte for whoever copies it
        ((1 << 61, 1 << 61), (1, 1), 0),
        ((1 << 70,), (1,), 0),
        ((-1,), (1,), 0),
        ((2,), (-1,), 3),
        ((2,), (1,), -1),
        ((2, 2), (1,), 0),
        ((1,) * 9, (1,) * 9, 0),
    ],
)
def test_a_tensor_that_does_not_fit_its_storage_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, tmp_path: Path
) -> None:
    data = program(tensor(storage(4), shape, strides, offset=offset))
    refused(tmp_path / "file", zip_container(data, FOUR), "tensor")


def test_a_tensor_that_torch_expanded_is_read(tmp_path: Path) -> None:
    """A stride of 0 repeats elements, so a tensor may have more of them than its storage."""
    for kept in (torch.arange(3.0)[:, None].expand(3, 8), torch.tensor(2.0).expand(5)):
        torch.save(kept, tmp_path / "file")
        found = read_pickle(tmp_path / "file")
        assert torch.equal(found, kept)
        assert found.stride() == kept.stride()


@pytest.mark.parametrize("bad", [text("2"), b"G" + struct.pack(">d", 2.0), b"\x88", b"N", b"]"])
def test_a_shape_consists_of_whole_numbers(bad: bytes, tmp_path: Path) -> None:
    for arguments in (
        (storage(4), bad, numbers(2), numbers(1)),
        (storage(4), number(0), bad + b"\x85", numbers(1)),
        (storage(4), number(0), numbers(2), bad + b"\x85"),
        (storage(4), number(0), bad, bad),
        (bad, number(0), numbers(2), numbers(1)),
    ):
        data = program(call("torch._utils._rebuild_tensor_v2", *arguments, b"\x89", b"N"))
        refused(tmp_path / "file", zip_container(data, FOUR), "makes a tensor")


def test_storages_are_described_once_and_within_the_file(tmp_path: Path) -> None:
    def pair(one: bytes, other: bytes) -> bytes:
        return zip_container(program(one, other, b"\x86"), FOUR)

    for other in (storage(3), storage(4, kind="torch.IntStorage"), storage(4, kind="torch.HalfStorage")):
        refused(tmp_path / "file", pair(storage(4), other), "in two ways")
    for count in (-1, 1 << 20, 1 << 62, 10**400):
        refused(tmp_path / "file", zip_container(program(storage(count)), FOUR), "has a storage")
    refused(tmp_path / "file", pair(storage(150), storage(150, key="1")), "too many for its file")
    refused(
        tmp_path / "file",
        zip_container(program(storage(4, kind="torch.BoolStorage")), {"0": b"\0\1\2\1"}),
        "booleans",
    )
    refused(
        tmp_path / "file",
        zip_container(program(storage(4, kind="torch.QInt8Storage")), FOUR),
        "torch.QInt8Storage",
    )
    refused(tmp_path / "file", zip_container(program(storage(4, kind="torch.Size")), FOUR), "torch.Size")
    for key in (b"K\x00", b"N", b"]"):
        flat = b"(" + text("storage") + name("torch.FloatStorage") + key + text("cpu") + number(4) + b"tQ"
        refused(tmp_path / "file", zip_container(program(flat), FOUR), "has a storage")


def test_views_hold_few_times_the_bytes_of_a_file(tmp_path: Path) -> None:
    one = tensor(b"h\x00", (1 << 16,), (1,))
    for count in (3, 6):
        data = program(storage(1 << 16) + b"q\x00(" + one * count + b"t")
        content = zip_container(data, {"0": bytes(4 << 16)})
        if count == 3:
            (tmp_path / "file").write_bytes(content)
            assert len(read_pickle(tmp_path / "file")) == 3
        else:
            refused(tmp_path / "file", content, "4 times the bytes")


def test_safetensors_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    content = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(content, path)
    read = read_safetensors(path)
    assert list(read) == ["a", "b"]
    assert all(torch.equal(read[key], content[key]) for key in content)
    whole = path.read_bytes()
    for damaged in (
        b"",
        whole[:7],
        whole[:-1],
        whole + b"\0",
        struct.pack("<Q", 1 << 62) + whole[8:],
        whole.replace(b"[2,3]", b"[2,4]"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ArtefactError, match="is not a readable safetensors file"):
            read_safetensors(path)
    with pytest.raises(UserError, match="none could not be read"):
        read_safetensors(tmp_path / "none")


def test_npz_files_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(path, **{"layer_0/ff/kernel": kernel, "b": np.int64(7)})  # TensorFlow's names
    read = read_npz_tensors(path)
    assert read["layer_0/ff/kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read["b"].item() == 7
    for odd in (np.array(["text"]), np.arange(3, dtype=">f4"), np.zeros(2, "V2")):
        np.savez(path, fine=np.zeros(1), odd=odd)
        with pytest.raises(ArtefactError, match="odd is of the type"):
            read_npz_tensors(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("fine", archive.read("fine.npy"))
    with pytest.raises(ArtefactError, match="two arrays of one name"):
        read_npz_tensors(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ArtefactError, match=r"weights\.npz"):
        read_npz_tensors(path)
