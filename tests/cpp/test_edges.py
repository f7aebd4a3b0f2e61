"""What hostile files and a small machine give the C++ library: too large claims, and too little memory.

Each ends in one sentence of an `Error`, and costs no more than the file is large.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import open_session
from runtimes.contract.memory import save_memory
from runtimes.contract.tensors import row_bytes
from runtimes.contract.vocabulary import IdsVocab, save_vocab
from tests.architectures import SMALLEST
from tests.cpp.comparison import compare
from tests.cpp.program import Driver, compiled
from tests.cpp.test_vocabularies import TALES, with_vocabulary
from tests.sealing import identity, sealed
from xl_export.artefact.export import export

SMALL = 3 << 29  # bytes
Change = Callable[[dict[str, Any]], object]


def changed(artefact: Path, folder: Path, change: Change) -> Path:
    """A copy of an artefact with another spec, its digest right."""
    shutil.copytree(artefact, folder)
    spec = json.loads((folder / "spec.json").read_text())
    change(spec)
    (folder / "spec.json").write_bytes(sealed(spec, folder))
    return folder


def stream(path: Path, entries: dict[str, Any], owner: str, numbers: bytes) -> Path:
    """A file of saved streams with a header of one's own."""
    metadata = {
        "format": "xl-export stream 1",
        "owner": owner,
        "sha256": hashlib.sha256(numbers).hexdigest(),
    }
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + numbers)
    return path


@pytest.fixture
def small() -> Iterator[Driver]:
    """The same program on a machine of 1.5 GiB."""
    if shutil.which("prlimit") is None:
        pytest.skip("prlimit is not installed")
    program = compiled(Path(__file__).with_name("driver.cpp"), "-O0")
    running = Driver(program, "prlimit", f"--as={SMALL}")
    yield running
    assert running.close() == 0


