"""`/tokenize`, `/detokenize` and `/tokenizer_info`, with the fields of vLLM."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from runtimes.base.errors import UserError
from runtimes.contract.checks import checked_ids
from runtimes.contract.vocabulary import Vocab, decode, token_texts
from xl_export.serve.http.base.context import RequestContext, json, of_json
from xl_export.serve.http.base.encoding import encoding
from xl_export.serve.http.base.endpoint import Endpoints
from xl_export.serve.http.base.errors import RefusedError, doc

ENDPOINTS = Endpoints()
encode = msgspec.json.Encoder().encode


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What `/tokenize` is asked."""

    prompt: Annotated[str, doc("A text, which is encoded with the vocabulary of the model.")]
    model: Annotated[str | None, doc("A name from /v1/models; without it the first model answers.")] = None
    add_special_tokens: Annotated[
        bool | None, doc("Accepted for the sake of clients: these vocabularies add nothing to a text.")
    ] = None
    return_token_strs: Annotated[bool | None, doc("Whether the text of each token is returned.")] = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What `/detokenize` is asked."""

    tokens: Annotated[list[int], doc("Token ids.")]
    model: Annotated[str | None, doc("A name from /v1/models; without it the first model answers.")] = None


class Tokenized(msgspec.Struct, kw_only=True):
    """The ids of a text."""

    count: Annotated[int, doc("How many tokens there are.")]
    max_model_len: Annotated[int, doc("The most tokens of the prompts of a request.")]
    tokens: Annotated[list[int], doc("The ids of the tokens.")]
    token_strs: Annotated[list[str] | None, doc("The text of each token, if return_token_strs asked for it.")]


class Detokenized(msgspec.Struct, kw_only=True):
    """The text of ids."""

    prompt: Annotated[str, doc("The text of the ids.")]


class AddedToken(msgspec.Struct, kw_only=True):
    """A token that the vocabulary sets apart."""

    content: Annotated[str, doc("The text of the token.")]
    special: Annotated[bool, doc("Whether it is special.")]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What a client must know of the vocabulary, under the names of Hugging Face."""

    tokenizer_class: Annotated[str, doc("What kind of vocabulary it is.")]
    model_max_length: Annotated[int, doc("The most tokens of the prompts of a request.")]
    vocab_size: Annotated[int, doc("How many tokens there are.")]
    bos_token: Annotated[str | None, doc("The token that preceded each text in training.")]
    eos_token: Annotated[str | None, doc("The token that followed each text in training.")]
    unk_token: Annotated[str | None, doc("The token for what the vocabulary does not have.")]
    pad_token: Annotated[str | None, doc("The token for padding.")]
    bos_token_id: Annotated[int | None, doc("The id of bos_token.")]
    eos_token_id: Annotated[int | None, doc("The id of eos_token.")]
    unk_token_id: Annotated[int | None, doc("The id of unk_token.")]
    pad_token_id: Annotated[int | None, doc("The id of pad_token.")]
    added_tokens_decoder: Annotated[dict[str, AddedToken], doc("The special tokens, by id.")]
    chat_template: Annotated[str | None, doc("Always null: these models have learned no roles.")]


@ENDPOINTS.add("POST", "/tokenize", answer=Tokenized, refused=(404, 503))
async def tokenize(request: RequestContext, body: TokenizeBody) -> Response:
    """The ids of a text."""
    server = request.server
    vocab = server.model(body.model).session.vocab
    return of_json(await request.off_loop(tokenized, vocab, body, server.limits.prompt_tokens))


@ENDPOINTS.add("POST", "/detokenize", answer=Detokenized, refused=(404, 503))
async def detokenize(request: RequestContext, body: DetokenizeBody) -> Response:
    """The text of ids."""
    vocab = request.server.model(body.model).session.vocab
    return of_json(await request.off_loop(detokenized, vocab, body.tokens))


@ENDPOINTS.add("GET", "/tokenizer_info", query=("model",), answer=TokenizerInfo, refused=(404, 503))
async def info(request: RequestContext) -> Response:
    """The vocabulary's own tokens."""
    server = request.server
    vocab = server.model(request.query_params.get("model")).session.vocab
    return json(tokenizer_info(vocab, server.limits.prompt_tokens))


def tokenized(vocab: Vocab, body: TokenizeBody, most: int) -> bytes:
    """The ids of a text, and their own texts if they are asked for: a `Tokenized` as JSON."""
    ids: list[int] = []
    if body.prompt:
        ids = encoding(vocab, body.prompt, what="prompt", param="prompt").tolist()
    texts = token_texts(vocab, ids) if body.return_token_strs else None
    return encode(Tokenized(count=len(ids), max_model_len=most, tokens=ids, token_strs=texts))


def detokenized(vocab: Vocab, tokens: list[int]) -> bytes:
    """The text of ids: a `Detokenized` as JSON."""
    try:
        ids = checked_ids(tokens, vocab.size, what="tokens").tolist()
    except UserError as error:
        raise RefusedError(str(error), param="tokens") from error
    return encode(Detokenized(prompt="".join(token_texts(vocab, ids))))


def tokenizer_info(vocab: Vocab, most: int) -> TokenizerInfo:
    """What a client must know of the vocabulary.

    The tokens that have a meaning of their own have the names that Hugging Face uses.
    """
    special = vocab.special
    named = {
        "bos_token": special.before_text,
        "eos_token": special.after_text,
        "unk_token": special.unknown,
        "pad_token": special.padding,
    }
    fields: dict[str, Any] = {}
    added = {}
    for name, token in named.items():
        text = None if token is None else _text(vocab, token)
        fields |= {name: text, f"{name}_id": token}
        if text is not None:
            added[str(token)] = AddedToken(content=text, special=True)
    return TokenizerInfo(
        tokenizer_class=f"{vocab.kind} vocabulary of xl-export",
        model_max_length=most,
        vocab_size=vocab.size,
        **fields,
        added_tokens_decoder=added,
        chat_template=None,
    )


def _text(vocab: Vocab, token: int) -> str:
    """The text of a token, or its id if its text cannot be decoded here."""
    try:
        return decode(vocab, [token])
    except UserError:
        return str(token)
