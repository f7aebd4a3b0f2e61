"""`/v1/score` and `/tokenize` give what the commands give."""

from __future__ import annotations

import pytest

from runtimes.tasks.score_texts import score_texts
from runtimes.tasks.text_rows import TextToScore
from tests.conftest import RULE
from tests.serve.http.conftest import running, sources
from tests.serve.http.test_clients import comes_true
from trainer.model.config import VocabularyConfig
from trainer.run.checkpoint import load_run, save_tensors

TEXTS = ["Cut a text where you like.", "A", "The same text has the same score, however long it is.", ""]
PAIRS = [("the stream", "A model reads "), ("a segment", "A model reads "), ("words", "It has ")]


def test_scores_are_those_of_the_command(served, session) -> None:
    pairs = [{"text": text, "context": context, "id": text} for text, context in PAIRS]
    ids = session.vocab.encode("as ids").tolist()
    answer = served.post("/v1/score", {"texts": [*TEXTS, *pairs, ids], "tokens": True}).json()
    inputs = [*TEXTS, *(TextToScore(text=text, context=context) for text, context in PAIRS), ids]
    for found, expected in zip(answer["data"], score_texts(session, inputs, tokens=True), strict=True):
        assert found["log_prob"] == pytest.approx(expected.log_prob, abs=1e-3)
        assert found["tokens"] == expected.tokens
        assert (found["characters"], found["bytes"]) == (expected.characters, expected.num_bytes)
        each = [token["log_prob"] for token in found["token_log_probs"]]
        assert each == pytest.approx(expected.token_log_probs.tolist(), abs=1e-4)
        assert [token["id"] for token in found["token_log_probs"]] == expected.token_ids.tolist()
    assert [each["id"] for each in answer["data"]] == [1, 2, 3, 4, *(text for text, _ in PAIRS), 8]


def test_usage_counts_every_text_and_each_context_once(served) -> None:
    """A text without context is fed whole, one after a context with the last token of that, whose others are
    fed once for all texts that follow it; a single token has nothing to predict.
    """
    context = {"context": [1, 2, 3]}
    texts = [[1] * 5, [1], {"text": [4, 5], **context}, {"text": [6], **context}, []]
    usage = served.post("/v1/score", {"texts": texts}).json()["usage"]
    assert usage == {
        "prompt_tokens": 5 + (2 + 3 + 2),
        "completion_tokens": 0,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_states_of_contexts_are_kept_within_their_memory(artefacts) -> None:
    """A request with many contexts keeps as many at once as have room, and answers the same scores."""
    texts = [{"text": f"abc{n}", "context": f"ab{n}"} for n in range(12)]
    with running(sources(("tiny", artefacts["ring"]))) as server:
        expected = server.post("/v1/score", {"texts": texts}).json()["data"]
        engine = server.server.models["tiny"].engine
        one = engine.scheduler.row_bytes + 4 * server.server.models["tiny"].session.vocab.size
    with running(sources(("tiny", artefacts["ring"]), state_bytes=3 * one)) as server:
        assert server.post("/v1/score", {"texts": texts}).json()["data"] == expected
        places = server.server.models["tiny"].engine.places
        body = {"prompt": ["a", "b", "c", "d"], "n": 2, "max_tokens": 3}
        refused = server.post("/v1/completions", body)
        assert refused.status_code == 400
        assert "4 states are wanted at once and this engine accepts at most 3" in refused.text
        answer = server.post("/v1/completions", body | {"prompt": ["a", "b"]})
        assert len(answer.json()["choices"]) == 4
        assert comes_true(lambda: (places.tasks, places.states) == (0, 0))


@pytest.mark.parametrize("behind", [1, 2])
def test_what_is_no_number_is_an_error(make_run, behind: int) -> None:
    """Also if the last piece is a single token, whose log-probability the piece before has computed."""
    run = make_run(layers=1, vocabulary=VocabularyConfig(tie_weights=False))
    state = load_run(run).model.state_dict()
    state["vocabulary.table.0"][5] = 1e30  # the attention of the token overflows, and no other one sees it
    save_tensors(run / "model.safetensors", state)
    with running(sources(("run", run))) as server:
        length = RULE.segment
        assert server.post("/v1/score", {"texts": [[1] * (length + 1)]}).status_code == 200
        text = [*[1] * (length - 1), 5, *[1] * behind]
        answer = server.post("/v1/score", {"texts": [text]})
        assert answer.status_code == 500
        assert "not finite" in answer.json()["error"]["message"]


def test_more_texts_than_places_in_the_queue_are_scored(served, session) -> None:
    texts = [f"text {number}" for number in range(50)]
    found = served.post("/v1/score", {"texts": texts}).json()["data"]
    expected = [score.log_prob for score in score_texts(session, texts)]
    assert [each["log_prob"] for each in found] == pytest.approx(expected, abs=1e-3)


def test_texts_become_ids_and_ids_texts(served, session) -> None:
    text = "Ids, and back."
    found = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == session.vocab.encode(text).tolist()
    assert found["token_strs"] == list(text)
    assert found["count"] == len(text)
    assert served.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    assert served.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_the_vocabulary_says_what_its_tokens_mean(served, session) -> None:
    info = served.get("/tokenizer_info").json()
    assert info["vocab_size"] == session.vocab.size
    assert info["eos_token"] is None
