"""Small files that would make a plain unpickler, or whoever walks through what it makes, take all memory or
all time."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

from tests.xl_export.importers.forge import call, in_every_container, number, program, text
from tests.xl_export.importers.test_refusals import refused
from xl_export.importers.pickle import interpreter as machine
from xl_export.importers.pickle.read import read_pickle

DOUBLED = b")q\x00" + b"0h\x00h\x00\x86q\x00" * 60  # a tuple of 2^60 nodes in 300 bytes
BOMBS = {
    "bytes8": (b"\x8e" + struct.pack("<Q", 1 << 62), "fewer"),
    "bytes": (b"B" + struct.pack("<I", 0xFFFFFFFF), "fewer"),
    "bytearray8": (b"\x96" + struct.pack("<Q", 1 << 40), "fewer"),
    "text": (b"X" + struct.pack("<I", 1 << 31), "fewer"),
    "text of Python 2": (b"T" + struct.pack("<i", (1 << 31) - 1), "fewer"),
    "text8": (b"\x8d" + struct.pack("<Q", (1 << 64) - 1), "damaged"),
    "short text": (b"\x8c\xff", "ends in the middle"),
    "long": (b"\x8b" + struct.pack("<i", (1 << 31) - 1), "fewer"),
    "long of negative length": (b"\x8b" + struct.pack("<i", -1), "damaged"),
    "long of 2 KiB": (b"\x8b" + struct.pack("<I", 2048) + b"\x01" * 2048, "whole number of"),
    "decimal": (b"L" + b"9" * 60_000 + b"L\n", ""),  # Python or the interpreter limits its digits
    "line": (b"L" + b"9" * 70_000 + b"L\n", "line"),
    "nested key": (b"}" + DOUBLED + b"Ns", "tuple as a key"),
    "nested member": (b"\x8f(" + DOUBLED + b"\x90", "tuple as a key"),
    "nested frozenset": (b"(" + DOUBLED + b"\x91", "tuple as a key"),
    "doubled": (DOUBLED, "shares its parts"),
    "doubled attributes": (call("data.Corpus") + DOUBLED + b"b", "shares its parts"),
    "doubled arguments": (call("data.Corpus", DOUBLED), "shares its parts"),
    "deep list": (b"]" * 10_000 + b"a" * 9_999, "nested too deeply"),
    "deep tuple": (b"N" + b"\x85" * 10_000, "nested too deeply"),
    "list in itself": (b"]q\x00h\x00a", "holds itself"),
    "dictionary in itself": (b"}q\x00" + text("a") + b"h\x00s", "holds itself"),
    "object in itself": (call("data.Corpus") + b"q\x00}" + text("a") + b"h\x00sb", "holds itself"),
    "pair of lists": (b"]q\x00]q\x01h\x00ah\x01\x86r\x02\x00\x00\x000h\x00h\x01a0h\x00", "holds itself"),
    "colliding keys": (
        b"}(" + b"\x8a\x09" + ((1 << 61) - 1).to_bytes(9, "little") + b"Nu",
        "more than 60 bits",
    ),
    "long key": (b"}" + text("x" * 70_000) + b"Ns", "key of 70000"),
    "deep marks": (b"(" * 12_000, "makes more than"),
    "containers": (b"]" * 12_000, "makes more than"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory_or_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.MAX_CONTAINERS <= 1_000_000
    monkeypatch.setattr(machine, "MAX_CONTAINERS", 11_000)  # the refusal is the same, and comes sooner
    body, reason = BOMBS[kind]
    for container, data in in_every_container(program(body)).items():
        refused(tmp_path / container, data, reason)


def test_claims_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "memo").write_bytes(program(b"Nr" + struct.pack("<I", 0xFFFFFFFF) + b"p" + b"9" * 20 + b"\n"))
    tracemalloc.start()
    try:
        assert read_pickle(tmp_path / "memo") is None
        for kind in ("bytes8", "bytes", "bytearray8", "text", "text8", "long"):
            refused(tmp_path / "file", program(BOMBS[kind][0]))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "copied", ["collections.OrderedDict", "builtins.set", "builtins.list", "attributes", "latin1"]
)
def test_copies_by_a_few_opcodes_are_counted(
    copied: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "MAX_STEPS", 100_000)
    source = b"}(" + b"".join(number(value) + b"N" for value in range(1000)) + b"u"
    once = call("collections.OrderedDict", b"h\x00") + b"0"
    if copied in ("builtins.set", "builtins.list"):
        source, once = b"(" + b"".join(map(number, range(1000))) + b"l", call(copied, b"h\x00") + b"0"
    elif copied == "latin1":
        source, once = text("x" * 100_000), call("_codecs.encode", b"h\x00", text("latin1")) + b"0"
    elif copied == "attributes":
        once = call("data.Corpus") + b"h\x00b0"
    (tmp_path / "file").write_bytes(program(source + b"q\x000" + once * 2 + b"N"))
    assert read_pickle(tmp_path / "file") is None
    refused(tmp_path / "file", program(source + b"q\x000" + once * 200 + b"N"), "100000 steps")


def test_what_is_remembered_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_MEMO", 1000)
    refused(tmp_path / "file", program(b"N" + b"\x94" * 1001), "remembers more than 1000")
