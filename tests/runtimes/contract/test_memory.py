"""Memory on disk: it continues bit for bit elsewhere, and a damaged file is refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import ArtefactError, StreamError, UserError
from runtimes.base.tensors_file import write_tensors
from runtimes.contract.checks import load_memory
from runtimes.contract.memory import STREAMS, Memory, save_memory
from runtimes.contract.session import Session

EDGE_ONLY = ("torch", "onnx", "onnx_ir", "trainer", "xl_export", "benchmarks", "safetensors")
CONTINUE = """
import sys
import numpy as np
import runtimes
artefact, saved, tokens, out = sys.argv[1:]
session = runtimes.open_session(artefact, threads=1)
memory = runtimes.load_memory(saved, session)
logits, memory = session.step(np.load(tokens), memory)
np.save(out, logits)
"""


def feed(session: Session, tokens: np.ndarray, batch: int = 2, steps: int = 5) -> Memory:
    """Memory after some full segments, past the memory length."""
    memory = session.start(batch)
    for step in range(steps):
        at = step * session.rule.segment
        session.step(
            np.stack([tokens[row * 100 + at :][: session.rule.segment] for row in range(batch)]), memory
        )
    return memory


def same(left: Memory, right: Memory) -> bool:
    """Whether two memories hold the same bits."""
    equal = all(
        np.array_equal(left.tensors[name], right.tensors[name]) for name in left.tensors | right.tensors
    )
    return equal and np.array_equal(left.positions, right.positions) and left.owner == right.owner


@pytest.mark.parametrize("form", ["ring", "shift", "hidden"])
def test_another_process_without_torch_continues_bit_for_bit(
    form: str,
    artefacts: dict[str, Path],
    sessions: dict[str, Session],
    tokens: np.ndarray,
    tmp_path: Path,
    python: Callable[..., Any],
) -> None:
    session = sessions[form]
    memory = feed(session, tokens)
    save_memory(memory, tmp_path / "memory.safetensors")
    segment = tokens[None, 500 : 500 + 5].repeat(2, axis=0)
    np.save(tmp_path / "tokens.npy", segment)
    files = (
        artefacts[form],
        tmp_path / "memory.safetensors",
        tmp_path / "tokens.npy",
        tmp_path / "logits.npy",
    )
    other = python(CONTINUE, *files, block=EDGE_ONLY)
    assert other.returncode == 0, other.stderr
    here, _ = session.step(segment, memory)
    assert np.array_equal(np.load(tmp_path / "logits.npy"), here)


def test_saving_and_loading_changes_no_bit(session: Session, tokens: np.ndarray, tmp_path: Path) -> None:
    memory = feed(session, tokens)
    save_memory(memory, tmp_path / "stream")
    loaded = load_memory(tmp_path / "stream", session)
    assert same(loaded, memory)
    segment = tokens[None, 500:503].repeat(2, axis=0)
    assert np.array_equal(session.step(segment, loaded)[0], session.step(segment, memory)[0])


def test_memory_of_another_artefact_is_refused_by_loading_and_by_stepping(
    sessions: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    memory = feed(sessions["shift"], tokens)
    save_memory(memory, tmp_path / "memory.safetensors")
    with pytest.raises(StreamError, match="holds the memory of artefact"):
        load_memory(tmp_path / "memory.safetensors", sessions["ring"])
    with pytest.raises(StreamError, match="memory belongs to artefact"):
        sessions["ring"].step(tokens[None, :2].repeat(2, axis=0), memory)


def test_a_copy_is_a_fork(session: Session, tokens: np.ndarray) -> None:
    memory = feed(session, tokens)
    positions, tensors = (
        memory.positions.tolist(),
        {name: array.tolist() for name, array in memory.tensors.items()},
    )
    fork = memory.copy()
    for at in (0, 4, 8):
        session.step(tokens[None, at : at + 4].repeat(2, axis=0), fork)
    assert memory.positions.tolist() == positions
    assert {name: array.tolist() for name, array in memory.tensors.items()} == tensors
    assert fork.positions.tolist() == [position + 12 for position in positions]
    assert not any(np.array_equal(fork.tensors[name], memory.tensors[name]) for name in tensors)


def test_scales_that_no_vector_has_are_refused(in_bytes: Session, tokens: np.ndarray, tmp_path: Path) -> None:
    memory, name = feed(in_bytes, tokens), "past_key_values.1.value_scale"
    assert {array.dtype.name for array in memory.tensors.values()} == {"int8", "float32"}
    path = tmp_path / "stream"
    save_memory(memory, path)
    assert same(load_memory(path, in_bytes), memory)
    for bad in (-0.5, 3e36):
        spoiled = memory.copy()
        spoiled.tensors[name][1, 0, 3] = bad
        save_memory(spoiled, path)
        with pytest.raises(ArtefactError, match="scales that no key or value has"):
            load_memory(path, in_bytes)
    for bad in (np.nan, np.inf):  # which `save_memory` refuses
        memory.tensors[name][1, 0, 3] = bad
        with open(tmp_path / "stream", "wb") as stream:
            facts = {"format": STREAMS, "owner": memory.owner}
            write_tensors(stream, {"positions": memory.positions, **memory.tensors}, facts)
        with pytest.raises(ArtefactError, match="values that are not finite"):
            load_memory(tmp_path / "stream", in_bytes)


@pytest.mark.parametrize("form", ["ring", "hidden"])
def test_a_damaged_file_is_refused_or_loads_the_same(
    form: str, sessions: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    session = sessions[form]
    memory = feed(session, tokens)
    save_memory(memory, tmp_path / "whole")
    data, rng, refusals = (tmp_path / "whole").read_bytes(), np.random.default_rng(0), []
    damaged = [data[:size] for size in (0, 1, 3, 30, len(data) // 2, len(data) - 22, len(data) - 1)]
    damaged += [data + b"\0", data + data, b"PK\x03\x04" + data, np.lib.format.magic(1, 0) + data]
    places = [
        *rng.integers(len(data), size=100),
        *rng.integers(len(data) - 800, len(data), size=100),
        *range(0, 180, 2),
    ]
    for at in places:  # anywhere, the directory at the end, and the first member's headers
        damaged.append(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
    for number, content in enumerate(damaged):
        path = tmp_path / str(number)
        path.write_bytes(content)
        try:
            assert same(load_memory(path, session), memory), number
        except UserError as error:
            refusals.append(str(error).replace(str(path), "PATH"))
    assert len(refusals) > 150
    assert [message for message in refusals if "PATH" not in message or "\n" in message] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("positions"),
        lambda arrays: arrays.update(positions=arrays["positions"].astype(np.int32)),
        lambda arrays: arrays.update(positions=arrays["positions"][:0]),
        lambda arrays: arrays.update(positions=arrays["positions"][:, None]),
        lambda arrays: arrays.update(positions=arrays["positions"][:1]),
        lambda arrays: arrays.update(surprise=arrays["positions"]),
        lambda arrays: arrays.update({"past_key_values.0.key": np.zeros((2, 2, 23, 6), np.float32)}),
        lambda arrays: arrays.update({"past_key_values.0.key": np.zeros((2, 2, 24, 6))}),
        lambda arrays: arrays.pop("past_key_values.1.value"),
    ],
)
def test_arrays_that_are_not_this_memory_are_refused(
    change: Callable[[dict[str, Any]], Any], sessions: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    memory = feed(sessions["ring"], tokens)
    arrays = {"positions": memory.positions, **memory.tensors}
    change(arrays)
    with open(tmp_path / "changed", "wb") as stream:
        stored = {n: a for n, a in arrays.items() if a.dtype in (np.int64, np.float32)}
        write_tensors(stream, stored, {"format": STREAMS, "owner": memory.owner})
    with pytest.raises(ArtefactError, match="changed"):
        load_memory(tmp_path / "changed", sessions["ring"])


def test_any_reader_of_safetensors_reads_a_stream_and_any_writer_writes_one(
    sessions: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    """The file is written again by another implementation, in another order, and continues all the same."""
    from safetensors.numpy import load, save

    session, path = sessions["ring"], tmp_path / "stream"
    memory = feed(session, tokens)
    save_memory(memory, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    facts = json.loads(content[8 : 8 + length])["__metadata__"]
    assert facts == {
        "format": "xl-export stream 1",
        "owner": session.identity,
        "sha256": hashlib.sha256(content[8 + length :]).hexdigest(),
    }
    arrays = load(content)
    assert np.array_equal(arrays.pop("positions"), memory.positions)
    assert set(arrays) == set(memory.tensors)
    assert all(np.array_equal(arrays[name], memory.tensors[name]) for name in arrays)
    again = save({**dict(reversed(arrays.items())), "positions": memory.positions})
    length = int.from_bytes(again[:8], "little")
    header, data = json.loads(again[8 : 8 + length]), again[8 + length :]
    for change, sentence in (
        ({}, None),
        ({"owner": "0" * 64}, "holds the memory of artefact 000000000000"),
        ({"format": "another"}, "holds no stream memory"),
        ({"sha256": "0" * 64}, "its numbers are not those of its SHA-256"),
    ):
        facts = facts | {"sha256": hashlib.sha256(data).hexdigest()} | change
        text = json.dumps({"__metadata__": facts, **header}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        if sentence is None:
            assert same(load_memory(path, session), memory)
        else:
            with pytest.raises(UserError, match=sentence):
                load_memory(path, session)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [1 << 40, 1 << 40]},
        {"shape": [-1]},
        {"shape": [-1, -2]},  # as many numbers as there are
        {"shape": [0, 10**30], "data_offsets": [0, 0]},  # no number, and more than NumPy counts
        {"shape": [0, (1 << 63) - 1], "data_offsets": [0, 0]},
        {"shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]},
        {"shape": "2"},
        {"dtype": "BF16"},
        {"dtype": ["I64"]},
        {"data_offsets": [-8, 8]},
        {"data_offsets": [0, 1 << 70]},
        {"more": 1},
    ],
)
def test_a_header_that_says_something_impossible_is_refused(
    entry: dict[str, Any], sessions: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    save_memory(feed(sessions["ring"], tokens), tmp_path / "stream")
    content = (tmp_path / "stream").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    if entry.get("data_offsets") == [0, 0]:  # then a whole file, as a stranger writes it, with nothing else
        header, data = {"__metadata__": header["__metadata__"], "positions": header["positions"]}, b""
        header["__metadata__"]["sha256"] = hashlib.sha256(data).hexdigest()
    header["positions"] |= entry
    text = json.dumps(header).encode()
    (tmp_path / "stream").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(ArtefactError, match="stream is not a readable file of tensors"):
        load_memory(tmp_path / "stream", sessions["ring"])


def test_a_file_that_is_longer_than_its_header_says_is_not_read(
    sessions: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    path = tmp_path / "stream"
    save_memory(feed(sessions["ring"], tokens), path)
    os.truncate(path, 1 << 43)  # with a hole that no machine has the memory for
    with pytest.raises(ArtefactError, match="bytes follow its header"):
        load_memory(path, sessions["ring"])


def test_a_full_disk_leaves_the_old_file(
    artefacts: dict[str, Path],
    sessions: dict[str, Session],
    tokens: np.ndarray,
    tmp_path: Path,
    python: Callable[..., Any],
) -> None:
    session = sessions["ring"]
    save_memory(feed(session, tokens), tmp_path / "memory.safetensors")
    code = """
import resource, sys
import runtimes
session = runtimes.open_session(sys.argv[1], threads=1)
memory = session.start(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    runtimes.save_memory(memory, sys.argv[2])
except runtimes.UserError as error:
    print(error)
"""
    before = (tmp_path / "memory.safetensors").read_bytes()
    other = python(code, artefacts["ring"], tmp_path / "memory.safetensors")
    assert other.returncode == 0, other.stderr
    assert "memory.safetensors could not be written: File too large" in other.stdout
    assert (tmp_path / "memory.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["memory.safetensors"]


def test_arrays_that_the_caller_rearranged_are_used_as_they_are(session: Session, tokens: np.ndarray) -> None:
    memory = feed(session, tokens, batch=3)
    rows = [2, 0]  # indexing with a list makes arrays with bytes of their own; a slice would be refused
    chosen = Memory(memory.positions[rows], {n: a[rows] for n, a in memory.tensors.items()}, memory.owner)
    segment = tokens[None, 500:503].repeat(3, axis=0)
    for _ in range(6):  # a copy that is not written back shows after two
        expected, _ = session.step(segment, memory)
        found, _ = session.step(segment[rows], chosen)
        assert np.allclose(found, expected[rows], atol=1e-5)
