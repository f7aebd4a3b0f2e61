"""Memory in a file: it continues bit for bit elsewhere, and a damaged file is refused."""

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
from runtimes.contract.memory import Memory
from runtimes.contract.saved_streams import load_memory, save_memory
from runtimes.contract.session import Session

EDGE_ONLY = ("torch", "onnx", "onnx_ir", "trainer", "xl_export", "benchmarks", "safetensors")
CONTINUE = """
import json, sys
import numpy as np
import runtimes
for artefact, saved, tokens, out in json.loads(sys.argv[1]):
    session = runtimes.open_session(artefact, threads=1)
    memory = runtimes.load_memory(saved, session)
    logits, memory = session.step(np.load(tokens), memory)
    np.save(out, logits)
"""


@pytest.fixture
def session(sessions: dict[str, Session]) -> Session:
    return sessions["ring"]


@pytest.fixture
def memory(session: Session, tokens: np.ndarray) -> Memory:
    return feed(session, tokens)


@pytest.fixture
def path(memory: Memory, tmp_path: Path) -> Path:
    """The file of that memory."""
    save_memory(memory, tmp_path / "stream")
    return tmp_path / "stream"


def feed(session: Session, tokens: np.ndarray, batch: int = 2, steps: int = 5) -> Memory:
    """Memory after some full segments, past the memory length."""
    memory = session.start(batch)
    for at in range(0, steps * session.rule.segment, session.rule.segment):
        segments = [tokens[row * 100 + at :][: session.rule.segment] for row in range(batch)]
        session.step(np.stack(segments), memory)
    return memory


def same(left: Memory, right: Memory) -> bool:
    """Whether two memories hold the same bits."""
    equal = all(
        np.array_equal(left.tensors[name], right.tensors[name]) for name in left.tensors | right.tensors
    )
    return equal and np.array_equal(left.positions, right.positions) and left.owner == right.owner


def texts(session: Session) -> dict[str, str]:
    """What a reader needs in the header of a file of a session's streams."""
    identity = session.memory_identity
    return {"format": "xl-export stream 1", "layout": identity.layout, "weights": identity.weights}


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and numbers of a file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_another_process_without_torch_continues_bit_for_bit(
    artefacts: dict[str, Path],
    sessions: dict[str, Session],
    tokens: np.ndarray,
    tmp_path: Path,
    python: Callable[..., Any],
) -> None:
    segment, jobs, here = tokens[None, 500:505].repeat(2, axis=0), [], {}
    np.save(tmp_path / "tokens.npy", segment)
    for form, artefact in artefacts.items():
        memory = feed(sessions[form], tokens)
        save_memory(memory, tmp_path / form)
        jobs.append([str(artefact), *(str(tmp_path / name) for name in (form, "tokens.npy", f"{form}.npy"))])
        here[form], _ = sessions[form].step(segment, memory)
    other = python(CONTINUE, json.dumps(jobs), block=EDGE_ONLY)
    assert other.returncode == 0, other.stderr
    for form, expected in here.items():
        assert np.array_equal(np.load(tmp_path / f"{form}.npy"), expected), form


def test_memory_of_another_artefact_is_not_loaded(path: Path, sessions: dict[str, Session]) -> None:
    with pytest.raises(
        StreamError,
        match=r"another memory: it has no past_key_values\.0\.key|past_key_values\.0\.key has the shape",
    ):
        load_memory(path, sessions["shift"])


def test_a_row_that_is_not_finite_is_not_saved(session: Session, memory: Memory, tmp_path: Path) -> None:
    for array in memory.tensors.values():
        array[1] = np.nan
    with pytest.raises(StreamError, match="row 1 of the memory holds values that are not finite"):
        save_memory(memory, tmp_path / "stream")
    assert list(tmp_path.iterdir()) == []
    memory.positions[1] = 0  # a new text begins, which sees nothing of it
    save_memory(memory, tmp_path / "stream")
    loaded = load_memory(tmp_path / "stream", session)
    assert all(np.isfinite(array).all() for array in loaded.tensors.values())


def test_scales_that_no_vector_has_are_refused(in_bytes: Session, tokens: np.ndarray, tmp_path: Path) -> None:
    memory, name = feed(in_bytes, tokens), "past_key_values.1.value_scale"
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
        with open(path, "wb") as stream:
            write_tensors(stream, {"positions": memory.positions, **memory.tensors}, texts(in_bytes))
        with pytest.raises(ArtefactError, match="values that are not finite"):
            load_memory(path, in_bytes)


