"""The C++ library computes what the Python package computes, and refuses what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from runtimes import open_session
from runtimes.contract.memory import save_memory
from runtimes.contract.sampling import Sampler, write_sampling
from runtimes.contract.spec import Storage
from runtimes.contract.tensors import FORMS
from runtimes.tasks.generate import generate
from tests.architectures import ARCHITECTURES
from tests.cpp.comparison import compare
from tests.cpp.program import Driver
from tests.cpp.test_vocabularies import with_vocabulary
from tests.runtimes.contract.test_spec import in_place_cases
from tests.sampling import range_cases, read_cases
from xl_export.artefact.export import export


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_python_s_answers(
    form: str, driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    compare(driver, artefacts[form], tmp_path)


@pytest.mark.parametrize("name", ["adaptive-softmax", "all-attention-groups"])
def test_large_vocabularies_and_learned_spans_too(
    name: str, driver: Driver, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    compare(driver, export(make_run(**ARCHITECTURES[name]), tmp_path / "artefact"), tmp_path)


@pytest.mark.parametrize("storage", ["single-file", "ort"])
def test_an_artefact_of_one_file(storage: Storage, driver: Driver, run: Path, tmp_path: Path) -> None:
    folder = export(run, tmp_path / "artefact", memory="shift", storage=storage)
    assert not (folder / "weights.bin").exists()
    assert driver.ask("check", folder)["passed"]
    loop = b"\x04\0\0\0Loop\0"
    if storage == "ort":
        content = (folder / "step.ort").read_bytes() + loop
        spoiled = with_vocabulary(
            folder, tmp_path / "b", json.loads((folder / "vocab.json").read_text()), step_ort=content
        )
        assert "has an operator Loop" in driver.refusal("open", spoiled)


def test_what_does_not_fit_is_refused_in_one_sentence(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    ring, tokens = artefacts["ring"], list(range(10))
    assert "the segment has 9 tokens" in driver.refusal("steps", ring, ids=tokens, lengths=[9])
    assert "the segment has 0 tokens" in driver.refusal("steps", ring, ids=tokens, lengths=[0])
    assert "token -1 is outside" in driver.refusal("steps", ring, ids=[-1, 0], lengths=[1])
    assert "target 1000 is outside" in driver.refusal("steps", ring, ids=[0, 1000], lengths=[1])
    assert "batch is 0" in driver.refusal("steps", ring, batch=0, ids=[], lengths=[])
    assert "batch is 65537" in driver.refusal("steps", ring, batch=65537, ids=[], lengths=[])
    assert "2^62" in driver.refusal("steps", ring, ids=tokens, lengths=[1], positions=[(1 << 62) + 1])
    assert "positions for 1 streams" in driver.refusal("steps", ring, ids=tokens, lengths=[1], positions=[])
    assert "is not among the" in driver.refusal("generate", ring, prompt="The ☃", tokens=1)
    assert "has no tokens" in driver.refusal("generate", ring, prompt="", tokens=1)
    assert "max_tokens is 0" in driver.refusal("generate", ring, prompt="T", tokens=0)
    assert "a stop string is empty" in driver.refusal("generate", ring, prompt="T", tokens=1, stop=[""])
    assert "is not an artefact" in driver.refusal("open", tmp_path)
    assert "could not be loaded" in driver.refusal("open", ring, fused=str(ring / "weights.bin"))
    no_graph = driver.refusal("open", artefacts["hidden"], fused="/nowhere.so")
    assert "has no graph for the fused operator" in no_graph


def test_a_damaged_folder_is_refused_in_one_sentence(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    for number, (name, change, words) in enumerate(
        (
            ("weights.bin", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "was altered"),
            ("step.onnx", lambda data: data[:-1], "bytes, expected"),
            (
                "spec.json",
                lambda data: data.replace(b'"segment": 8', b'"segment": 9'),
                "digest does not match",
            ),
            ("spec.json", lambda data: data[:-2], "no JSON from byte"),
            ("vocab.json", None, "is missing"),
        )
    ):
        folder = Path(shutil.copytree(artefacts["shift"], tmp_path / str(number)))
        if change is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(change((folder / name).read_bytes()))
        assert words in driver.refusal("open", folder), name


def test_a_damaged_or_foreign_stream_is_refused_in_one_sentence(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    session, path = open_session(artefacts["ring"]), tmp_path / "saved"
    memory = session.start(1)
    save_memory(memory, path)
    whole = path.read_bytes()
    question = {"ids": [0, 1], "lengths": [1], "load": str(path)}
    assert "scores" in driver.ask("steps", artefacts["ring"], **question)
    assert "holds the memory of artefact" in driver.refusal("steps", artefacts["shift"], **question)
    header = int.from_bytes(whole[:8], "little")
    places = [*range(8), *range(8, 8 + header, 11), *range(8 + header, len(whole), 9973)]
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        answer = driver.ask("steps", artefacts["ring"], **question)
        # A blank of the header may become something else that means nothing.
        assert "error" in answer or whole[at] == 32, at
        path.write_bytes(whole[:at])
        assert "no stream that can be continued" in driver.refusal("steps", artefacts["ring"], **question)
    name = next(iter(memory.tensors))
    memory.tensors[name][:] = np.nan  # as of a text that overflowed, in a row that starts again
    save_memory(memory, path)
    assert "scores" in driver.ask("steps", artefacts["ring"], **question)


def test_a_text_that_overflowed_does_not_spoil_the_next_one(
    driver: Driver, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    sound = export(make_run(**ARCHITECTURES["adaptive-softmax-untied"]), tmp_path / "sound")
    graph = onnx.load(sound / "step.onnx", load_external_data=False).graph
    table = next(node.input[0] for node in graph.node if node.op_type == "Gather")
    (place,) = (tensor.external_data for tensor in graph.initializer if tensor.name == table)
    facts = {entry.key: entry.value for entry in place}
    width = int(facts["length"]) // 30  # bytes of a row of the table's 30 tokens
    weights = bytearray((sound / "weights.bin").read_bytes())
    at = int(facts["offset"]) + 7 * width
    weights[at : at + width] = np.full(width // 4, np.nan, "<f4").tobytes()
    vocabulary = json.loads((sound / "vocab.json").read_text())
    spoiled = with_vocabulary(sound, tmp_path / "spoiled", vocabulary, weights_bin=bytes(weights))
    # The second text writes fewer slots than the first one, so that not-a-numbers stay behind the mask.
    tokens = [7, *range(10, 17), 1, 2, 3, 4, 5]
    whole = driver.ask("steps", spoiled, ids=tokens, lengths=[8, 4], restart=1)
    alone = driver.ask("steps", spoiled, ids=tokens[8:], lengths=[4])
    assert whole["scores"][8:] == alone["scores"]
    assert np.isfinite(alone["scores"]).all()
    assert None in whole["scores"][:8]
    kept = driver.refusal("steps", spoiled, ids=tokens, lengths=[4], save=str(tmp_path / "saved"))
    assert "not finite" in kept
    assert not (tmp_path / "saved").exists()


def test_stop_strings_end_a_text_as_in_python(driver: Driver, artefacts: dict[str, Path], text: str) -> None:
    session = open_session(artefacts["ring"])
    whole = "".join(piece.text for piece in generate(session, text[:20], max_tokens=60, seed=9))
    reasons = {None: 0, "end": 1, "stop": 2, "length": 3}
    for stop in ([whole[30:33]], [whole[12:14], whole[10:15] + "\n"], ["no such text"]):
        pieces = list(generate(session, text[:20], max_tokens=60, seed=9, stop=stop))
        found = driver.ask("generate", artefacts["ring"], prompt=text[:20], tokens=60, seed=9, stop=stop)
        assert found["pieces"] == [piece.text for piece in pieces]
        assert found["ended"] == reasons[pieces[-1].ended]


def test_a_text_without_settings_is_drawn_as_the_artefact_recommends(
    driver: Driver, artefacts: dict[str, Path], text: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(artefacts["ring"], tmp_path / "own")
    write_sampling(folder, Sampler(temperature=0.6, top_k=5, repetition_penalty=1.1))
    pieces = generate(open_session(folder), text[:20], max_tokens=40, seed=3)
    found = driver.ask("generate", folder, prompt=text[:20], tokens=40, seed=3, recommended=True)
    assert found["ids"] == [piece.token for piece in pieces]
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    (wrong / "sampling.json").write_text('{"top_p": 7}')
    assert "top_p is 7; expected above 0 and at most 1" in driver.refusal("generate", wrong, prompt="a")
    (wrong / "sampling.json").write_text("[]")
    assert "an object was expected" in driver.refusal("generate", wrong, prompt="a")


def test_random_numbers_are_numpy_s(driver: Driver, artefacts: dict[str, Path]) -> None:
    for seed, row in ((0, 0), (1, 0), ((1 << 63) + 5, (1 << 33) + 1)):
        draws = driver.ask("draws", artefacts["ring"], seed=seed, row=row)["draws"]
        assert draws == np.random.default_rng([seed, row]).random(8).tolist()


def test_every_case_of_sampling_draws_its_token(driver: Driver) -> None:
    for case in read_cases():
        assert driver.ask("draw", Path(), **case) == {"token": case["token"]}, case


def test_only_json_is_read(driver: Driver) -> None:
    assert driver.ask("json", Path(), text='{"a": [1, -2.5e-3, true, null, "\\u00e9"]}') == {}
    for wrong in (
        '{"a": 1, "a": 2}',
        "[1,]",
        "[01]",
        "[1.]",
        "[+1]",
        "[NaN]",
        '["\\ud800"]',
        "[1] 2",
        '"\t"',
        "[",
    ):
        assert driver.refusal("json", Path(), text=wrong)
    assert "nested" in driver.refusal("json", Path(), text="[" * 100_000)


def test_settings_of_sampling_have_python_s_ranges(driver: Driver, artefacts: dict[str, Path]) -> None:
    for case in range_cases():
        setting = {case["name"]: case["value"]}
        found = driver.ask("generate", artefacts["ring"], prompt="T", tokens=1, **setting)
        if case["expected"] is None:
            assert "error" not in found, case
        else:
            assert found["error"].startswith(f"{case['name']} is "), case
            assert f"expected {case['expected']}" in found["error"], case


def test_memory_is_written_in_place_where_python_does(driver: Driver) -> None:
    for case in in_place_cases():
        assert driver.ask("in_place", Path(), **case) == {"in_place": case["expected"]}, case
