"""The model of Triton Inference Server's Python backend, without the server: whose memory a request sees."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import runtimes
from runtimes.base.errors import ConfigError, UserError
from tests.commands import refused, xl
from tests.triton_server import read_config
from xl_export.deployment import server_model
from xl_export.deployment.model_repository import write_session
from xl_export.deployment.server_model import Answer, Request, Sequences, TritonPythonModel, rows_of

ARTEFACT = Path(__file__).parents[2] / "data" / "small"
ROWS = 3
KINDS = {"was cancelled", "expected 1 to", "has no memory", "the request says"}  # of errors


@pytest.fixture(scope="module")
def session() -> runtimes.Session:
    return runtimes.open_session(ARTEFACT, threads=1, device="cpu")


class Alone:
    """A session of a sequence's own, which reads what it reads in the same pieces."""

    def __init__(self, session: runtimes.Session) -> None:
        self.session, self.memory = session, session.start(1)

    @property
    def position(self) -> int:
        return int(self.memory.positions[0])

    def check(self, request: Request, answer: Answer) -> None:
        """Bit for bit: a step gives each row what it gives in any other batch of equal length."""
        before = self.memory.copy()
        logits, _ = self.session.predict(request.tokens[None], self.memory)
        assert (answer.logits is None) is not request.logits
        assert answer.logits is None or np.array_equal(answer.logits, logits[0])
        assert (answer.log_probs is None) is (request.targets is None)
        if request.targets is not None:
            log_probs, _ = self.session.score(request.tokens[None], request.targets[None], before)
            assert np.array_equal(answer.log_probs, log_probs[0])
        assert answer.position == self.position


def drawn(chance: random.Random, sequence: int | str, session: runtimes.Session, at: int | None) -> Request:
    """Any request, some of which are nonsense. at: the position of a sequence that goes on."""
    length = chance.choice([1, 1, 1, 3, session.rule.segment, session.rule.segment + 1])
    tokens = np.array(chance.choices(range(session.vocab.size), k=length))
    start = chance.random() < (0.7 if at is None else 0.1)
    right = 0 if start else at
    return Request(
        sequence=sequence,
        tokens=tokens,
        start=start,
        end=chance.random() < 0.1,
        cancelled=chance.random() < 0.05,
        targets=np.roll(tokens, -1) if chance.random() < 0.4 else None,
        position=chance.choice([None, right, right, 1000]),
        logits=chance.random() < 0.8,
    )


def test_a_kept_sequence_outlives_a_silently_dropped_one(
    session: runtimes.Session,
) -> None:
    """The server keeps two: A rests longest, B is cancelled in its queue, and C begins in B's place."""
    oldest = {"max_candidate_sequences": 2}
    sequences = Sequences(session, rows_of({"sequence_batching": {"oldest": oldest}, "max_batch_size": 1}))
    begun = [Request(sequence=name, tokens=np.array([1]), start=True) for name in "ABC"]
    goes_on = Request(sequence="A", tokens=np.array([2]), position=1)
    sequences.answer(begun)
    (answer,) = sequences.answer([goes_on])
    assert isinstance(answer, Answer)
    assert answer.position == 2


def test_each_answer_is_right_or_an_error(session: runtimes.Session) -> None:
    """Sequences begin, end, are cancelled, lose their rows to others and send nonsense, at random."""
    chance, sequences = random.Random(0), Sequences(session, ROWS)
    alone: dict[int | str, Alone] = {}
    answered, errors = 0, set[str]()
    for _ in range(300):
        names = chance.sample([1, 2, 3, 4, "five"], k=chance.randint(1, ROWS))
        requests = [
            drawn(chance, name, session, alone[name].position if name in alone else None) for name in names
        ]
        for request, answer in zip(requests, sequences.answer(requests), strict=True):
            if request.start or request.cancelled:
                alone.pop(request.sequence, None)
            if isinstance(answer, Answer):
                answered += 1
                if request.start:
                    alone[request.sequence] = Alone(session)
                alone[request.sequence].check(request, answer)
            else:
                errors |= {kind for kind in KINDS if kind in str(answer)}
                if "has no memory" in str(answer):
                    alone.pop(request.sequence, None)
            if request.end:
                alone.pop(request.sequence, None)
    assert answered > 150
    assert errors == KINDS


