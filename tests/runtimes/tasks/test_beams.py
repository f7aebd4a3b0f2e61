"""Beam search against a search that feeds every text from its beginning, and the best of several samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from runtimes import open_session
from runtimes.base.logits import log_sum_exp
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.contract.vocabulary import IdsVocab, SpecialTokens, Vocab
from runtimes.tasks.beams import beam_search, best_of
from runtimes.tasks.generate import generate
from runtimes.tasks.score_texts import score_texts
from runtimes.tasks.text_rows import TextToScore
from tests.commands import xl
from tests.from_logits import FromLogits
from trainer.run.checkpoint import load_run, save_tensors

PROMPT = "The class of the"


class Pairs(FromLogits):
    """A session whose next token depends on the two tokens before it; they are its memory."""

    def __init__(self, vocab: Vocab, seed: int) -> None:
        self.vocab, self.identity = vocab, "pairs"
        self.rule = MemoryRule(mem_len=2, segment=4)
        V = vocab.size
        self.table = np.random.default_rng(seed).normal(0, 1.5, (V, V, V)).astype(np.float32)

    def step_bytes(self, *, segment: int) -> int:
        return 1

    def start(self, batch: int) -> Memory:
        return Memory(np.zeros(batch, np.int64), {"last": np.zeros((batch, 2), np.int64)}, self.identity)

    def step(self, tokens: np.ndarray, memory: Memory, *, lengths: None = None) -> tuple[np.ndarray, Memory]:
        logits = []
        for column in tokens.T:
            memory.tensors["last"] = np.stack([memory.tensors["last"][:, 1], column], axis=1)
            logits.append(self.table[tuple(memory.tensors["last"].T)])
        memory.positions += tokens.shape[1]
        return np.stack(logits, axis=1), memory


def next_log_probs(session: Session, tokens: Sequence[int]) -> np.ndarray:
    memory = session.start(1)
    for token in tokens:
        logits, _ = session.predict(np.array([[token]]), memory)
    return logits[0].astype(np.float64) - log_sum_exp(logits[0].astype(np.float64))


def naive_beam_search(
    session: Session, prompt: list[int], beams: int, length: int, penalty: float, end: int | None
) -> list[tuple[list[int], float]]:
    """The definition: one hypothesis at a time, each fed from the beginning of the prompt."""
    alive: list[tuple[list[int], float]] = [([], 0.0)]
    found = []
    for _ in range(length):
        candidates = [
            ([*ids, token], total + log_prob)
            for ids, total in alive
            for token, log_prob in enumerate(next_log_probs(session, [*prompt, *ids]))
        ]
        candidates.sort(key=lambda each: -each[1])
        found += [each for each in candidates[:beams] if each[0][-1] == end]
        alive = [each for each in candidates if each[0][-1] != end][:beams]
    scored = [(ids, total / len(ids) ** penalty) for ids, total in found + alive]
    return sorted(scored, key=lambda each: -each[1])[:beams]


def pairs(end: int | None, seed: int = 0) -> Session:
    return cast(Session, Pairs(IdsVocab(4, special=SpecialTokens(end_of_document=end)), seed))


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("end", [None, 3])
@pytest.mark.parametrize("beams", [1, 2, 3, 5])
def test_beams_are_those_of_the_definition(beams: int, end: int | None, penalty: float) -> None:
    for seed in range(4):
        session = pairs(end, seed)
        found = beam_search(session, [1, 2, 0], beams=beams, max_tokens=6, length_penalty=penalty)
        wanted = naive_beam_search(session, [1, 2, 0], beams, 6, penalty, end)
        assert [each.ids for each in found] == [ids for ids, _ in wanted]
        assert [each.score for each in found] == pytest.approx([score for _, score in wanted])


@pytest.mark.parametrize("end", [None, 3])
def test_an_impossible_continuation_is_never_listed(end: int | None) -> None:
    """The model can only write a row of zeros, and end it."""
    session = pairs(end)
    session.table[:, :, 1:3] = -np.inf  # type: ignore[attr-defined]
    found = beam_search(session, [1, 2, 0], beams=9, max_tokens=2)
    ids = [[0, 0], [0, 3], [3]] if end else [[0, 0], [0, 3], [3, 0], [3, 3]]
    assert sorted(each.ids for each in found) == ids
    assert np.isfinite([each.score for each in found]).all()


def test_a_search_is_over_when_nothing_can_go_on() -> None:
    session = pairs(3)
    session.table[:, :, :3] = -np.inf  # type: ignore[attr-defined]
    assert [each.ids for each in beam_search(session, [1, 2, 0], beams=2, max_tokens=4)] == [[3]]


def test_of_equal_beams_the_first_ones_are_kept_in_order() -> None:
    session = pairs(None)
    session.table[:] = 0  # type: ignore[attr-defined]
    found = beam_search(session, [1, 2, 0], beams=5, max_tokens=2)
    assert [each.ids for each in found] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]


def test_of_equal_samples_the_order_is_that_of_the_rows(make_run: Callable[..., Path]) -> None:
    run = make_run()
    state = load_run(run).model.state_dict()
    save_tensors(run / "model.safetensors", {name: 0 * tensor for name, tensor in state.items()})
    session = open_session(run)
    rows: list[list[int]] = [[] for _ in range(5)]
    for piece in generate(session, [PROMPT] * 5, max_tokens=3):
        rows[piece.row].append(piece.token)
    assert [each.ids for each in best_of(session, PROMPT, count=5, max_tokens=3)] == rows
    assert len({tuple(ids) for ids in rows}) == 5


def test_without_a_seed_it_is_0(artefacts: dict[str, Path]) -> None:
    """Also in `generate` and the command, so that all of them show the same text."""
    session = open_session(artefacts["ring"])
    seeded, other = (best_of(session, PROMPT, count=3, max_tokens=9, seed=seed) for seed in (0, 1))
    assert best_of(session, PROMPT, count=3, max_tokens=9) == seeded != other
    texts = ["", "", ""]
    for piece in generate(session, [PROMPT] * 3, max_tokens=9):
        texts[piece.row] += piece.text
    assert sorted(texts) == sorted(each.text for each in seeded)
    options = ("--prompt", PROMPT, "--tokens", 9, "--best-of", 3, "--json")
    lines = xl("generate", artefacts["ring"], *options).stdout.splitlines()
    assert [json.loads(line)["ids"] for line in lines] == [each.ids for each in seeded]


def test_forked_memory_gives_each_beam_its_own_score(session: Session) -> None:
    found = beam_search(session, PROMPT, beams=3, max_tokens=10)
    assert len({tuple(each.ids) for each in found}) == 3
    texts = [TextToScore(text=each.ids, context=PROMPT) for each in found]
    scores = [score.log_prob for score in score_texts(session, texts)]
    assert [each.log_prob for each in found] == pytest.approx(scores, abs=2e-3)
    assert [session.vocab.encode(each.text).tolist() for each in found] == [each.ids for each in found]


def test_one_beam_is_greedy(session: Session) -> None:
    pieces = generate(session, PROMPT, max_tokens=12, sampler=Sampler(temperature=0))
    (found,) = beam_search(session, PROMPT, beams=1, max_tokens=12)
    assert found.ids == [piece.token for piece in pieces]


def test_a_stream_is_searched_and_stays_as_it_is(sessions: dict[str, Session]) -> None:
    session = sessions["ring"]
    whole = session.vocab.encode(PROMPT)
    memory = session.start(1)
    session.predict(whole[None, :8], memory)
    before = memory.copy()
    found = beam_search(session, whole[8:], beams=2, max_tokens=5, memory=memory)
    assert found[0].ids == beam_search(session, whole, beams=2, max_tokens=5)[0].ids
    assert (memory.positions == before.positions).all()
    assert all((memory.tensors[name] == before.tensors[name]).all() for name in before.tensors)


def test_best_of_puts_the_most_probable_sample_first(sessions: dict[str, Session]) -> None:
    session, sampler = sessions["ring"], Sampler(temperature=0.8)
    found = best_of(session, PROMPT, count=4, max_tokens=9, sampler=sampler, seed=3, stop="e")
    texts = [""] * 4
    for piece in generate(session, [PROMPT] * 4, max_tokens=9, sampler=sampler, seed=3, stop="e"):
        texts[piece.row] += piece.text
    assert sorted(each.text for each in found) == sorted(texts)
    scores = [each.score for each in found]
    assert scores == sorted(scores, reverse=True)
    assert found[0].score == pytest.approx(found[0].log_prob / len(found[0].ids))