def test_a_damaged_file_is_refused_or_loads_the_same(path: Path, session: Session, memory: Memory) -> None:
    data, rng, refusals = path.read_bytes(), np.random.default_rng(0), []
    damaged = [data[:size] for size in (0, 1, 3, 30, len(data) // 2, len(data) - 22, len(data) - 1)]
    damaged += [data + b"\0", data + data, b"PK\x03\x04" + data, np.lib.format.magic(1, 0) + data]
    for at in [*rng.integers(len(data), size=60), *range(0, 180, 2)]:  # anywhere, and in the header
        damaged.append(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
    for number, content in enumerate(damaged):
        path.write_bytes(content)
        try:
            assert same(load_memory(path, session), memory), number
        except UserError as error:
            refusals.append(str(error))
    assert len(refusals) > 120
    assert [message for message in refusals if str(path) not in message or "\n" in message] == []
    np.save(path.with_suffix(".npy"), np.arange(9))
    with pytest.raises(UserError, match=r"is a \.npy file of one array; give a file that `save_memory`"):
        load_memory(path.with_suffix(".npy"), session)


ARRAYS: list[Callable[[dict[str, Any]], Any]] = [
    lambda arrays: arrays.pop("positions"),
    lambda arrays: arrays.update(positions=arrays["positions"].astype(np.int32)),
    lambda arrays: arrays.update(positions=arrays["positions"][:0]),
    lambda arrays: arrays.update(positions=arrays["positions"][:, None]),
    lambda arrays: arrays.update(positions=arrays["positions"][:1]),
    lambda arrays: arrays.update(surprise=arrays["positions"]),
    lambda arrays: arrays.update({"past_key_values.0.key": np.zeros((2, 2, 23, 6), np.float32)}),
    lambda arrays: arrays.update({"past_key_values.0.key": np.zeros((2, 2, 24, 6))}),
    lambda arrays: arrays.pop("past_key_values.1.value"),
]


def test_arrays_that_are_not_this_memory_are_refused(path: Path, session: Session, memory: Memory) -> None:
    for change in ARRAYS:
        arrays = {"positions": memory.positions, **memory.tensors}
        change(arrays)
        with open(path, "wb") as stream:
            stored = {n: a for n, a in arrays.items() if a.dtype in (np.int64, np.float32)}
            write_tensors(stream, stored, texts(session))
        with pytest.raises(ArtefactError, match=str(path)):
            load_memory(path, session)


def test_any_reader_and_writer_of_safetensors_will_do(path: Path, session: Session, memory: Memory) -> None:
    """Another implementation writes the file again, in another order, and the stream continues."""
    from safetensors.numpy import load, save

    header, data = split(path.read_bytes())
    assert header["__metadata__"] == {
        **texts(session),
        "artefact": session.identity,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    arrays = load(path.read_bytes())
    assert np.array_equal(arrays.pop("positions"), memory.positions)
    assert set(arrays) == set(memory.tensors)
    assert all(np.array_equal(arrays[name], memory.tensors[name]) for name in arrays)
    other, data = split(save({**dict(reversed(arrays.items())), "positions": memory.positions}))
    for change, sentence in (
        ({}, None),
        ({"layout": "0" * 64}, "the memory rule or the vocabulary differs"),
        ({"weights": "0" * 64}, "other weights computed .000000000000"),
        ({"adopted": "no hash"}, "`adopted` does not have the hashes of 2 streams"),
        ({"format": "another"}, "holds no stream memory"),
        ({"sha256": "0" * 64}, "its numbers do not match its SHA-256"),
    ):
        facts = header["__metadata__"] | {"sha256": hashlib.sha256(data).hexdigest()} | change
        path.write_bytes(joined({"__metadata__": facts, **other}, data))
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
    ids=str,
)
def test_an_impossible_header_is_refused(entry: dict[str, Any], path: Path, session: Session) -> None:
    header, data = split(path.read_bytes())
    if entry.get("data_offsets") == [0, 0]:  # then a whole file, as a stranger writes it, with nothing else
        header, data = {name: header[name] for name in ("__metadata__", "positions")}, b""
        header["__metadata__"]["sha256"] = hashlib.sha256(data).hexdigest()
    header["positions"] |= entry
    path.write_bytes(joined(header, data))
    with pytest.raises(ArtefactError, match="stream is not a readable file of tensors"):
        load_memory(path, session)


def test_a_file_longer_than_its_header_says_is_not_read(path: Path, session: Session) -> None:
    os.truncate(path, 1 << 43)  # with a hole that no machine has the memory for
    with pytest.raises(ArtefactError, match="bytes follow its header"):
        load_memory(path, session)
