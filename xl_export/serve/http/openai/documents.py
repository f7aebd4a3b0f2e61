"""What `/v1/completions`, `/v1/score` and the vocabulary answer, as `/openapi.json` describes it."""

from __future__ import annotations

from typing import Literal, TypedDict


class CachedTokens(TypedDict):
    """Of the tokens of prompts, those that were not computed again."""

    cached_tokens: int


class TokenCounts(TypedDict):
    """How many tokens a request has had so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Usage(TokenCounts):
    """How many tokens a request has had."""

    prompt_tokens_details: CachedTokens


class TokenLogProbs(TypedDict):
    """Log-probabilities of tokens in OpenAI's form: four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One continuation; in an event, what is new of it."""

    index: int
    text: str
    logprobs: TokenLogProbs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionFacts(TypedDict):
    """What the answer and each event have. seed: null where nothing is drawn."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    seed: int | None
    choices: list[CompletionChoice]


class Completions(CompletionFacts):
    """The continuations of all prompts."""

    usage: Usage


class CompletionEvent(CompletionFacts, total=False):
    """One server-sent event of an answer that is streamed. After the last one comes `[DONE]`."""

    usage: TokenCounts | None


class ScoredToken(TypedDict):
    """One token of a text that was scored."""

    id: int
    text: str
    log_prob: float


class _Score(TypedDict):
    index: int
    id: int | str
    log_prob: float
    tokens: int
    unknown: int
    characters: int | None
    bytes: int | None


class TextScore(_Score, total=False):
    """The score of one text, under the names of `xl-export score --json`."""

    token_log_probs: list[ScoredToken]


class Scores(TypedDict):
    """The scores of all texts, in the order of the request."""

    object: Literal["list"]
    model: str
    data: list[TextScore]
    usage: Usage


class Tokenized(TypedDict):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The text of ids."""

    prompt: str


class AddedToken(TypedDict):
    """A token that the vocabulary sets apart."""

    content: str
    special: bool


class TokenizerInfo(TypedDict):
    """What a client must know of the vocabulary, under the names of Hugging Face."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    added_tokens_decoder: dict[str, AddedToken]
    chat_template: str | None