def test_requests_of_equal_length_share_a_step(session: runtimes.Session) -> None:
    """And no rows but theirs are computed: those between them belong to others."""
    sequences, shapes = Sequences(session, 4), []

    def counted(tokens: np.ndarray, memory: runtimes.Memory, **_: Any) -> Any:
        shapes.append(tokens.shape)
        return session.predict(tokens, memory)

    sequences.session = SimpleNamespace(rule=session.rule, vocab=session.vocab, predict=counted)  # type: ignore
    start = [Request(sequence=name, tokens=np.array([1]), start=True) for name in "abcd"]
    sequences.answer(start)
    one = [replace(request, start=False) for request in start]
    sequences.answer([one[3], replace(one[1], tokens=np.array([2, 3])), one[0], one[2]])
    assert shapes == [(4, 1), (1, 1), (2, 1), (1, 2)]


def test_a_step_that_fails_ends_its_sequences_alone(session: runtimes.Session) -> None:
    sequences = Sequences(session, ROWS)
    ask = [Request(sequence=name, tokens=np.array([1]), start=True) for name in "ab"]
    sequences.answer(ask)
    broken = [replace(ask[0], start=False, tokens=np.array([1, 2])), replace(ask[1], start=False)]

    def fails(tokens: np.ndarray, memory: runtimes.Memory) -> Any:
        if tokens.shape[1] == 2:
            raise UserError("the device is gone.")
        return session.predict(tokens, memory)

    sequences.session = SimpleNamespace(rule=session.rule, vocab=session.vocab, predict=fails)  # type: ignore
    failed, right = sequences.answer(broken)
    assert str(failed) == "the device is gone."
    assert isinstance(right, Answer)
    assert right.position == 2
    (after,) = sequences.answer([replace(ask[0], start=False)])
    assert "sequence a has no memory here" in str(after)


def test_the_backend_finds_what_it_asks_for(tmp_path: Path) -> None:
    """The module, the artefact and a configuration whose number of sequences is that of the rows."""
    folder = write_session(ARTEFACT, tmp_path / "models")
    config = read_config((folder / "config.pbtxt").read_text())
    assert (config["name"], config["backend"], config["max_batch_size"]) == (["small"], ["python"], [32])
    assert [tensor["name"][0] for tensor in config["input"]] == ["input_ids", "targets", "position"]
    assert [tensor.get("optional") for tensor in config["input"]] == [None, [True], [True]]
    rows = config["sequence_batching"][0]["oldest"][0]["max_candidate_sequences"][0]
    assert (folder / "1" / "model.py").read_bytes() == Path(server_model.__file__).read_bytes()
    model = TritonPythonModel()
    model.initialize(
        {
            "model_repository": str(folder),
            "model_config": '{"max_batch_size": 4, '
            '"sequence_batching": {"oldest": {"max_candidate_sequences": 5}}, '
            '"parameters": {"threads": {"string_value": "1"}}}',
        }
    )
    assert (model.sequences.memory.batch, rows) == (5 + 2 * 4, 64)


def test_memory_that_is_not_written_in_place_is_refused(
    artefacts: dict[str, Path], run: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"has shift memory .* export it with --memory ring"):
        write_session(artefacts["shift"], tmp_path / "models")
    options = ("--out", tmp_path / "a", "--triton", tmp_path / "models", "--triton-backend", "python")
    refused(xl("export", run, *options, "--memory", "shift"), "give --memory ring")
    assert not list(tmp_path.iterdir())
