"""The body of a request for completions, and what it asks of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from runtimes.base.errors import UserError
from runtimes.contract.sampling import SETTINGS
from runtimes.contract.session import Session
from runtimes.contract.vocabulary import Vocab, token_texts
from runtimes.tasks.generate import refuse_empty_stops
from runtimes.tasks.text_rows import tokens_around
from xl_export.serve.core.settings import Limits
from xl_export.serve.core.task import SamplingParams
from xl_export.serve.http.base.encoding import encoding
from xl_export.serve.http.base.errors import RefusedError, doc
from xl_export.serve.http.base.limits import refuse_long_answer, refuse_outside

MOST_LIKELIEST = 20  # tokens for each one
MOST_STOPS = 16
LONGEST_STOP = 1000
MOST_BIASES = 1024
LARGEST_BIAS = 100.0
DEFAULT_TOKENS = 16  # as OpenAI's
SPECIAL = {
    "top_k": -1,
    "top_p": 0,
}  # values below the range of a setting, as in vLLM: all tokens, and the likeliest


AT_LEAST_0 = msgspec.Meta(ge=0)
AT_LEAST_1 = msgspec.Meta(ge=1)


def bounds(name: str) -> msgspec.Meta:
    """The range of a setting of the sampler."""
    setting = SETTINGS[name].range
    if setting.exclusive and name not in SPECIAL:
        return msgspec.Meta(gt=setting.least, le=setting.most)
    return msgspec.Meta(ge=SPECIAL.get(name, setting.least), le=setting.most)


def help_of(name: str) -> msgspec.Meta:
    """The description of a setting of the sampler."""
    return doc(SETTINGS[name].option.help)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the events of a completion have in addition to tokens."""

    include_usage: Annotated[bool, doc("Whether a last event has the usage.")] = False
    continuous_usage_stats: Annotated[bool, doc("Whether each event has the usage, as in vLLM.")] = False


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How tokens are drawn. `null` is the default of every field: what the model recommends."""

    temperature: Annotated[Annotated[float, bounds("temperature")] | None, help_of("temperature")] = None
    top_k: Annotated[Annotated[int, bounds("top_k")] | None, help_of("top_k")] = None
    top_p: Annotated[Annotated[float, bounds("top_p")] | None, help_of("top_p")] = None
    min_p: Annotated[Annotated[float, bounds("min_p")] | None, help_of("min_p")] = None
    repetition_penalty: Annotated[
        Annotated[float, bounds("repetition_penalty")] | None, help_of("repetition_penalty")
    ] = None
    presence_penalty: Annotated[
        Annotated[float, bounds("presence_penalty")] | None, help_of("presence_penalty")
    ] = None
    frequency_penalty: Annotated[
        Annotated[float, bounds("frequency_penalty")] | None, help_of("frequency_penalty")
    ] = None
    stop: Annotated[
        str | list[str] | None,
        doc("Strings that end the text and are not part of it. A stored stream keeps what was drawn."),
    ] = None
    seed: Annotated[
        int | None, doc("The same seed draws the same tokens; without it the server chooses one.")
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        doc("Numbers from -100 to 100 that are added to the logits of these token ids."),
    ] = None
    ignore_eos: Annotated[bool | None, doc("Whether the end of a document does not end the text.")] = None


class CompletionBody(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The fields of a request. `null` is the default of every field: OpenAI's, except for sampling."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        doc("A text, token ids, a list of texts, or a list of lists of ids."),
    ]
    bos: Annotated[bool | None, doc("Whether the token that precedes a text is put before each text.")] = None
    model: Annotated[str | None, doc("A name from /v1/models; without it the first model answers.")] = None
    max_tokens: Annotated[Annotated[int, AT_LEAST_0] | None, doc("The most tokens to draw.")] = None
    n: Annotated[Annotated[int, AT_LEAST_1] | None, doc("How many choices are returned for each prompt.")] = (
        None
    )
    best_of: Annotated[
        Annotated[int, AT_LEAST_1] | None,
        doc("How many choices are drawn; those with the highest mean log-probability are returned."),
    ] = None
    stream: Annotated[bool | None, doc("Whether tokens come as server-sent events when they are drawn.")] = (
        None
    )
    stream_options: Annotated[StreamOptions | None, doc("What the events have in addition to tokens.")] = None
    logprobs: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=MOST_LIKELIEST)] | None,
        doc("How many of the likeliest tokens to return for each token, with log-probabilities in nats."),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, doc("Whether logprobs name each token token_id:N, by its id, as in vLLM.")
    ] = None
    echo: Annotated[bool | None, doc("Whether the prompt is part of the answer.")] = None
    user: Annotated[str | None, doc("Accepted and not used.")] = None
    suffix: Annotated[str | None, doc("Accepted if it is empty, and refused otherwise.")] = None
    min_tokens: Annotated[
        Annotated[int, AT_LEAST_0] | None,
        doc("Served up to max_tokens, together with ignore_eos and without stop; refused otherwise."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a request asks for, checked."""

    prompts: list[np.ndarray]
    """Token ids of each prompt."""
    texts: list[str]
    """Text of each prompt if it is repeated, empty otherwise."""
    sampling: SamplingParams | None
    """Sampling parameters of the first choice; None draws nothing."""
    prompt_tokens: int
    """Number of tokens of all prompts together."""
    n: int
    """Number of choices of each prompt that are returned."""
    best_of: int
    """Number of choices of each prompt that are drawn."""
    log_probs: int | None
    """Number of likeliest tokens for each token; None for no log-probabilities."""
    as_ids: bool
    """Whether tokens are named by their ids."""
    echo: bool
    stream: bool
    usage: bool
    """Whether a last event has the usage."""
    each_usage: bool
    """Whether each event has the usage."""


