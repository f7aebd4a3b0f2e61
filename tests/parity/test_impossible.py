"""A token that the model deems impossible has the same finite log-probability in every answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtimes
from runtimes.base.logits import IMPOSSIBLE
from tests.commands import xl
from tests.parity.operations import Implementation
from tests.serve.http.conftest import Running, running, sources
from tests.xl_export.tracing.modules import PADDING

TOKENS = [65, PADDING, 66, PADDING + 1, 67]  # what is padding has the logit -inf
AT = [1, 3]


@pytest.fixture(scope="module")
def padded(module_artefact: Callable[[str], Path]) -> Path:
    return module_artefact("padded ring")


@pytest.fixture(scope="module")
def served(padded: Path) -> Iterator[Running]:
    with running(sources(("padded", padded))) as server:
        yield server


def strict(text: str) -> Any:
    """A document of JSON, which has no word for NaN and infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def answer(server: Running, path: str, body: dict[str, Any]) -> Any:
    answered = server.post(path, body)
    assert answered.is_success, answered.text
    return strict(answered.text)


def is_impossible(log_probs: list[float]) -> None:
    """Of all tokens but the first one."""
    assert [at for at, value in enumerate(log_probs, 1) if value == IMPOSSIBLE] == AT
    assert all(math.isfinite(value) for value in log_probs)


@pytest.mark.parametrize("kind", ["server", "replica", "javascript"])
def test_streams(
    kind: str,
    serve: Callable[[str, Path], Implementation],
    padded: Path,
    request: pytest.FixtureRequest,
) -> None:
    if kind == "javascript":
        implementation: Implementation = request.getfixturevalue(kind)
    else:
        implementation = serve(kind, padded)
    implementation.ask("open", model=str(padded))
    implementation.ask("start", stream="a", rows=1)
    found = list(implementation.ask("score", stream="a", tokens=[TOKENS])["log_probs"])
    assert found[0] is None or math.isnan(found[0])  # nothing comes before it
    is_impossible(np.round(np.array(found[1:], float), 6).tolist())


def test_bits_of_a_stream_add_up(served: Running) -> None:
    whole = answer(served, "/v1/streams", {"tokens": TOKENS, "alternatives": 1})
    assert whole["bits"][0] is None
    is_impossible([-bits * math.log(2) for bits in whole["bits"][1:]])
    assert whole["total_bits"] == pytest.approx(sum(whole["bits"][1:]))
    assert whole["counted"] == len(TOKENS) - 1


@pytest.mark.parametrize("context", [[], [70, 71]])
def test_scores(served: Running, padded: Path, context: list[int]) -> None:
    texts = [{"text": TOKENS, "context": context}, {"text": [65, 66]}]
    body = {"texts": texts, "tokens": True}
    impossible, other = answer(served, "/v1/score", body)["data"]
    each = [token["log_prob"] for token in impossible["token_log_probs"]]
    is_impossible(each[len(context) > 0 :])  # the first token has one after a context only
    assert impossible["log_prob"] == pytest.approx(sum(each))
    assert other["log_prob"] > IMPOSSIBLE
    session = runtimes.open_session(padded, threads=1, device="cpu")
    given = runtimes.TextToScore(text=TOKENS, context=context)
    (score,) = runtimes.score_texts(session, [given], tokens=True)
    assert score.log_prob == pytest.approx(impossible["log_prob"])
    assert score.token_log_probs is not None
    np.testing.assert_allclose(score.token_log_probs, each, atol=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_completions(served: Running, stream: bool) -> None:
    # With this seed the drawn token is not the likeliest one, whose list would have a lower one.
    body = {"prompt": TOKENS, "echo": True, "logprobs": 2, "max_tokens": 1, "seed": 1, "stream": stream}
    if stream:
        lines = served.post("/v1/completions", body).text.split("\n\n")
        events = [strict(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        found = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    else:
        found = [answer(served, "/v1/completions", body)["choices"][0]["logprobs"]]
    log_probs = [value for part in found for value in part["token_logprobs"]]
    likeliest = [top for part in found for top in part["top_logprobs"]]
    assert log_probs[0] is likeliest[0] is None
    is_impossible(log_probs[1:])
    assert [min(top.values()) for top in likeliest[1:]] == log_probs[1:]


def test_logits(served: Running, padded: Path) -> None:
    """Minus infinity is the lowest number of float32 in JSON, whose probability is 0 too."""
    ids = np.array([TOKENS])
    expected, _ = (session := runtimes.open_session(padded, threads=1, device="cpu")).step(
        ids[:, : session.rule.segment], session.start(1)
    )
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": list(ids.shape), "data": TOKENS}
    body = {"inputs": [tensor], "parameters": {"sequence_id": 1, "sequence_start": True}}
    stream = answer(served, "/v1/streams", {})["stream"]["id"]
    for numbers in (
        answer(served, "/v2/models/padded/infer", body)["outputs"][0]["data"],
        answer(served, f"/v1/streams/{stream}/step", {"inputs": {"input_ids": [TOKENS]}})["outputs"][
            "logits"
        ],
    ):
        found = np.array(numbers, np.float32).reshape(len(TOKENS), -1)
        assert np.isfinite(found).all()
        finite = np.maximum(expected[0], np.finfo(np.float32).min)
        np.testing.assert_allclose(found[: len(finite)], finite, rtol=1e-5, atol=1e-5)


def test_commands(padded: Path, tmp_path: Path) -> None:
    lines, ids = tmp_path / "texts.jsonl", tmp_path / "ids.npy"
    lines.write_text(f"{json.dumps(TOKENS)}\n[65, 66]\n")
    np.save(ids, np.array(TOKENS))
    scored = xl("score", padded, "--input", lines, "--tokens", "--json")
    first, second = map(strict, scored.stdout.splitlines())
    is_impossible([token["log_prob"] for token in first["token_log_probs"]])
    assert first["log_prob"] < IMPOSSIBLE < second["log_prob"]
    document = strict(xl("eval", padded, "--text", ids, "--ids", "--json").stdout)
    assert document["impossible"] == len(AT)
    assert document["nats"] == pytest.approx(-first["log_prob"])
    assert "2 of the tokens, each counted as 9,999 nats" in xl("eval", padded, "--text", ids, "--ids").stdout
    searched = xl("generate", padded, "--prompt", "a", "--beams", "255", "--tokens", "1", "--json")
    beams = list(map(strict, searched.stdout.splitlines()))
    assert sorted(beam["ids"] for beam in beams) == [[token] for token in range(PADDING)]