SPECS: dict[str, tuple[Change, str]] = {
    "form": (lambda spec: spec.update(form="rang"), "its form is rang"),
    "tolerance": (lambda spec: spec.update(tolerance="1"), "a number was expected"),
    "target": (lambda spec: spec.update(target="moon"), "its target is moon"),
    "layers": (lambda spec: spec["model"].update(layers=4097), "from 1 to 4096"),
    "metadata": (lambda spec: spec["inputs"][2].update(name="__metadata__"), "a name of saved streams"),
    "positions": (lambda spec: spec["inputs"][2].update(name="positions"), "a name of saved streams"),
    "sizes": (
        lambda spec: spec["inputs"][2].update(shape=["batch", *[1 << 24] * 3, 0]),
        "more than 10^12 bytes",
    ),
    "values": (lambda spec: spec.update(x=[0] * (1 << 20)), "more values than any file of its kind"),
    "schema": (lambda spec: spec.update(schema=2), "compile it with a newer release"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_that_no_artefact_has_is_refused(
    name: str, driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    change, words = SPECS[name]
    assert words in driver.refusal("open", changed(artefacts["ring"], tmp_path / "copy", change))


def test_a_sentence_is_cut_at_a_character_and_has_no_control_characters(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    form = "a\x85" + "é" * 60
    folder = changed(artefacts["ring"], tmp_path / "copy", lambda spec: spec.update(form=form))
    assert f"its form is a?{'é' * 39}...;" in driver.refusal("open", folder)


def test_the_oldest_runtime_follows_from_the_operators(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    assert driver.ask("open", artefacts["ring"])["oldest"] == 25
    assert driver.ask("open", artefacts["shift"])["oldest"] == 23
    web = changed(artefacts["ring"], tmp_path / "web", lambda spec: spec.update(target="web", opset=21))
    assert driver.ask("open", web)["oldest"] == 21


@pytest.mark.parametrize("form", ["ring", "hidden"])
def test_an_artefact_with_an_empty_weights_file_opens(
    form: Any, driver: Driver, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(**SMALLEST)
    save_vocab(run, IdsVocab(SMALLEST["vocab_size"]))
    artefact = export(run, tmp_path / "artefact", memory=form)
    assert (artefact / "weights.bin").stat().st_size == 0
    compare(driver, artefact, tmp_path)


def test_the_limits_are_of_the_spec_and_answers_log_probabilities(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    limits = {"tolerance": 0.5, "mean_tolerance": 2e-2}
    eighth = changed(artefacts["ring"], tmp_path / "fp8", lambda spec: spec.update(limits))
    assert (report := driver.ask("check", eighth))["passed"], report
    assert limits.items() <= report.items()
    vocabulary = json.loads((artefacts["ring"] / "vocab.json").read_text())
    answers = bytearray((artefacts["ring"] / "reference.bin").read_bytes())
    answers[:4] = np.array(np.inf, "<f4").tobytes()
    spoiled = with_vocabulary(artefacts["ring"], tmp_path / "inf", vocabulary, reference_bin=bytes(answers))
    assert "one of its answers is not a log-probability" in driver.refusal("check", spoiled)


def test_a_padded_vocabulary_passes_its_check(driver: Driver, padded_artefact: Path) -> None:
    assert driver.ask("check", padded_artefact)["passed"]


def test_a_stream_that_claims_too_much_is_refused_before_memory_is_taken(
    small: Driver, driver: Driver, tmp_path: Path
) -> None:
    owner = identity(TALES / "spec.json")
    question = {"ids": [0, 1], "lengths": [1]}
    inputs = json.loads((TALES / "spec.json").read_text())["inputs"]
    entries = {
        entry["name"]: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for entry in inputs
        if "present" in entry
    }
    entries["positions"] = {"dtype": "I64", "shape": [1 << 16], "data_offsets": [0, 8 << 16]}
    claims = stream(tmp_path / "claims", entries, owner, bytes(8 << 16))
    assert "another type or shape" in small.refusal("steps", TALES, load=str(claims), **question)
    many = {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(40_000)}
    path = stream(tmp_path / "many", many, owner, b"")
    assert "more values than any file" in driver.refusal("steps", TALES, load=str(path), **question)
    nowhere = driver.refusal("steps", TALES, load=str(tmp_path / "nowhere"), **question)
    assert "is no file; give one that save" in nowhere


def test_scales_that_no_key_or_value_has_are_refused(driver: Driver, run: Path, tmp_path: Path) -> None:
    artefact = export(run, tmp_path / "artefact", memory_precision="int8")
    report = driver.ask("check", artefact)
    assert (report["passed"], report["tolerance"], report["mean_tolerance"]) == (True, 2e-2, 2e-3)
    session = open_session(artefact)
    _, memory = session.step(np.arange(8)[None], session.start(1))
    question = {"ids": [0, 1], "lengths": [1]}
    save_memory(memory, tmp_path / "whole")
    assert driver.ask("steps", artefact, load=str(tmp_path / "whole"), **question)
    for wrong in (-0.5, 3e36):
        memory.tensors["past_key_values.1.value_scale"][0, 0, 3] = wrong
        save_memory(memory, tmp_path / "wrong")
        said = driver.refusal("steps", artefact, load=str(tmp_path / "wrong"), **question)
        assert "scales that no key or value has" in said


def test_too_little_memory_is_an_error_like_any_other(
    small: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    longer = changed(TALES, tmp_path / "long", lambda spec: spec["rule"].update(segment=1 << 18))
    sentence = small.refusal("steps", longer, ids=[0] * (1 << 17 | 1), lengths=[1 << 17])
    assert "larger than the memory of this machine; feed fewer tokens" in sentence
    session = open_session(TALES)
    row = row_bytes(session.state)
    many = int(0.45 * SMALL / row)  # which fit once, and their fork does not fit with them
    sentence = small.refusal("steps", TALES, batch=many, ids=[0] * (2 * many), lengths=[1])
    assert "the fork needs more memory than this machine has" in sentence
    wide = changed(artefacts["ring"], tmp_path / "wide", lambda spec: spec["rule"].update(segment=1 << 18))
    sentence = small.refusal("steps", wide, ids=[0] * (1 << 16 | 1), lengths=[1 << 16])
    assert "feed fewer tokens at once where memory was short" in sentence
    batch = small.refusal("steps", TALES, batch=1 << 16, ids=[], lengths=[])
    assert "larger than that of this machine; use a smaller batch" in batch
    assert "scores" in small.ask("steps", TALES, ids=[0, 1], lengths=[1])


def test_saving_writes_no_file_of_somebody_else(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "folder" / "saved"
    path.parent.mkdir()
    victim.write_text("kept")
    path.with_name("saved.partial").symlink_to(victim)
    question = {"ids": [0, 1], "lengths": [1]}
    saved = driver.ask("steps", artefacts["ring"], save=str(path), **question)
    assert "scores" in saved
    assert victim.read_text() == "kept"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["saved", "saved.partial"]
    whole = path.read_bytes()
    assert "could not be written" in driver.refusal(
        "steps", artefacts["ring"], save=str(tmp_path / "nowhere" / "saved"), **question
    )
    # A folder cannot be replaced by a file, and nothing is left over.
    assert "could not be written" in driver.refusal(
        "steps", artefacts["ring"], save=str(path.parent), **question
    )
    assert path.read_bytes() == whole
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "victim"]


def test_generation_of_ids_ends_as_it_is_asked_to(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    size = json.loads((artefacts["ring"] / "spec.json").read_text())["model"]["vocab_size"]
    plain = with_vocabulary(artefacts["ring"], tmp_path / "plain", {"kind": "ids", "size": size})
    question = {"ids": [1, 2], "tokens": 40, "temperature": 2, "seed": 4}
    tokens = driver.ask("generate", plain, **question)["ids"]
    assert len(tokens) == 40
    place = next(at for at in range(3, 40) if tokens[at] not in tokens[:at])
    # White space of any kind around a stop string means nothing, as in Python's str.strip().
    stopped = driver.ask("generate", plain, stop=[f"\u3000{tokens[place]}\u00a0\x1f"], **question)
    assert (stopped["ids"], stopped["ended"]) == (tokens[: place + 1], 2)
    special = {"end_of_document": tokens[place]}
    document = {"kind": "ids", "size": size, "special": special}
    ends = with_vocabulary(artefacts["ring"], tmp_path / "ends", document)
    ended = driver.ask("generate", ends, **question)
    assert (ended["ids"], ended["ended"]) == (tokens[: place + 1], 1)


def test_memory_has_seen_all_tokens_but_one_that_was_refused(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    session, ring = open_session(artefacts["ring"]), artefacts["ring"]
    save_memory(session.start(1), fresh := tmp_path / "fresh")
    question: dict[str, Any] = {"ids": [1, 2], "temperature": 0, "load": str(fresh)}
    whole = driver.ask("generate", ring, tokens=8, save=str(tmp_path / "whole"), **question)["ids"]
    part = driver.ask("generate", ring, tokens=8, until=5, save=str(tmp_path / "part"), **question)["ids"]
    assert part == whole[:5]
    again = {"tokens": 3, "temperature": 0, "ids": part[-1:], "load": str(tmp_path / "part")}
    assert driver.ask("generate", ring, **again)["ids"] == whole[5:]
    after = driver.ask("steps", ring, ids=[0, 0], lengths=[1], load=str(tmp_path / "whole"))
    assert after["positions"] == [2 + 8 + 1]


def test_several_threads_use_one_session(driver: Driver, artefacts: dict[str, Path]) -> None:
    question = {"ids": [1, 2], "tokens": 60, "temperature": 1.5, "seed": 8}
    alone = driver.ask("generate", artefacts["ring"], **question)
    assert driver.ask("threads", artefacts["ring"], **question)["answers"] == [alone] * 4
