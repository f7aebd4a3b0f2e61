"""OpenAI's client gets what the Python interface gives."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("openai")

from runtimes.contract.sampling import Sampler
from runtimes.tasks.generate import generate

PROMPT = "The memory of a stream"


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


def test_a_seed_gives_what_generate_gives(openai, session) -> None:
    prompts, options = [PROMPT, "Segments"], {"temperature": 0.8, "top_p": 0.9}
    done = openai.completions.create(
        model="tiny", prompt=prompts, max_tokens=30, seed=7, extra_body={"top_k": 20}, **options
    )
    expected = texts(session, prompts, max_tokens=30, seed=7, sampler=Sampler(top_k=20, **options))
    assert [choice.text for choice in done.choices] == expected
    assert [choice.finish_reason for choice in done.choices] == ["length", "length"]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT) + 8, 60)


@pytest.mark.parametrize("n", [1, 2])  # with several choices the prompt is fed by a task of its own
def test_penalties_and_min_p_give_what_generate_gives(openai, session, n: int) -> None:
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.3}
    more = {"min_p": 0.01, "repetition_penalty": 1.2}
    done = openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, seed=7, n=n, extra_body=more, **penalties
    )
    sampler = Sampler(**penalties, **more)
    expected = texts(session, [PROMPT] * n, max_tokens=30, seed=7, sampler=sampler)
    assert [choice.text for choice in done.choices] == expected
    assert expected != texts(session, [PROMPT] * n, max_tokens=30, seed=7)


def test_a_stream_is_the_same_text_in_parts(openai, session) -> None:
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


def test_the_returned_seed_gives_the_text_again(served) -> None:
    options = {"prompt": PROMPT, "max_tokens": 12}
    answer = served.post("/v1/completions", options).json()
    assert 0 <= answer["seed"] < 1 << 53  # a double, and so JavaScript, holds it exactly
    again = served.post("/v1/completions", {**options, "seed": answer["seed"]}).json()
    assert again["choices"] == answer["choices"]
    assert again["seed"] == answer["seed"]
    assert served.post("/v1/completions", options).json()["seed"] != answer["seed"]
    lines = served.post("/v1/completions", {**options, "stream": True}).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    (seed,) = {event["seed"] for event in events}
    whole = served.post("/v1/completions", {**options, "seed": seed}).json()["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    fed = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True}).json()
    assert fed["seed"] is None


def test_the_events_end_with_done(served) -> None:
    answer = served.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "text_completion" for line in lines[:-1])


def test_token_ids_are_a_prompt(openai, session) -> None:
    ids = session.vocab.encode(PROMPT).tolist()
    one = openai.completions.create(model="tiny", prompt=ids, max_tokens=9, seed=1)
    two = openai.completions.create(model="tiny", prompt=[ids, ids[:4]], max_tokens=9, seed=1)
    assert one.choices[0].text == texts(session, [PROMPT], max_tokens=9, seed=1)[0]
    assert [c.text for c in two.choices] == texts(session, [PROMPT, PROMPT[:4]], max_tokens=9, seed=1)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
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


def test_temperature_zero_is_greedy_and_seeds_are_random(openai, session) -> None:
    greedy = openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    assert greedy.choices[0].text == texts(session, [PROMPT], max_tokens=8, sampler=Sampler(temperature=0))[0]
    drawn = {openai.completions.create(model="tiny", prompt=PROMPT).choices[0].text for _ in range(3)}
    assert len(drawn) == 3
    assert {len(text) for text in drawn} == {16}


def test_without_a_model_the_first_one_answers(served) -> None:
    answer = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).json()
    assert answer["model"] == "tiny"


def test_every_event_may_have_the_usage(served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": options}
    lines = served.post("/v1/completions", body).text.split("\n\n")[:-2]
    counts = [json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"] for line in lines]
    assert counts == [1, 2, 3, 3, 3]


def test_neighbours_of_the_usual_numbers_are_taken(served) -> None:
    def text(**fields: object) -> str:
        answer = served.post("/v1/completions", {"prompt": "abc", "max_tokens": 12, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    assert text(top_p=0, seed=3) == text(temperature=0), "no share of the probability: the likeliest token"
    assert text(seed=-1) == text(seed=(1 << 64) - 1)
