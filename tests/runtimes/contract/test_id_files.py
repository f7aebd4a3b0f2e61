"""Files of token ids are mapped or read line by line, and what is wrong with them is said with its place."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from runtimes.base.errors import TextError, UserError
from runtimes.contract import id_files
from runtimes.contract.id_files import documents, number_blocks, open_ids, refuse_outside


def written(path: Path, content: bytes | np.ndarray) -> Path:
    if isinstance(content, np.ndarray):
        np.save(path, content)
    else:
        path.write_bytes(content)
    return path


def test_raw_ids_are_mapped_in_little_endian(tmp_path: Path) -> None:
    path = written(tmp_path / "a.bin", np.array([1, 2, 60_000], "<u2").tobytes())
    ids = open_ids(path, dtype="uint16")
    assert isinstance(ids, np.memmap)
    assert ids.tolist() == [1, 2, 60_000]
    assert open_ids(written(tmp_path / "empty.bin", b""), dtype="uint16").tolist() == []


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.npy", np.array([3, 4]), [[3, 4]]),
        ("a.npy", np.array([[3, 4], [5, 6]], np.uint8), [[3, 4], [5, 6]]),
        ("a.bin", np.array([3, 4], "<i4").tobytes(), [[3, 4]]),
        ("a.txt", b"3 4\n\n5,6, 17\r\n", [[3, 4, 5, 6, 17]]),
        ("a.txt", b"", [[]]),
        ("a.jsonl", b'[3]\n\n {"ids": [4, 5], "id": "x"}\n[]\n[6]', [[3], [4, 5], [], [6]]),
    ],
)
def test_a_file_gives_its_documents(
    name: str, content: bytes | np.ndarray, expected: list[list[int]], tmp_path: Path
) -> None:
    path = written(tmp_path / name, content)
    dtype = "int32" if name == "a.bin" else None
    assert [ids.tolist() for ids in documents(path, dtype=dtype)] == expected


@pytest.mark.parametrize(
    ("name", "content", "dtype", "words"),
    [
        ("a.bin", b"\0\1\2", "uint16", "3 bytes, which is no multiple of the 2 bytes"),
        ("a.bin", b"\0\1", None, "no type was given; say what they are with --dtype"),
        ("a.bin", b"\0\1", "float32", "the type given is 'float32'"),
        ("a.npy", np.array([1]), "uint8", "leave out --dtype"),
        (
            "a.npy",
            np.zeros((1, 1, 1), int),
            None,
            r"int64 \[1, 1, 1\]; expected token ids, integers \[N\] or",
        ),
        ("a.csv", b"1 2", None, "no file of token ids"),
        ("a.npz", b"PK", None, "a.npz is an archive of arrays; save one of them as a .npy file"),
        ("a.txt", b"1 2", "uint8", "leave out --dtype"),
        ("a.txt", b"12 the cat", None, r"a.txt has 'the' as word 2, which is no token id; expected whole"),
        ("a.txt", b"1 -2", None, "has '-2' as word 2"),
        ("a.txt", b"1 1_000", None, "has '1_000' as word 2"),
        ("a.txt", b"1" * 5_000, None, "has '1{40}' as word 1"),
        (
            "a.jsonl",
            b"[1]\n[2",
            None,
            r"a.jsonl: line 2 is not JSON \(Expecting ',' delimiter at character 3\)",
        ),
        ("a.jsonl", b'[1]\n\n[2, "3"]', None, "line 3 is no list of token ids"),
        ("a.jsonl", b"[true]", None, "line 1 is no list of token ids"),
        ("a.jsonl", b"[1.5]", None, "line 1 is no list of token ids"),
        ("a.jsonl", b"[9223372036854775808]", None, "line 1 is no list of token ids"),
        ("a.jsonl", b"3", None, "line 1 is no list of token ids"),
        ("a.jsonl", b"[" * 100_000, None, "line 1 is not JSON"),
    ],
)
def test_what_is_no_file_of_ids_is_refused(
    name: str, content: bytes | np.ndarray, dtype: str | None, words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(TextError, match=words) as caught:
        list(documents(path, dtype=dtype))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.bin", "a.npy", "a.jsonl", "a.txt"])
def test_a_missing_file_and_a_folder_are_refused(name: str, tmp_path: Path) -> None:
    dtype = "uint8" if name == "a.bin" else None
    with pytest.raises(UserError, match="No such file"):
        list(documents(tmp_path / name, dtype=dtype))
    for make in (os.mkdir, os.mkfifo):
        make(tmp_path / name)
        with pytest.raises(TextError, match="is not a file"):
            list(documents(tmp_path / name, dtype=dtype))
        os.rmdir(tmp_path / name) if make is os.mkdir else os.unlink(tmp_path / name)


def test_damaged_arrays_and_arrays_of_other_types_are_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.npy", np.arange(1_000)).read_bytes()
    huge = whole.replace(b"(1000,)", b"(9**10,)")
    for content in (
        b"",
        b"this is no array",
        whole[:50],
        whole[:4_000],
        b"PK" + whole,
        pickle.dumps([1]),
        huge,
    ):
        path = written(tmp_path / "b.npy", content)
        with pytest.raises(TextError) as caught:
            open_ids(path)
        expected = f"{path} is no whole .npy file; copy it again, or make it with `numpy.save`."
        assert str(caught.value) == expected, content
    for array, held in (
        (np.arange(3.0), r"float64 \[3\]"),
        (np.ones((2, 3), bool), r"bool \[2, 3\]"),
        (np.array([None, 1]), "Python objects"),
    ):
        path = written(tmp_path / "c.npy", array)
        with pytest.raises(TextError, match=rf"c.npy holds {held}; expected token ids.*astype\(\"int64\"\)"):
            open_ids(path)
    assert open_ids(written(tmp_path / "empty.npy", np.zeros(0, int))).tolist() == []


@pytest.mark.parametrize("block", [1, 2, 3, 1 << 22])
def test_numbers_are_whole_wherever_a_block_ends(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_files, "TEXT_BLOCK_BYTES", block)
    path, seen = written(tmp_path / "a.txt", b"123 45,6\n7890 1"), []
    assert np.concatenate(list(number_blocks(path, tick=seen.append))).tolist() == [123, 45, 6, 7890, 1]
    assert sum(seen) == path.stat().st_size
    with pytest.raises(TextError, match="has 'six' as word 3"):
        list(number_blocks(written(tmp_path / "b.txt", b"123 45,six 7")))


@pytest.mark.parametrize(
    ("ids", "words"), [([0, 3, 9], "id 3 at index 101"), ([2, 1, -1], "id -1 at index 102")]
)
def test_an_id_outside_is_named_with_its_index(ids: list[int], words: str, tmp_path: Path) -> None:
    with pytest.raises(TextError, match=words):
        refuse_outside(np.array(ids), tmp_path, 3, fix="give others", start=100)
    refuse_outside(np.array([0, 2], np.uint8), tmp_path, 3, fix="give others")
