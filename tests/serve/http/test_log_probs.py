"""Log-probabilities in OpenAI's form: every token has a name of its own."""

from __future__ import annotations

import numpy as np

from runtimes.contract.vocabulary import CharVocab
from xl_export.serve.core.task import Likeliest
from xl_export.serve.http.base.encoding import TokenTexts
from xl_export.serve.http.openai.completions import LogProbs

TWINS = CharVocab(["a", "a", "b", "b"])  # two tokens have one text, as special tokens and bytes may have
LIKELIEST = Likeliest(ids=np.array([[2, 3, 0]]), log_probs=np.array([[-0.5, -1.0, -2.0]]))


def added(token: int, log_prob: float) -> dict:
    collected = LogProbs(TokenTexts(TWINS), 3, np.array([0]))
    collected.add(token, log_prob, LIKELIEST)
    return collected.take()


def test_a_token_is_never_likeliest_by_the_text_of_another() -> None:
    found = added(3, -1.0)
    assert found["tokens"] == ["b"]
    assert found["top_logprobs"] == [{"token_id:2": -0.5, "a": -2.0, "b": -1.0}]
    assert added(2, -0.5)["top_logprobs"] == [{"token_id:3": -1.0, "a": -2.0, "b": -0.5}]


def test_two_tokens_of_one_text_keep_their_numbers() -> None:
    assert added(1, -5.0)["top_logprobs"] == [{"b": -0.5, "token_id:3": -1.0, "token_id:0": -2.0, "a": -5.0}]


def test_an_answer_names_tokens_by_ids_in_all_places(served, session) -> None:
    body = {"prompt": "The", "max_tokens": 4, "logprobs": 2, "echo": True, "return_tokens_as_token_ids": True}
    (choice,) = served.post("/v1/completions", body).json()["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == [f"token_id:{token}" for token in session.vocab.encode(choice["text"]).tolist()]
    for name, value, top in zip(
        found["tokens"][1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
    ):
        assert all(other.startswith("token_id:") for other in top)
        assert top[name] == value
