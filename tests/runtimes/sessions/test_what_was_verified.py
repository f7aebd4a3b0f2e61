"""What was verified is what runs: files that change after an artefact was opened change nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes import open_session
from runtimes.base.errors import ArtefactError
from runtimes.base.sealed import FileFacts, file_facts, open_file, read_verified, reading_verified
from runtimes.contract.spec import GRAPH, WEIGHTS, load_spec
from xl_export.tensorrt.build import refuse_artefact


def test_weights_that_are_overwritten_change_no_answer(artefact: Path, tokens: np.ndarray) -> None:
    session, path = open_session(artefact), artefact / WEIGHTS
    expected, _ = session.step(tokens[None, :8], session.start(1))
    with open(path, "r+b") as stream:  # in place, as `cp` does
        stream.write(bytes(path.stat().st_size))
    logits, _ = session.step(tokens[None, :8], session.start(1))
    assert np.array_equal(logits, expected)
    os.truncate(path, 0)  # a map of the file would end the process here
    logits, _ = session.step(tokens[None, :8], session.start(1))
    assert np.array_equal(logits, expected)
    path.unlink()
    logits, _ = session.step(tokens[None, :8], session.start(1))
    assert np.array_equal(logits, expected)


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is returned has the hash of the record, or an error is raised: there is no gap between the two."""
    monkeypatch.setattr("runtimes.base.sealed.READ_BYTES", 1000)
    path, content = tmp_path / "file", random.Random(0).randbytes(10_500)
    path.write_bytes(content)
    facts = file_facts(path)
    sha256 = hashlib.sha256

    class Meddling:
        """Changes the end of the file while its beginning is hashed."""

        def __init__(self) -> None:
            self.digest = sha256()

        def update(self, data: bytes) -> None:
            with path.open("r+b") as file:  # which stays as long as it is, so that only its content tells
                file.seek(-1, os.SEEK_END)
                file.write(bytes([content[-1] ^ 1]))
            self.digest.update(data)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr("runtimes.base.sealed.hashlib.sha256", Meddling)
    try:
        with reading_verified(path, facts, record="spec.json", again="make it again") as read:
            assert read == content
    except ArtefactError as error:
        assert "was altered" in str(error)  # noqa: PT017 (either end is right, by which thread was first)


@pytest.mark.parametrize("altered", [False, True])
def test_a_large_file_is_verified_before_its_use_ends(altered: bool, tmp_path: Path) -> None:
    """That the file was altered is said first, also where the work has failed, perhaps for that reason."""
    path, content = tmp_path / "file", random.Random(0).randbytes(10_500)
    path.write_bytes(content)
    facts = file_facts(path)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ altered]))
    for failed in (None, ValueError("the work failed")):
        with contextlib.ExitStack() as stack:
            if altered or failed:
                expected = (ArtefactError, "was altered") if altered else (ValueError, "the work failed")
                stack.enter_context(pytest.raises(expected[0], match=expected[1]))
            with reading_verified(path, facts, record="spec.json", again="make it again") as read:
                assert bytes(read) == path.read_bytes()
                if failed:
                    raise failed


@pytest.mark.parametrize("name", [WEIGHTS, GRAPH])  # a large file and a small one
def test_a_stated_size_is_refused_before_memory_is_taken(
    name: str, artefact: Path, reseal: Callable[..., None]
) -> None:
    files = json.loads((artefact / "spec.json").read_text())["files"]
    files[name]["num_bytes"] = 10**15
    reseal(artefact, files=files)
    with pytest.raises(ArtefactError, match=rf"{name} has \d+ bytes, expected 1000000000000000;"):
        open_session(artefact)


def test_a_file_truncated_during_reading_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given out: the rest of the memory was never read, although the hash is that of the part."""
    path, part = tmp_path / "file", random.Random(0).randbytes(50)
    facts = FileFacts(sha256=hashlib.sha256(part).hexdigest(), num_bytes=100_000)

    def cut_and_open(path: Path) -> Any:
        os.truncate(path, len(part))
        return open_file(path)

    for module in ("sealed", "files"):
        monkeypatch.setattr(f"runtimes.base.{module}.open_file", cut_and_open)
    for read in (read_verified, lambda *a, **k: reading_verified(*a, **k).__enter__()):
        path.write_bytes(part + bytes(facts.num_bytes - len(part)))
        with pytest.raises(ArtefactError, match="has 50 bytes, expected 100000;"):
            read(path, facts, record="spec.json", again="make it again")


@pytest.mark.parametrize(
    ("failure", "whole", "altered"),
    [
        (None, None, (ArtefactError, "was altered")),
        (RuntimeError("damaged"), (ArtefactError, "could not be loaded"), (ArtefactError, "was altered")),
        (KeyboardInterrupt("stop"), (KeyboardInterrupt, "stop"), (KeyboardInterrupt, "stop")),
    ],
    ids=["loads", "fails", "stopped"],
)
def test_altered_weights_are_named_also_where_they_cannot_be_loaded(
    failure: BaseException | None,
    whole: tuple[type[BaseException], str] | None,
    altered: tuple[type[BaseException], str],
    artefact: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise failure  # type: ignore[misc]

    if failure:
        monkeypatch.setattr("runtimes.sessions.onnx_runtime.load_graph", fail)
    for expected in (whole, altered):
        with contextlib.ExitStack() as stack:
            if expected:
                stack.enter_context(pytest.raises(expected[0], match=expected[1]))
            open_session(artefact)
        content = bytearray((artefact / WEIGHTS).read_bytes())
        content[-1] ^= 1
        (artefact / WEIGHTS).write_bytes(content)


def test_a_graph_that_refers_to_another_file_is_refused(
    artefact: Path, reseal: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_graph_file.py` has all places of a graph in which a file may be named."""
    (artefact / "secret.bin").write_bytes(bytes(1 << 20))
    monkeypatch.chdir(artefact)
    model = onnx.load(artefact / GRAPH, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    next(entry for entry in tensor.external_data if entry.key == "location").value = "secret.bin"
    (artefact / GRAPH).write_bytes(model.SerializeToString())
    reseal(artefact, GRAPH)
    with pytest.raises(ArtefactError, match=r"takes tensors from the file 'secret\.bin'"):
        open_session(artefact)
    with pytest.raises(ArtefactError, match=r"takes tensors from the file 'secret\.bin'"):
        refuse_artefact(load_spec(artefact), artefact)
