"""A token log gives the tokens of a text as they are, in whatever parts they come and are taken."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from runtimes.contract.vocabulary import ByteVocab, CharVocab, token_texts
from xl_export.serve.core.task import Likeliest, TokenOut
from xl_export.serve.http.base.token_log import TokenLog, TokenTexts
from xl_export.serve.http.openai.completions import log_probs_of

TWINS = CharVocab(["a", "a", "b", "b"])  # two tokens have one text, as special tokens and bytes may have
LIKELIEST = Likeliest(ids=np.array([[2, 3, 0]]), log_probs=np.array([[-0.5, -1.0, -2.0]]))


def tops(token: int, log_prob: float) -> dict[str, float] | None:
    log = TokenLog(TWINS, np.array([0]), shown=True, top=3)
    log.add_drawn(TokenOut(token, "", log_prob, LIKELIEST))
    (found,) = log_probs_of(log.take(), TokenTexts(TWINS), as_ids=False).top_logprobs
    return found


def test_a_token_is_never_likeliest_by_the_text_of_another() -> None:
    assert tops(3, -1.0) == {"token_id:2": -0.5, "a": -2.0, "b": -1.0}
    assert tops(2, -0.5) == {"token_id:3": -1.0, "a": -2.0, "b": -0.5}
    assert tops(1, -5.0) == {"b": -0.5, "token_id:3": -1.0, "token_id:0": -2.0, "a": -5.0}


@pytest.mark.parametrize("seed", range(5))
def test_parts_of_a_text_are_the_whole_text(seed: int) -> None:
    """Also with characters of several tokens that are taken in parts, and half a character at the end."""
    chance = np.random.default_rng(seed)
    ids = np.frombuffer("né à Ω, 語 and 😀".encode()[:-1], np.uint8).astype(np.int64)
    log_probs = -chance.random(len(ids)).astype(np.float32)
    log_probs[0] = np.nan
    likeliest = Likeliest(ids=np.stack([ids, ids]).T, log_probs=np.stack([log_probs, log_probs - 1]).T)
    log = TokenLog(ByteVocab(), ids[:0], shown=True, top=1)
    taken = []
    at = 0
    while at < len(ids):
        end = min(len(ids), at + int(chance.integers(1, 4)))
        if end == at + 1 and at:
            part = Likeliest(ids=likeliest.ids[at:end], log_probs=likeliest.log_probs[at:end])
            log.add_drawn(TokenOut(int(ids[at]), "", float(log_probs[at]), part))
        else:
            part = Likeliest(ids=likeliest.ids[at:end], log_probs=likeliest.log_probs[at:end])
            log.add(ids[at:end], log_probs[at:end], part)
        at = end
        if at == len(ids) or chance.random() < 0.5:
            taken.append(log.take(at_end=at == len(ids)))
    assert [each for part in taken for each in part.ids] == ids.tolist()
    assert [each for part in taken for each in part.texts] == token_texts(ByteVocab(), ids)
    assert [each for part in taken for each in part.log_probs] == [None, *log_probs[1:].tolist()]
    tops = [each for part in taken for each in part.likeliest]
    assert tops == [[], *([pair] for pair in zip(ids[1:].tolist(), log_probs[1:].tolist(), strict=True))]
    for before, after in itertools.pairwise(taken):
        assert (after.before, after.offset) == (before.ids[-1], before.offset + len("".join(before.texts)))
    assert (log.total, log.known) == (pytest.approx(np.nansum(log_probs)), len(ids) - 1)


@pytest.mark.parametrize("shown", [True, False])
def test_half_a_character_before_the_text_is_completed(shown: bool) -> None:
    first, second = "é".encode()
    log = TokenLog(ByteVocab(), np.array([*b"b", first]), shown=shown, top=0)
    log.add(np.array([second, *b"a"]), None)
    assert log.take().texts == ["é", "a"]
