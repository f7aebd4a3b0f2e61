"""OpenAI's client gets what the Python interface gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("openai")

from runtimes.contract.sampling import Sampler
from runtimes.tasks.generate import generate
from tests.serve.http.conftest import running, sources
from trainer.run.checkpoint import load_run, save_tensors
from xl_export.serve.http.base import encoding

PROMPT = "The memory of a stream"
TALES = Path(__file__).parents[3] / "examples" / "stories" / "tales"


def texts(session, prompts, **options) -> list[str]:
    """What `generate` writes after each prompt."""
    found = [""] * len(prompts)
    for piece in generate(session, prompts, **options):
        found[piece.row] += piece.text
    return found


def log_probs(session, tokens: np.ndarray) -> np.ndarray:
    """log p [N, V] of every token after each of the tokens, fed in segments."""
    memory, found = session.start(1), []
    for at in range(0, len(tokens), session.rule.segment):
        logits, memory = session.step(tokens[None, at : at + session.rule.segment], memory)
        found.append(logits[0].astype(np.float64))
    logits = np.concatenate(found)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_the_client_streams_what_generate_gives(openai, session) -> None:
    stream = openai.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=25,
        seed=3,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    found = ["", ""]
    for event in events[:-1]:
        assert event.usage is None
        found[event.choices[0].index] += event.choices[0].text
    assert found == texts(session, [PROMPT, PROMPT], max_tokens=25, seed=3)
    assert len(events) > 40  # about one a token
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 50
    ends = [event.choices[0].finish_reason for event in events[:-1]]
    assert sorted(reason for reason in ends if reason) == ["length", "length"]


IDS = [[5, 8, 2], [7]]
USUAL = {"temperature": 0.8, "top_p": 0.9, "top_k": 20}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "min_p": 0.01}


@pytest.mark.parametrize(
    ("fields", "prompts", "sampler"),
    [
        ({"prompt": [PROMPT, "Segments"], **USUAL}, [PROMPT, "Segments"], Sampler(**USUAL)),
        (PENALTIES, [PROMPT], Sampler(**PENALTIES)),
        ({**PENALTIES, "n": 2}, [PROMPT] * 2, Sampler(**PENALTIES)),  # fed by a task of its own
        ({"prompt": IDS}, IDS, None),
        ({"prompt": IDS[0]}, IDS[:1], None),
        ({"temperature": 0}, [PROMPT], Sampler(temperature=0)),
        ({"top_p": 0}, [PROMPT], Sampler(temperature=0)),  # no share of the probability: the likeliest
    ],
)
def test_a_request_draws_what_generate_draws(
    served, session, fields: dict, prompts: list, sampler: Sampler | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "SLICE_ITEMS", 2)
    answer = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 30, "seed": 7, **fields}).json()
    given = {} if sampler is None else {"sampler": sampler}
    expected = texts(session, prompts, max_tokens=30, seed=7, **given)
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"]["completion_tokens"] == 30 * len(prompts)


def test_of_equals_the_first_is_returned(make_run) -> None:
    """All tokens are equally likely: of choices those with the smallest index, of tokens the smallest ids."""
    run = make_run()
    state = load_run(run).model.state_dict()
    save_tensors(run / "model.safetensors", {name: 0 * tensor for name, tensor in state.items()})
    with running(sources(("run", run))) as server:
        body = {"prompt": [1], "seed": 4, "max_tokens": 5}
        every, best = (
            server.post("/v1/completions", {**body, **more}).json()["choices"]
            for more in ({"n": 4}, {"n": 2, "best_of": 4})
        )
        assert [choice["text"] for choice in best] == [choice["text"] for choice in every[:2]]
        assert len({choice["text"] for choice in every}) == 4
        ids = {"logprobs": 3, "return_tokens_as_token_ids": True}
        (choice,) = server.post("/v1/completions", {**body, **ids}).json()["choices"]
        assert list(choice["logprobs"]["top_logprobs"][0])[:3] == [f"token_id:{token}" for token in range(3)]


def test_the_returned_seed_gives_the_text_again(served) -> None:
    options = {"prompt": PROMPT, "max_tokens": 12}
    answer = served.post("/v1/completions", options).json()
    assert answer["model"] == "tiny", "the first one, since none was asked for"
    assert 0 <= answer["seed"] < 1 << 53  # a double, and so JavaScript, holds it exactly
    again = served.post("/v1/completions", {**options, "seed": answer["seed"]}).json()
    assert again["choices"] == answer["choices"]
    assert served.post("/v1/completions", options).json()["seed"] != answer["seed"]
    signed, unsigned = (
        served.post("/v1/completions", {**options, "seed": seed}).json() for seed in (-1, (1 << 64) - 1)
    )
    assert signed["choices"] == unsigned["choices"]


@pytest.mark.parametrize(
    ("max_tokens", "n", "stream"), [(0, 1, False), (3, 2, False), (3, 1, True), (0, 2, True)]
)
def test_echo_gives_the_true_log_probabilities_of_the_prompt(
    openai, session, max_tokens: int, n: int, stream: bool
) -> None:
    ids = session.vocab.encode(PROMPT)
    done = openai.completions.create(
        model="tiny", prompt=PROMPT, echo=True, logprobs=3, max_tokens=max_tokens, n=n, seed=5, stream=stream
    )
    parts = [e.choices[0] for e in done] if stream else done.choices
    for index in range(n):
        own = [part for part in parts if part.index == index]
        found = [part.logprobs for part in own if part.logprobs]
        tokens = [token for part in found for token in part.tokens]
        log_p = [value for part in found for value in part.token_logprobs]
        likeliest = [top for part in found for top in part.top_logprobs]
        offsets = [offset for part in found for offset in part.text_offset]
        text = "".join(part.text for part in own)
        assert text.startswith(PROMPT)
        assert [part.finish_reason for part in own if part.finish_reason] == ["length"]
        assert "".join(tokens) == text
        assert len(tokens) == len(ids) + max_tokens
        assert offsets == list(range(len(text)))  # of characters
        assert log_p[0] is None
        assert likeliest[0] is None
        every = log_probs(session, session.vocab.encode(text))
        expected = every[np.arange(len(text) - 1), session.vocab.encode(text)[1:]]
        np.testing.assert_allclose(log_p[1:], expected, atol=1e-4)
        np.testing.assert_allclose(
            [max(top.values()) for top in likeliest[1:]], every[:-1].max(axis=1), atol=1e-4
        )
        assert all(3 <= len(top) <= 4 for top in likeliest[1:])
        named = zip(likeliest[1:], tokens[1:], log_p[1:], strict=True)
        assert all(top[token] == value for top, token, value in named)  # lm-eval compares them


def test_the_best_of_several_has_the_highest_mean(openai) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "seed": 11, "logprobs": 0}
    every = openai.completions.create(n=5, **options).choices
    best = openai.completions.create(n=2, best_of=5, **options)
    means = [np.mean(choice.logprobs.token_logprobs) for choice in every]
    order = np.argsort(means)[::-1][:2]
    assert [choice.text for choice in best.choices] == [every[at].text for at in order]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == 30


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_no_part_of_the_text(openai, session, stream: bool) -> None:
    whole = texts(session, [PROMPT], max_tokens=40, seed=2)[0]
    stop = whole[20:23]
    at = whole.find(stop)
    done = openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, seed=2, stop=["\n\n\n", stop], stream=stream
    )
    parts = [event.choices[0] for event in done] if stream else done.choices
    assert "".join(part.text for part in parts) == whole[:at]
    assert parts[-1].finish_reason == "stop"


def test_a_bias_forbids_and_forces_tokens(openai, session) -> None:
    forced = int(session.vocab.encode("q")[0])
    done = openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, seed=0, logit_bias={str(forced): 100}, logprobs=1
    )
    assert done.choices[0].text == "qqqqq"
    assert max(done.choices[0].logprobs.token_logprobs) < -0.5  # under the model, without the bias


def test_a_prompt_that_was_sent_before_is_cached(openai, session) -> None:
    prompt = "Nobody else sends this " + PROMPT
    options = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "seed": 4}
    first, second = (openai.completions.create(**options) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == len(prompt)
    assert first.choices[0].text == second.choices[0].text


def test_every_event_may_have_the_usage(served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": options}
    lines = served.post("/v1/completions", body).text.split("\n\n")[:-2]
    counts = [json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"] for line in lines]
    assert counts == [1, 2, 3, 3, 3]


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


def test_a_text_begins_with_the_token_before_texts() -> None:
    with running(sources(("tales", TALES))) as server:
        vocab = server.server.models["tales"].session.vocab
        asked = {"max_tokens": 8, "seed": 1, "echo": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        ids = vocab.encode(PROMPT).tolist()
        prompts = [
            {"prompt": PROMPT, "bos": True},
            {"prompt": [vocab.special.before_text, *ids]},
            {"prompt": ids, "bos": True},  # ids are fed as they are
            {"prompt": "", "bos": True},  # no other token is needed
        ]
        answers = [server.post("/v1/completions", asked | one).json()["choices"][0] for one in prompts]
    texts, ids_only = [answer["text"] for answer in answers], answers[2]["logprobs"]
    assert answers[0]["logprobs"]["tokens"] == answers[1]["logprobs"]["tokens"]
    assert answers[0]["logprobs"]["token_logprobs"][1] is not None
    assert ids_only["tokens"][0] == f"token_id:{ids[0]}"
    assert texts[0] == texts[1]  # so `text_offset` counts the characters of that token too
    assert answers[3]["logprobs"]["tokens"][0] == f"token_id:{vocab.special.before_text}"
