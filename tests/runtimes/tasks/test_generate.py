"""Generation: reproducible, the same alone and in a batch, ended by stop strings, continued from memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import StreamError, UserError
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.contract.vocabulary import CharVocab, IdsVocab, SpecialTokens, Vocab
from runtimes.sessions.open import open_session
from runtimes.tasks.generate import Piece, generate
from tests.from_logits import FromLogits

GREEDY = Sampler(temperature=0.0)
SAMPLED = Sampler(temperature=0.8, top_k=20, top_p=0.95)
PROMPTS = ["T", "The class", "x = ", "A longer prompt than the segment and than the memory of this model: "]


def texts(pieces: Sequence[Piece], rows: int) -> list[str]:
    """The text that each row generated."""
    return ["".join(piece.text for piece in pieces if piece.row == row) for row in range(rows)]


def ids(pieces: Sequence[Piece], row: int = 0) -> list[int]:
    return [piece.token for piece in pieces if piece.row == row]


class Recital(FromLogits):
    """A session that recites a fixed text whatever it is fed; for what generation does with text."""

    def __init__(self, tokens: Sequence[int], vocab: Vocab) -> None:
        self.tokens, self.vocab, self.rule, self.identity = (
            list(tokens),
            vocab,
            MemoryRule(mem_len=4, segment=4),
            "recital",
        )
        self.fed, self.sampler = 0, Sampler()

    def start(self, batch: int) -> Memory:
        return Memory(np.zeros(batch, np.int64), {}, self.identity)

    def step(self, tokens: np.ndarray, memory: Memory, *, lengths: None = None) -> tuple[np.ndarray, Memory]:
        memory.positions += tokens.shape[1]
        logits = np.zeros((*tokens.shape, self.vocab.size), np.float32)
        logits[:, -1, self.tokens[min(self.fed, len(self.tokens) - 1)]] = 1
        self.fed += 1
        return logits, memory


def recite(text: str, stop: Sequence[str], vocab: Vocab | None = None) -> list[str]:
    """The text of each piece when a model says `text`."""
    vocab = vocab or CharVocab.build(text + "?")
    tokens = vocab.encode(text).tolist()
    pieces = generate(Recital(tokens, vocab), "?", max_tokens=len(tokens), sampler=GREEDY, stop=stop)
    return [piece.text for piece in pieces]


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_of_a_batch_generate_what_they_generate_alone(session: Session, sampler: Sampler) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "sampler": sampler, "seed": 3}
    together = list(generate(session, PROMPTS, **options))
    for row, prompt in enumerate(PROMPTS):  # what is drawn in a row depends on its number
        alone = list(generate(session, [PROMPTS[0]] * row + [prompt], **options))
        assert ids(together, row) == ids(alone, row), prompt


def test_no_step_follows_the_last_token_without_memory() -> None:
    session = Recital([1] * 9, CharVocab.build("ab"))
    list(generate(session, "b", max_tokens=5, sampler=GREEDY))
    assert session.fed == 5  # one for the prompt, four of the five tokens fed back


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("END",), "one two "),
        (("two END thr",), "one "),  # straddles many tokens
        (("thr", "two"), "one "),  # the first to appear ends the text
        (("one",), ""),
        (("E END", "END"), "one two "),  # a longer one that nearly fits does not hide the shorter
        (("threes", "absent"), "one two END three"),  # held back until it cannot be one, released at the end
        ((), "one two END three"),
    ],
)
def test_a_stop_string_ends_the_text_and_is_excluded(stop: Sequence[str], expected: str) -> None:
    pieces = recite("one two END three", stop)
    assert "".join(pieces) == expected
    so_far = ""
    for piece in pieces:  # nothing is ever shown that would have to be taken back
        so_far += piece
        assert expected.startswith(so_far)


@pytest.mark.parametrize("stop", [("aab",), ("abab", "bb"), ("ba", "aba"), ("aaaa",)])
def test_stop_strings_cut_as_a_search_of_the_text_would(stop: Sequence[str]) -> None:
    for number in range(64):
        whole = "".join("ab"[number >> bit & 1] for bit in range(6))
        ends = [end for end in range(1, 7) if any(text in whole[:end] for text in stop)]
        cut = min(whole[: ends[0]].find(text) for text in stop if text in whole[: ends[0]]) if ends else 6
        assert "".join(recite(whole, stop)) == whole[:cut], whole


def test_a_stopped_row_emits_nothing_while_others_continue(session: Session) -> None:
    free = texts(list(generate(session, PROMPTS[:3], max_tokens=25, sampler=GREEDY)), 3)
    stop = free[0][3:5]
    pieces = list(generate(session, PROMPTS[:3], max_tokens=25, sampler=GREEDY, stop=[stop]))
    for row, text in enumerate(texts(pieces, 3)):
        assert text == free[row].split(stop)[0]
    assert len(ids(pieces, 0)) == free[0].find(stop) + 2


@pytest.mark.parametrize("kind", ["ring", "torch"])
def test_streams_that_go_on_take_unequal_prompts_and_end_apart(
    kind: str, sessions: dict[str, Session]
) -> None:
    session = sessions[kind]
    before, prompts = ["The cla", "import "], [" and a long prompt of several segments", "x"]

    def continued(rows: list[int], stop: Sequence[str]) -> tuple[list[Piece], Memory]:
        memory = session.start(len(rows))
        list(generate(session, [before[row] for row in rows], max_tokens=3, sampler=SAMPLED, memory=memory))
        given = [prompts[row] for row in rows]
        pieces = generate(session, given, max_tokens=12, sampler=SAMPLED, stop=stop, memory=memory)
        return list(pieces), memory

    free = texts(continued([0, 1], ())[0], 2)
    pieces = [free[0][at : at + 3] for at in range(2, 8)]
    stop = [next(piece for piece in pieces if piece not in free[1])]  # ends the first row alone
    together, memory = continued([0, 1], stop)
    assert {piece.row: piece.ended for piece in together if piece.ended} == {0: "stop", 1: "length"}
    for row in (0, 1):  # what is drawn in a row depends on its number
        others, apart = continued([row, row], stop)
        assert ids(together, row) == ids(others, row)
        text = len(before[row]) + 3 + len(prompts[row]) + len(ids(together, row))
        assert memory.positions[row] == apart.positions[row] == text  # exactly what was emitted
        token = np.zeros((2, 1), np.int64)
        after = [session.predict(token, streams.copy())[0][row] for streams in (memory, apart)]
        assert np.abs(after[0] - after[1]).max() < 1e-4


def test_an_empty_memory_changes_no_answer(sessions: dict[str, Session]) -> None:
    session, prompts = sessions["ring"], ["ab", "a"]
    alone = [piece.token for piece in generate(session, prompts, max_tokens=5)]
    kept = [piece.token for piece in generate(session, prompts, max_tokens=5, memory=session.start(2))]
    assert kept == alone


def test_logits_that_are_not_finite_end_in_one_sentence() -> None:
    session = Recital([0], CharVocab.build("ab"))
    broken = SimpleNamespace(
        **vars(session), spec=None, start=session.start, predict=lambda t, m: (np.full((1, 2), np.nan), m)
    )
    with pytest.raises(UserError, match="not finite"):
        list(generate(broken, "a", max_tokens=2))  # type: ignore[arg-type]


def test_words_after_a_prompt_begin_with_a_blank() -> None:
    from runtimes.contract.rule import MemoryRule
    from runtimes.contract.vocabulary import WordVocab

    class Counter(FromLogits):  # says the next word of the vocabulary, again and again
        identity, rule, state = "counter", MemoryRule(mem_len=1, segment=4), ()
        vocab = WordVocab(["<unk>", "<eos>", "one", "two", "three"])

        def start(self, batch: int) -> Memory:
            return Memory(np.zeros(batch, np.int64), {}, self.identity)

        def step(
            self, tokens: np.ndarray, memory: Memory, *, lengths: None = None
        ) -> tuple[np.ndarray, Memory]:
            return np.eye(5, dtype=np.float32)[(tokens + 1) % 5], memory

    for prompt, expected in (("one", " two three <unk>\n"), ("two three <unk>\n", "one two three <unk>")):
        start = prompt if prompt == "one" else "<unk>\n"
        pieces = generate(Counter(), start, max_tokens=4, sampler=Sampler(temperature=0))  # type: ignore[arg-type]
        assert "".join(piece.text for piece in pieces) == expected


def test_prompts_of_ids_give_what_their_texts_give(session: Session) -> None:
    encoded = [session.vocab.encode(prompt) for prompt in PROMPTS[:3]]
    expected = list(generate(session, PROMPTS[:3], max_tokens=12, sampler=GREEDY))
    mixed = [encoded[0], encoded[1].tolist(), PROMPTS[2]]
    assert list(generate(session, mixed, max_tokens=12, sampler=GREEDY)) == expected
    alone = ids(list(generate(session, PROMPTS[1], max_tokens=12, sampler=GREEDY)))
    for prompt in (encoded[1], encoded[1].tolist(), tuple(encoded[1]), [encoded[1]]):
        assert ids(list(generate(session, prompt, max_tokens=12, sampler=GREEDY))) == alone


def test_a_row_ends_with_the_end_of_a_document() -> None:
    vocab = IdsVocab(9, special=SpecialTokens(end_of_document=8))
    pieces = list(generate(Recital([3, 4, 8, 5], vocab), [1], max_tokens=9, sampler=GREEDY))
    assert [(piece.token, piece.text, piece.ended) for piece in pieces] == [
        (3, " 3", None),
        (4, " 4", None),
        (8, "", "end"),
    ]
    longest = list(generate(Recital([3, 4], vocab), [1], max_tokens=2, sampler=GREEDY))
    assert [piece.ended for piece in longest] == [None, "length"]


def test_the_end_of_a_document_releases_pending_text() -> None:
    vocab = IdsVocab(3, names=["a", "b", "."], special=SpecialTokens(end_of_document=2))
    pieces = list(generate(Recital([0, 2], vocab), [1], max_tokens=9, sampler=GREEDY, stop="a b"))
    assert [(piece.text, piece.ended) for piece in pieces] == [("", None), (" a", "end")]
    stopped = list(generate(Recital([0, 1, 0], vocab), [1], max_tokens=9, sampler=GREEDY, stop="b"))
    assert [(piece.text, piece.ended) for piece in stopped] == [(" a", None), ("", "stop")]


@pytest.mark.parametrize("stop", ["1", "0 1", "1 0", " 1 ", "01"])
def test_a_stop_string_of_ids_is_made_of_whole_tokens(stop: str) -> None:
    tokens = [10, 0, 11, 10, 1, 0, 2]
    pieces = list(
        generate(Recital(tokens, IdsVocab(12)), [1], max_tokens=len(tokens), sampler=GREEDY, stop=stop)
    )
    text = "".join(piece.text for piece in pieces)
    at = {"1": 4, "0 1": 7, "1 0": 4, " 1 ": 4, "01": 7}[stop]
    assert text == "".join(f" {token}" for token in tokens[:at])
    assert pieces[-1].ended == ("stop" if at < 7 else "length")


def test_a_call_that_is_not_iterated_changes_no_memory(sessions: dict[str, Session]) -> None:
    session = sessions["ring"]
    memory = session.start(2)
    generate(session, ["The class", "a"], max_tokens=1, memory=memory)
    assert memory.positions.tolist() == [0, 0]


def test_tokens_without_text_need_no_decoder() -> None:
    class Undecodable(IdsVocab):
        def decoder(self) -> Callable[[int], str]:
            raise AssertionError("no text was asked for")

    pieces = list(generate(Recital([3, 4], Undecodable(9)), [1], max_tokens=2, sampler=GREEDY, text=False))
    assert [(piece.token, piece.text) for piece in pieces] == [(3, ""), (4, "")]


def test_prompts_that_need_padding_leave_a_memory_without_it_alone(artefacts: dict[str, Path]) -> None:
    session = open_session(artefacts["shift"])
    session.spec = dataclasses.replace(session.spec, without=("padding",))  # type: ignore[misc]
    memory = session.start(2)
    with pytest.raises(StreamError, match="does not keep the promise `padding`"):
        list(generate(session, ["T", "The class"], max_tokens=2, memory=memory))
    assert memory.positions.tolist() == [0, 0]
