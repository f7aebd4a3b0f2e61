"""Damaged and lying containers: each is refused with one sentence that says what is wrong, before memory is
taken."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from runtimes.base.errors import UserError
from tests.xl_export.importers.forge import (
    SYSTEM,
    legacy_container,
    program,
    storage,
    tensor,
    zip_container,
)
from tests.xl_export.importers.test_refusals import refused
from xl_export.importers.pickle.read import LEGACY_MAGIC, read_pickle

DATA = Path(__file__).parents[2] / "data"
CONTENT = program(tensor(storage(4), (2, 2), (2, 1)))
NUMBERS = struct.pack("<4f", 1, 2, 3, 4)


def test_forged_containers_are_readable(tmp_path: Path) -> None:
    of_legacy = program(tensor(storage(4, more=b"N"), (2, 2), (2, 1)))  # PyTorch reads only such there
    for data in (zip_container(CONTENT, {"0": NUMBERS}), legacy_container(of_legacy, {"0": (4, NUMBERS)})):
        (tmp_path / "file").write_bytes(data)
        assert read_pickle(tmp_path / "file").tolist() == [[1, 2], [3, 4]]
        assert torch.load(tmp_path / "file", weights_only=True).tolist() == [[1, 2], [3, 4]]


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe"):
        with pytest.raises(UserError, match="could not be read"):
            read_pickle(path)
    refused(tmp_path / "file", b"", "is empty")
    cut = zip_container(CONTENT, {"0": NUMBERS})[:-30]
    refused(tmp_path / "file", cut, "is a damaged zip archive (its end is missing)")
    for other in (b"text of a reader", b"\x89PNG\r\n\x1a\n" + bytes(40), bytes(100)):
        refused(tmp_path / "file", other, "is no checkpoint, and nothing in it was run")


def member_offset(data: bytes, member: str) -> int:
    """Where the content of a member lies."""
    at = data.index(member.encode())
    return at + len(member)


def test_a_bad_crc_is_refused(tmp_path: Path) -> None:
    whole = zip_container(CONTENT, {"0": NUMBERS})
    for member in ("forged/data.pkl", "forged/byteorder", "forged/data/0"):
        at = member_offset(whole, member)
        refused(tmp_path / "file", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :], "CRC", member)
    large = zip_container(program(tensor(storage(1 << 20), (1 << 20,), (1,))), {"0": bytes(4 << 20)})
    at = member_offset(large, "forged/data/0") + (4 << 20) - 1
    refused(tmp_path / "file", large[:at] + b"\1" + large[at + 1 :], "CRC", "forged/data/0")


@pytest.mark.parametrize(
    "file", ["kimiyoung-ptb-full-mask/model.pt", "kimiyoung-ptb-full-mask/model_legacy.pt"]
)
def test_a_truncated_file_is_refused(file: str, tmp_path: Path) -> None:
    whole = (DATA / file).read_bytes()
    for keep in [*range(1, 20), *np.linspace(20, len(whole) - 1, 20).astype(int).tolist()]:
        refused(tmp_path / "file", whole[:keep])


@pytest.mark.parametrize("sealed", [False, True])
def test_changed_bytes_are_read_or_refused_in_one_sentence(sealed: bool, tmp_path: Path) -> None:
    """sealed: the bytes of the pickle change, and the container around it fits them."""
    draw, messages = np.random.default_rng(int(sealed)), []
    weights = torch.nn.Linear(3, 4).state_dict()
    content = {"state": weights, "words": ["<eos>", "a"], "args": argparse.Namespace(lr=0.1, seen={1, "a"})}
    torch.save(content, tmp_path / "file", _use_new_zipfile_serialization=sealed)
    whole = (tmp_path / "file").read_bytes()
    if sealed:
        with zipfile.ZipFile(tmp_path / "file") as file:
            (name,) = (member for member in file.namelist() if member.endswith("data.pkl"))
            whole = file.read(name)
    for _ in range(200):
        at, length = (int(draw.integers(most)) for most in (len(whole), 5))
        data = whole[:at] + draw.bytes(length) + whole[at + length * int(draw.integers(2)) :]
        (tmp_path / "file").write_bytes(zip_container(data) if sealed else data)
        try:
            read_pickle(tmp_path / "file")
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(text.isprintable() and text.endswith(".") and len(text) < 600 for text in messages)


def test_zip_members_must_be_stored_with_the_right_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    refused(path, zip_container(CONTENT), "lacks the member forged/data/0")
    refused(path, zip_container(CONTENT, {"1": NUMBERS}), "lacks the member forged/data/0")
    refused(path, zip_container(CONTENT, {"0": NUMBERS[:-1]}), "15 bytes in forged/data/0", "4 torch.float32")
    refused(path, zip_container(CONTENT, {"0": NUMBERS + b"\0"}), "17 bytes in forged/data/0")
    refused(
        path, zip_container(CONTENT, {"0": NUMBERS}, compression=zipfile.ZIP_DEFLATED), "compressed member"
    )
    bomb = zip_container(
        program(tensor(storage(1 << 20), (1 << 20,), (1,))),
        {"0": bytes(1 << 22)},
        compression=zipfile.ZIP_DEFLATED,
    )
    refused(path, bomb, "compressed member")


def archive(members: dict[str, bytes], path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as file:
        for member, content in members.items():
            file.writestr(member, content)
    return path.read_bytes()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_other_archives_are_refused(tmp_path: Path) -> None:
    good = {"a/data.pkl": program(b"N")}
    path = tmp_path / "file"
    refused(path, archive({"word/document.xml": b"x"}, path), "NAME/data.pkl")
    refused(path, archive({"data.pkl": program(b"N")}, path), "NAME/data.pkl")
    refused(path, archive({**good, "b/data.pkl": program(b"N")}, path), "NAME/data.pkl")
    refused(path, archive({**good, "a/byteorder": b"big"}, path), "byte order", "big")
    with zipfile.ZipFile(path, "w") as file:
        for _ in range(2):
            file.writestr("a/data.pkl", program(b"N"))
    refused(path, path.read_bytes(), "twice")
    encrypted = bytearray(archive(good, path))
    encrypted[6] |= 1
    encrypted[encrypted.index(b"PK\1\2") + 8] |= 1
    refused(path, bytes(encrypted), "encrypted")


def test_lying_sizes_in_the_directory_of_a_zip_are_refused(tmp_path: Path) -> None:
    whole = zip_container(CONTENT, {"0": NUMBERS})
    directory = whole.index(b"PK\1\2")
    entries = [at for at in range(directory, len(whole)) if whole[at : at + 4] == b"PK\1\2"]
    for entry in entries[:3]:  # of data.pkl, byteorder and the storage
        for claim in (0, 1, 17, 1 << 20, 0xFFFFFFFE):
            sizes = struct.pack("<II", claim, claim)
            refused(tmp_path / "file", whole[: entry + 20] + sizes + whole[entry + 28 :])
            refused(tmp_path / "file", whole[: entry + 24] + sizes[4:] + whole[entry + 28 :])
    for at in range(len(whole) - 22, len(whole)):  # the end record: counts, sizes and offsets
        (tmp_path / "file").write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(UserError):
            assert read_pickle(tmp_path / "file").tolist() == [[1, 2], [3, 4]]


def test_a_legacy_file_must_be_what_it_says(tmp_path: Path) -> None:
    path, good = tmp_path / "file", {"0": (4, NUMBERS)}
    other = LEGACY_MAGIC + 1  # a bare number
    path.write_bytes(legacy_container(CONTENT, magic=other))
    assert read_pickle(path) == other
    refused(path, legacy_container(CONTENT, good, protocol=1000), "protocol 1000")
    refused(path, legacy_container(CONTENT, good, protocol=["x"] * 10_000), "protocol list")
    for system in ({**SYSTEM, "little_endian": False}, {}, None, [1]):
        refused(path, legacy_container(CONTENT, good, system=system), "little-endian")
    refused(path, legacy_container(CONTENT), "other storages")
    refused(path, legacy_container(CONTENT, {**good, "1": (0, b"")}), "other storages")
    refused(path, legacy_container(CONTENT, {"1": (4, NUMBERS)}), "other storages")
    for count in (-1, 0, 3, 5, (1 << 63) - 1):
        refused(path, legacy_container(CONTENT, {"0": (count, NUMBERS)}), "storage 0 of 4 elements")
    refused(path, legacy_container(CONTENT, {"0": (4, NUMBERS[:-1])}), "file ends")
    keys = pickle.dumps([0], 2)
    refused(path, legacy_container(CONTENT).removesuffix(pickle.dumps([], 2)) + keys, "other storages")
    refused(path, CONTENT, "bare pickle")
