"""Files are whole or absent; what is read is checked before memory is taken for it."""

from __future__ import annotations

import io
import os
import resource
import stat
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.files import atomic_file, read_bytes, read_json, write_json
from runtimes.base.folders import atomic_folder
from runtimes.base.kinds import Kind
from runtimes.base.npz import read_npz

FILE = Kind(what="a folder of tests", marker="file", proofs=("file",), names=("side", "run/file"))


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden files included."""
    return sorted(os.listdir(folder))


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with atomic_file(tmp_path / "file") as temporary:
        temporary.write_text("new")
        assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "file").read_text() == "new"
    assert names(tmp_path) == ["file"]


def test_files_and_folders_have_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "file", {})
        with atomic_folder(tmp_path / "folder", FILE):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750


def interrupted(manager: Callable, path: Path, error: BaseException, **options: object) -> None:
    """Begins to write, then raises."""
    with manager(path, **options) as temporary:
        (temporary / "half" if temporary.is_dir() else temporary).write_text("half")
        raise error


@pytest.mark.parametrize(
    "error", [RuntimeError("bug"), KeyboardInterrupt(), OSError(28, "No space left on device")]
)
def test_an_error_inside_leaves_the_old_content_and_nothing_else(
    error: BaseException, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("old")
    expected = UserError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        interrupted(atomic_file, tmp_path / "file", error)
    with pytest.raises(expected):
        interrupted(atomic_folder, tmp_path / "folder", error, kind=FILE, force=True)
    with pytest.raises(expected):
        interrupted(atomic_folder, tmp_path / "fresh", error, kind=FILE)
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "file").read_text() == "old"
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == ["file"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="could not be written: Not a directory"):
        write_json(tmp_path / "file" / "inside", {})
    with pytest.raises(UserError, match="could not be written: No such file or directory"):
        write_json(tmp_path / "absent" / "inside", {})
    with (
        pytest.raises(UserError, match="file is a file, not a folder; give another --out"),
        atomic_folder(tmp_path / "file" / "inside", FILE),
    ):
        pytest.fail("the block must not run")


def test_a_full_disk_is_one_sentence_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match="file could not be written: File too large; nothing was changed"):
            write_json(tmp_path / "file", ["x"] * 1000)
        with (
            pytest.raises(
                UserError, match="folder could not be written: File too large; nothing was changed"
            ),
            atomic_folder(tmp_path / "folder", FILE, force=True) as folder,
        ):
            (folder / "large").write_bytes(b"x" * 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path / "folder") == []


def test_json_comes_back_and_what_is_no_json_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "file", {"é": [1, None, 0.1]})
    assert read_json(tmp_path / "file") == {"é": [1, None, 0.1]}
    (tmp_path / "file").write_text('\ufeff{"a":\r\n1}', newline="")
    assert read_json(tmp_path / "file") == {"a": 1}
    (tmp_path / "file").write_text("{}", "utf-16")
    with pytest.raises(ArtefactError, match="file is not UTF-8 but probably UTF-16"):
        read_json(tmp_path / "file")
    for content in (b"", b"{", b"[" * 100_000, b"1" * 5000, b"{} {}"):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ArtefactError, match="is not valid JSON"):
            read_json(tmp_path / "file")
    with pytest.raises(ArtefactError, match=r"No such file or directory; check the path\.$"):
        read_json(tmp_path / "absent")
    with pytest.raises(UserError, match=r"could not be read: Is a directory; a file was expected\.$"):
        read_bytes(tmp_path)


def npy(array: np.ndarray, **header: object) -> bytes:
    """An .npy member; `header` replaces what it says of the array."""
    stream = io.BytesIO()
    said = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **header}
    np.lib.format.write_array_header_1_0(stream, said)  # type: ignore[arg-type]
    return stream.getvalue() + array.tobytes()


def archive(path: Path, *members: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for number, member in enumerate(members):
            file.writestr(f"{number}.npy", member)
    return path


def test_arrays_come_back_compressed_or_not(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.array("text"),
        "c": np.zeros((0, 3), np.int64),
        "d": np.array(True),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "arrays.npz", **arrays)
        found = read_npz(tmp_path / "arrays.npz")
        assert {name: (array.dtype, array.tolist()) for name, array in found.items()} == {
            name: (array.dtype, array.tolist()) for name, array in arrays.items()
        }


ARRAY = np.arange(20, dtype=np.float32)
LIES = {
    "10^12 elements": npy(ARRAY, shape=(10**12,)),
    "10^12 elements of no size": npy(ARRAY, shape=(10**12,), descr="|V0"),
    "too few elements": npy(ARRAY, shape=(19,)),
    "negative sizes": npy(ARRAY, shape=(-4, -5)),
    "objects": npy(ARRAY, descr="|O", shape=(10,)),
    "no magic": b"plain text that is no array",
    "version 3": npy(ARRAY).replace(b"NUMPY\x01", b"NUMPY\x03"),
    "no literal": npy(ARRAY).replace(b"{'descr'", b"{((((((("),
    "unhashable": npy(ARRAY).replace(b"{'descr'", b"{[     ]"),
    "call": npy(ARRAY).replace(b"'<f4'", b"abs()"),
    "odd type": npy(ARRAY).replace(b"'<f4'", b"'<f9'"),
    "cut in the header": npy(ARRAY)[:40],
    "empty": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_false_array_header_is_refused_without_allocating(lie: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "lie.npz", LIES[lie])
    tracemalloc.start()
    with pytest.raises(ArtefactError, match=r"lie\.npz is not a readable"):
        read_npz(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_zip_bomb_is_refused_without_taking_memory(tmp_path: Path) -> None:
    bomb = npy(np.zeros((1 << 26) + 1, np.uint8))  # 64 times what an archive of less than 1 MB may hold
    path = archive(tmp_path / "bomb.npz", bomb, method=zipfile.ZIP_DEFLATED)
    del bomb
    tracemalloc.start()
    with pytest.raises(ArtefactError, match="claims"):
        read_npz(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_truncated_prefixed_and_foreign_files_are_refused(tmp_path: Path) -> None:
    data = archive(tmp_path / "whole.npz", npy(ARRAY), npy(ARRAY), method=zipfile.ZIP_DEFLATED).read_bytes()
    foreign = [data[:size] for size in range(0, len(data), 7)]
    foreign += [npy(ARRAY), npy(ARRAY) + data, b"\x80\x04" + data, b"x" * 100, zlib.compress(data)]
    stored = archive(tmp_path / "stored.npz", npy(ARRAY)).read_bytes()
    foreign += [stored.replace(struct.pack("<f", 7), struct.pack("<f", 8))]  # its checksum is wrong
    foreign += [archive(tmp_path / "odd.npz", npy(ARRAY), method=zipfile.ZIP_LZMA).read_bytes()]
    for number, content in enumerate(foreign):
        path = tmp_path / f"{number}.npz"
        path.write_bytes(content)
        with pytest.raises(ArtefactError, match=rf"{number}\.npz is not a readable"):
            read_npz(path)
    with pytest.raises(ArtefactError, match="does not exist; give the name"):
        read_npz(tmp_path / "absent.npz")