def plan_of(body: CompletionBody, session: Session, limits: Limits) -> Plan:
    """The plan of a request; raises RefusedError, with the field, for what cannot be served."""
    vocab = session.vocab
    if body.suffix:
        raise RefusedError(
            f"suffix is {body.suffix!r:.40} and is not served: these models read from left to right and "
            "cannot fill a gap.",
            param="suffix",
        )
    stream = bool(body.stream)
    echo = bool(body.echo)
    if body.stream_options is not None and not stream:
        raise RefusedError(
            "stream_options are given without stream; leave them out, or set stream to true.",
            param="stream_options",
        )
    options = body.stream_options or StreamOptions()
    n = 1 if body.n is None else body.n
    refuse_outside("n", n, 1, limits.choices)
    best_of = n if body.best_of is None else body.best_of
    refuse_outside("best_of", best_of, n, limits.choices)
    if stream and best_of > n:
        raise RefusedError(
            f"best_of is {best_of} and n is {n}, and the best are only known at the end; leave out stream.",
            param="best_of",
        )
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    refuse_outside("max_tokens", max_tokens, 0, limits.max_tokens)
    if body.min_tokens and (not body.ignore_eos or body.stop or body.min_tokens > max_tokens):
        raise RefusedError(
            f"min_tokens is {body.min_tokens} and is only served with ignore_eos, without stop, and up to "
            f"max_tokens, which is {max_tokens}; change one of them.",
            param="min_tokens",
        )
    if body.logprobs is not None:
        refuse_outside("logprobs", body.logprobs, 0, min(MOST_LIKELIEST, vocab.size))
    listed = prompts_of(body.prompt)
    if len(listed) * best_of > limits.choices:
        raise RefusedError(
            f"{len(listed)} prompts with {best_of} choices each are more than {limits.choices} choices; send "
            "several requests.",
            param="prompt",
        )
    try:
        first, _ = tokens_around(vocab, bos=bool(body.bos), eos=False)
    except UserError as error:
        raise RefusedError(str(error), param="bos") from error
    prompts: list[np.ndarray] = []
    tokens = 0
    for number, prompt in enumerate(listed):
        found = encoding(
            vocab,
            prompt,
            what=f"prompt {number}",
            param="prompt",
            limits=limits,
            before=tokens,
            first=first if isinstance(prompt, str) else None,
        )
        prompts.append(found)
        tokens += len(found)
    # Tokens in memory at once: prompts with log-probabilities, and choices that are not streamed.
    shown = tokens if echo and body.logprobs is not None else 0
    drawn = 0 if stream else max_tokens * best_of * len(listed)
    refuse_long_answer(limits, shown + drawn, body.logprobs, "logprobs" if shown else "max_tokens")
    sampling = sampling_params_of(body, session, max_tokens) if max_tokens else None
    texts = [""] * len(listed)
    for number, prompt in enumerate(listed if echo else ()):
        if isinstance(prompt, str) and first is None:
            texts[number] = prompt
        else:
            texts[number] = "".join(token_texts(vocab, prompts[number].tolist()))
    return Plan(
        prompts=prompts,
        texts=texts,
        sampling=sampling,
        prompt_tokens=tokens,
        n=n,
        best_of=best_of,
        log_probs=body.logprobs,
        as_ids=bool(body.return_tokens_as_token_ids),
        echo=echo,
        stream=stream,
        usage=options.include_usage,
        each_usage=options.continuous_usage_stats,
    )


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | Sequence[int]]:
    """The prompts one by one: a text, token ids, or a list of texts or of lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if prompt and len({type(item) for item in prompt}) == 1:
        return list(prompt)  # type: ignore[arg-type]
    raise RefusedError(
        "prompt is empty or mixes texts, ids and lists; give a text, token ids, or a list of either.",
        param="prompt",
    )


def sampling_params_of(body: SamplingFields, session: Session, max_tokens: int) -> SamplingParams:
    """How the tokens are drawn; raises RefusedError, with the field, for what cannot be served.

    A setting that the body lacks is the one that the model recommends.
    """
    settings = {name: value for name in SETTINGS if (value := getattr(body, name)) is not None}
    if settings.get("top_k") == -1:  # all tokens, as in vLLM
        settings["top_k"] = 0
    if settings.get("top_p") == 0:  # only the likeliest token
        settings |= {"top_p": 1.0, "temperature": min(0.0, settings.get("temperature", 0.0))}
    try:
        sampler = session.sampler.replaced(**settings)
    except UserError as error:
        raise RefusedError(str(error), param=str(error).partition(" ")[0]) from error
    seed = secrets.randbits(53) if body.seed is None else body.seed  # JavaScript reads 53 bits exactly
    if not -1 << 63 <= seed < 1 << 64:
        raise RefusedError(f"seed is {seed}; expected -2^63 to 2^64 - 1.", param="seed")
    return SamplingParams(
        max_tokens=max_tokens,
        sampler=sampler,
        seed=seed % (1 << 64),  # as an integer without sign
        stop=_stops(body.stop, session.vocab),
        bias=_bias(body.logit_bias or {}, session.vocab),
        ends=not body.ignore_eos,
    )


def _stops(stop: str | list[str] | None, vocab: Vocab) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MOST_STOPS:
        raise RefusedError(f"stop has {len(stops)} strings; expected at most {MOST_STOPS}.", param="stop")
    if (longest := max(map(len, stops), default=0)) > LONGEST_STOP:
        raise RefusedError(
            f"a stop string has {longest:,} characters; expected at most {LONGEST_STOP:,}.", param="stop"
        )
    try:
        refuse_empty_stops(stops, vocab)
    except UserError as error:
        raise RefusedError(str(error), param="stop") from error
    return stops


def _bias(bias: dict[int, float], vocab: Vocab) -> dict[int, float]:
    if len(bias) > MOST_BIASES:
        raise RefusedError(
            f"logit_bias has {len(bias)} tokens; expected at most {MOST_BIASES}.", param="logit_bias"
        )
    for token, value in bias.items():
        if not 0 <= token < vocab.size or not abs(value) <= LARGEST_BIAS:
            raise RefusedError(
                f"logit_bias gives token {token} the bias {value:g}; expected tokens from 0 to "
                f"{vocab.size - 1} and biases from -100 to 100.",
                param="logit_bias",
            )
    return bias
