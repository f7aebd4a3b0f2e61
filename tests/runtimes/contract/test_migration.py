"""Streams that continue on another model: of another precision, of a newer release, or fine-tuned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.base.errors import StreamError
from runtimes.contract.memory import Memory
from runtimes.contract.precision import PRESETS
from runtimes.contract.rule import MemoryRule
from runtimes.contract.saved_streams import describe_streams, load_memory, save_memory
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session
from tests.commands import xl

FED = 60  # tokens, several times the memory
AFTER = 24
# What a stream continues on, and from which of them it comes.
MODELS = {
    "fp32": {},
    "fp16 memory": {"memory_precision": "fp16"},
    "int8 memory": {"memory_precision": "int8"},
    "int8 weights": {"precision": "int8"},
    "for engines": {"target": "tensorrt", "precision": "fp32", "attention": "native"},
    "hidden": {"memory": "hidden"},
}
MOVES = [
    *(("fp32", to) for to in ("fp16 memory", "int8 memory", "int8 weights", "for engines")),
    ("int8 memory", "fp32"),
    ("int8 memory", "fp16 memory"),
    ("fp16 memory", "fp32"),
    ("hidden", "run"),
    ("run", "hidden"),
]


@pytest.fixture(scope="module")
def models(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    """A session of each kind over one trained model."""
    from xl_export.artefact.export import export

    folder = tmp_path_factory.mktemp("models")
    made = {name: export(run, folder / name, **options) for name, options in MODELS.items()}  # type: ignore[arg-type]
    return {name: open_session(path) for name, path in {**made, "run": run}.items()}


def fed(session: Session, tokens: np.ndarray, memory: Memory | None = None) -> tuple[np.ndarray, Memory]:
    """The log-probabilities of one row of tokens, and the memory after them."""
    memory = memory or session.start(1)
    nats = []
    for at in range(0, len(tokens) - 1, session.rule.segment):
        piece = tokens[at : at + session.rule.segment + 1]
        nats.append(session.score(piece[None, :-1], piece[None, 1:], memory)[0])
    return np.concatenate(nats, axis=1)[0], memory


def tolerance(session: Session) -> float:
    return session.spec.tolerance if session.spec else PRESETS["fp32"].tolerance


def moved(memory: Memory, session: Session, folder: Path, *, adopt: bool = False) -> Memory:
    """A memory that was saved, and loaded by another session."""
    save_memory(memory, folder / "stream")
    return load_memory(folder / "stream", session, adopt=adopt)


def test_a_stream_continues_in_every_precision_and_in_the_run(
    models: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    for begun, continued in MOVES:
        first, second = models[begun], models[continued]
        text, rest = tokens[: FED + 1], tokens[FED : FED + AFTER + 1]
        memory = moved(fed(first, text)[1], second, tmp_path)
        assert memory.positions.tolist() == [FED]
        assert not any(memory.adopted)
        right = fed(second, rest, fed(second, text)[1])[0]
        difference, without = (
            np.abs(fed(second, rest, each)[0] - right).max() for each in (memory, second.start(1))
        )
        assert difference <= max(tolerance(first), tolerance(second)), (begun, continued)
        assert difference < without / 50, (begun, continued, "limits of quantised weights are wide")


def test_bytes_are_those_that_the_graph_writes(
    models: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    """The keys and values of the first layer are the same in both, before they are rounded."""
    converted = moved(fed(models["fp32"], tokens[: FED + 1])[1], models["int8 memory"], tmp_path)
    written = fed(models["int8 memory"], tokens[: FED + 1])[1]
    for name in ("past_key_values.0.key", "past_key_values.0.value"):
        difference = converted.tensors[name].astype(int) - written.tensors[name]
        assert np.abs(difference).max() <= 1, name
        assert (difference == 0).mean() > 0.999, name
        np.testing.assert_allclose(
            converted.tensors[f"{name}_scale"], written.tensors[f"{name}_scale"], rtol=1e-5, err_msg=name
        )


def test_a_stream_of_another_release_continues_bit_for_bit(
    artefacts: dict[str, Path], reseal: Callable[..., None], tokens: np.ndarray, tmp_path: Path
) -> None:
    again = Path(shutil.copytree(artefacts["ring"], tmp_path / "again"))
    reseal(again, producer={"xl-export": "99.0"})
    before, after = open_session(artefacts["ring"]), open_session(again)
    assert before.identity != after.identity
    memory = fed(before, tokens[: FED + 1])[1]
    rest = tokens[FED : FED + AFTER + 1]
    loaded = moved(memory, after, tmp_path)
    assert np.array_equal(fed(after, rest, loaded)[0], fed(before, rest, memory)[0])


def test_streams_of_other_weights_are_adopted_only_on_request(
    run: Path, models: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    from xl_export.artefact.export import export

    tuned_run = Path(shutil.copytree(run, tmp_path / "run"))
    file = tuned_run / "model.safetensors"
    save_file({name: array * np.float32(1.01) for name, array in load_file(file).items()}, file)
    tuned, original = open_session(export(tuned_run, tmp_path / "tuned")), models["fp32"]
    hashes = original.memory_identity.weights, tuned.memory_identity.weights
    memory = fed(original, tokens[: FED + 1])[1]
    with pytest.raises(StreamError, match="give --adopt-streams"):
        moved(memory, tuned, tmp_path)
    words = ("generate", tmp_path / "tuned", "--prompt", "a", "--load-memory", tmp_path / "stream")
    assert "give --adopt-streams" in xl(*words).stderr
    command = xl(*words, "--adopt-streams", "--save-memory", tmp_path / "of-command")
    assert command.exit_code == 0, command.output
    assert f"adopted     from {hashes[0]}" in xl("info", tmp_path / "of-command").stdout
    adopted = moved(memory, tuned, tmp_path, adopt=True)
    assert adopted.adopted.tolist() == [hashes[0]]
    assert np.isfinite(fed(tuned, tokens[FED : FED + AFTER + 1], adopted)[0]).all()
    # It is saved, and what is made of the memory has it too, row by row.
    back = moved(adopted, original, tmp_path, adopt=True)
    assert describe_streams(tmp_path / "stream")["adopted"] == [[hashes[0]]]
    assert back.adopted.tolist() == [" ".join(hashes)]
    rows = tuned.start(2)
    rows.part(0, 2).replace([1], adopted)
    both = rows.join(adopted.copy()).select([2, 0, 1])
    assert both.adopted.tolist() == [hashes[0], "", hashes[0]]
    both.positions[:] = FED, 0, 0
    tuned.step(tokens[None, :1].repeat(3, axis=0), both)
    assert both.adopted.tolist() == [hashes[0], "", ""]
    assert moved(both, tuned, tmp_path).adopted.tolist() == [hashes[0], "", ""]


def test_another_layout_is_refused(
    run: Path, models: dict[str, Session], tokens: np.ndarray, tmp_path: Path
) -> None:
    from xl_export.artefact.export import export

    memory = fed(models["fp32"], tokens[: FED + 1])[1]
    shuffled = Path(shutil.copytree(run, tmp_path / "run"))
    vocab = json.loads((shuffled / "vocab.json").read_text())
    vocab["symbols"].reverse()
    (shuffled / "vocab.json").write_text(json.dumps(vocab))
    for place, options, words in (
        (run, {"memory": "hidden"}, "it has no past_hidden.0"),
        (run, {"memory": "shift"}, "past_key_values.0.key has the shape"),
        (run, {"rule": MemoryRule(mem_len=16, segment=8, clamp_len=5)}, "the memory rule or the vocabulary"),
        (shuffled, {}, "the memory rule or the vocabulary differs"),
    ):
        other = open_session(export(place, tmp_path / "other", force=True, **options))  # type: ignore[arg-type]
        with pytest.raises(StreamError, match=words):
            moved(memory, other, tmp_path, adopt=True)


def test_numbers_that_fp16_does_not_have_are_refused(models: dict[str, Session], tmp_path: Path) -> None:
    memory = models["fp32"].start(1)
    memory.tensors["past_key_values.1.value"][0, 0, 3] = 1e5
    with pytest.raises(StreamError, match="the largest in fp16"):
        moved(memory, models["fp16 memory"], tmp_path)
    assert moved(memory, models["int8 memory"], tmp_path).batch == 1
