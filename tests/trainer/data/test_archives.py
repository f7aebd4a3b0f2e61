"""Files out of archives: every archive, also a hostile one, gives its files or one sentence."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes.base.errors import UserError
from tests.trainer.data.corpus_files import make_folder, make_tar, make_zip
from trainer.data.archives import Contents, find_files, is_packed

DATA = {"a/one.txt": b"first\n" * 500, "two.txt": b"second", "other.md": b"not wanted"}
LIMIT = 1 << 20
BLOCK = 1 << 12


def find(source: Path, scratch: Path, *, limit: int = LIMIT) -> Contents:
    return find_files(source, lambda name: name.endswith(".txt"), scratch=scratch / "unpacked", limit=limit)


def contents(found: Contents) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in found.files.items()}


def refused(source: Path, tmp_path: Path, match: str, *, limit: int = LIMIT) -> None:
    with pytest.raises(UserError, match=match) as caught:
        find(source, tmp_path, limit=limit)
    assert str(caught.value).count("\n") == 0


@pytest.fixture(params=["folder", "zip", "tar", "tar.gz", "tar.bz2", "tar.xz"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "folder":
        return make_folder(tmp_path / "in", DATA)
    if request.param == "zip":
        return make_zip(tmp_path / "in.zip", DATA)
    compression = request.param.partition(".")[2]
    return make_tar(tmp_path / f"in.{request.param}", DATA, mode=f"w:{compression}")


def test_the_wanted_files_are_found(source: Path, tmp_path: Path) -> None:
    found = find(source, tmp_path)
    assert contents(found) == {name: data for name, data in DATA.items() if name.endswith(".txt")}
    assert is_packed(source) is not source.is_dir()


def test_more_than_the_limit_is_refused(source: Path, tmp_path: Path) -> None:
    refused(source, tmp_path, "expected", limit=2000)


def test_a_bare_file_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(b"text")
    assert find(path, tmp_path) == Contents({"one.txt": path}, is_single=True)
    assert not is_packed(path)


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_members_with_hostile_names_stay_in_the_scratch_folder(make, tmp_path: Path) -> None:
    members = {"../../escape.txt": b"x", "/absolute.txt": b"y", "..\\back.txt": b"z"}
    found = find(make(tmp_path / "in", members), tmp_path)
    assert {path.parent for path in found.files.values()} == {tmp_path / "unpacked"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "unpacked"]
    assert sorted(contents(found).values()) == [b"x", b"y", b"z"]


def test_links_and_devices_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "in.tgz", "w:gz") as archive:
        for name, kind in [
            ("a.txt", tarfile.SYMTYPE),
            ("b.txt", tarfile.LNKTYPE),
            ("c.txt", tarfile.FIFOTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    assert find(tmp_path / "in.tgz", tmp_path).files == {}
    link = zipfile.ZipInfo("link.txt")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    (tmp_path / "zip").mkdir()
    assert find(tmp_path / "in.zip", tmp_path / "zip").files == {}


def test_a_pipe_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    make_folder(tmp_path / "in", DATA)
    os.mkfifo(tmp_path / "in/pipe.txt")
    assert sorted(find(tmp_path / "in", tmp_path).files) == ["a/one.txt", "two.txt"]


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = make_zip(tmp_path / "bomb.zip", {f"{i}.txt": bytes(LIMIT // 2) for i in range(3)})
    assert bomb.stat().st_size < 10_000
    refused(bomb, tmp_path, "unpacks to more")
    assert sum(path.stat().st_size for path in (tmp_path / "unpacked").iterdir()) <= LIMIT


@pytest.mark.parametrize("form", ["zip", "tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_an_archive_cut_anywhere_is_refused_or_lacks_files(form: str, tmp_path: Path) -> None:
    members = {"one.txt": random.Random(0).randbytes(3000), "two.txt": random.Random(1).randbytes(3000)}
    whole = (
        make_zip(tmp_path / "in", members)
        if form == "zip"
        else make_tar(tmp_path / "in", members, mode="w:" + form.partition(".")[2])
    )
    data = whole.read_bytes()
    for number, length in enumerate(range(300, 6500, 620)):
        (tmp_path / f"cut{number}").write_bytes(data[:length])
        (tmp_path / str(number)).mkdir()
        try:
            found = find(tmp_path / f"cut{number}", tmp_path / str(number))
        except UserError:
            continue
        assert form == "tar"  # its end is not marked where a member ends
        assert contents(found).items() < members.items()


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("form", COMPRESS)
def test_a_compressed_single_file_is_unpacked(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.archives.BLOCK_BYTES", BLOCK)  # several blocks
    text = random.Random(0).randbytes(3 * BLOCK // 4).hex().encode()
    path = tmp_path / f"enwik8.part.{form}"
    path.write_bytes(COMPRESS[form](text[:BLOCK]) + COMPRESS[form](text[BLOCK:]))  # two streams are one file
    found = find(path, tmp_path, limit=len(text))
    assert found.is_single
    assert contents(found) == {"enwik8.part": text}
    assert is_packed(path)
    (tmp_path / "again").mkdir()
    with pytest.raises(UserError, match="unpacks to more than"):
        find(path, tmp_path / "again", limit=len(text) - 1)


@pytest.mark.parametrize("form", COMPRESS)
def test_a_compressed_file_that_is_cut_or_altered_is_refused(form: str, tmp_path: Path) -> None:
    whole = COMPRESS[form](random.Random(0).randbytes(5000))
    for number, data in enumerate([whole[:-9], whole[:3000], whole[:2000] + b"altered" + whole[2007:]]):
        (tmp_path / f"{number}.{form}").write_bytes(data)
        (tmp_path / str(number)).mkdir()
        with pytest.raises(UserError, match="is damaged"):
            find(tmp_path / f"{number}.{form}", tmp_path / str(number))


def header(**fields: bytes) -> bytes:
    """A tar header of our own making, its checksum right."""
    info = bytearray(tarfile.TarInfo("one.txt").tobuf(tarfile.USTAR_FORMAT))
    places = {"size": 124, "typeflag": 156}
    for name, value in fields.items():
        info[places[name] : places[name] + len(value)] = value
    info[148:156] = b" " * 8
    info[148:156] = b"%06o\0 " % sum(info)
    return bytes(info)


def as_zip(members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    make_zip(stream, members, kind=kind)
    return stream.getvalue()


def as_tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    make_tar(stream, members, mode="w")
    return stream.getvalue()


def encrypted(data: bytes) -> bytes:
    """With the flag in the member's header, and in the directory."""
    changed = bytearray(data)
    changed[6] |= 1
    changed[changed.index(b"PK\1\2") + 8] |= 1
    return bytes(changed)


SIZES = struct.pack("<I", 1000), struct.pack("<I", 5000)
ONE = {"one.txt": b"x" * 1000}
TWO = {"one.txt": b"a" * 600, "two.txt": b"b" * 600}
STORED = as_zip({"one.txt": b"stored as it is"}, zipfile.ZIP_STORED)
LONG_NAME = header(size=b"00000000001\0", typeflag=b"L") + b"a".ljust(512, b"\0")
VAST = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 9, 9, (1 << 25) - 4, 4, 0)
REFUSED = {
    "size too large": (as_zip(ONE).replace(*SIZES), "damaged"),
    "wrong checksum": (STORED.replace(b"stored", b"alters"), "Bad CRC-32"),
    "encrypted": (encrypted(as_zip(ONE)), "is encrypted; give"),
    "unusual compression": (as_zip(ONE, zipfile.ZIP_LZMA), "unusual way; unpack it"),
    "name twice in a zip": (as_zip(TWO).replace(b"two.txt", b"one.txt"), "holds one.txt twice"),
    "name twice in a tar": (gzip.compress(as_tar(TWO)[:1536] + as_tar(TWO)), "holds one.txt twice"),
    "countless in a zip": (as_zip({f"{i}.txt": b"" for i in range(41)}), "more than 40 members"),
    "countless in a tar": (gzip.compress(header(typeflag=b"5") * 41 + bytes(1024)), "more than 40 members"),
    "vast directory": (b"PK\3\4" + bytes((1 << 25) - 4) + VAST, "a directory of 33,554,428 bytes"),
    "chain of long names": (gzip.compress(header() + LONG_NAME * 3000), "damaged"),
    "vast window": (lzma.compress(b"text"), "Memory usage limit exceeded"),
    **{
        f"bomb of {name}": (gzip.compress(as_tar({name: bytes(2 * LIMIT), "last.txt": b"x"})), "unpacks to")
        for name in ("big.txt", "skipped.bin")
    },
    **{
        f"absurd size {number}": (
            gzip.compress(header() + start + bytes(4096)),
            "damaged, or not|unpacks to more",
        )
        for number, start in enumerate(
            [
                header(size=b"\xff" * 12),  # minus one: leads backwards for ever
                header(size=b"\xff" + b"\xff" * 9 + b"\xfc\x00"),  # minus 1024
                header(size=b"77777777777\0"),  # 8 GiB
                header(size=b"\x80" + b"\x7f" * 11),  # more than there is
            ]
        )
    },
    **{
        f"vast extended header {kind!r}": (  # which would be read whole
            gzip.compress(header() + header(size=b"77777777777\0", typeflag=kind) + bytes(4096)),
            "a header of 8589934592 bytes",
        )
        for kind in (b"x", b"L")
    },
}


@pytest.mark.parametrize(("content", "words"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.timeout(200)
def test_a_hostile_archive_is_refused(
    content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.archives.MAX_MEMBERS", 40)
    monkeypatch.setattr("trainer.data.archives.MAX_WINDOW", 1 << 16)
    (tmp_path / "in").write_bytes(content)
    refused(tmp_path / "in", tmp_path, words, limit=1 << 30 if "directory" in words else LIMIT)


@pytest.mark.parametrize("path", ["missing", "/dev/zero"])
def test_what_is_neither_file_nor_folder_is_refused(path: str, tmp_path: Path) -> None:
    refused(Path(path), tmp_path, "neither a file nor a folder")


@settings(max_examples=60)
@given(data=st.data(), form=st.sampled_from(["zip", "tar", "tar.gz", "bz2", "xz"]))
def test_a_mutated_archive_gives_files_or_one_sentence(
    data: st.DataObject, form: str, tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    members = {"one.txt": b"first " * 40, "two.txt": b"second"}
    path = make_zip(folder / "in", members) if form == "zip" else make_tar(folder / "in", members, mode="w")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if form in ("bz2", "xz"):  # the compressed bytes are altered, in the others what they hold
        packed = bytearray(COMPRESS[form](path.read_bytes()))
        packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
        content = packed
    path.write_bytes(gzip.compress(content) if form == "tar.gz" else content)
    with contextlib.suppress(UserError):  # anything else is a failure
        assert len(contents(find(path, folder))) <= 3
