"""What the fields of bodies mean, for `/openapi.json`. A field has one meaning in every body that has it."""

from __future__ import annotations

from typing import Any

UNUSED = "Taken where it asks for nothing, and refused otherwise."
FIELDS = {
    "add_special_tokens": "Taken for the sake of clients: these vocabularies put nothing before a text.",
    "alternatives": "How many of the likeliest tokens are told beside each token.",
    "best_of": "How many choices are drawn; those with the highest mean log-probability are returned.",
    "bos": "Whether the first token of a text is predicted from the token that stands before a text.",
    "context": "What comes before the text: a text or token ids. It is read and not scored.",
    "continuous_usage_stats": "Whether each event has the usage.",
    "echo": "Whether the prompt is part of the answer.",
    "eos": "Whether the token that ends a text is predicted after it.",
    "frequency_penalty": UNUSED,
    "id": "Comes back with the score.",
    "ignore_eos": "Whether the end of a document does not end the answer.",
    "include_usage": "Whether a last event has the usage.",
    "logit_bias": "Numbers from -100 to 100 that are added to the logits of these token ids.",
    "logprobs": "How many of the likeliest tokens are told beside each one, with log-probabilities in nats.",
    "max_tokens": "How many tokens are drawn at most.",
    "min_p": UNUSED,
    "min_tokens": "Served up to max_tokens, together with ignore_eos and without stop; refused otherwise.",
    "model": "A name of /v1/models; without it the first model answers.",
    "n": "How many choices are returned for each prompt.",
    "position": "How many tokens the stream has had before this request; another number is an error.",
    "presence_penalty": UNUSED,
    "prompt": "A text, or for completions also token ids, a list of texts, or a list of lists of ids.",
    "repetition_penalty": UNUSED,
    "return_token_strs": "Whether the text of each token is told.",
    "seed": "The same seed draws the same tokens; without it the server chooses one.",
    "stop": "Strings that end the answer and are no part of it.",
    "stream": "Whether tokens come as server-sent events when they are drawn.",
    "stream_options": "What the events have beside tokens.",
    "suffix": UNUSED,
    "surprisal": "Whether the surprisal of each token is told, in bits.",
    "temperature": "Logits are divided by it before a token is drawn; 0 takes the likeliest token.",
    "text": "A text, which is encoded with the vocabulary of the model; of a score also token ids.",
    "texts": "Texts, lists of token ids, or objects with a context and an id.",
    "tokens": "Token ids; of a rewind, how many tokens are taken back; of a score, whether tokens are told.",
    "top_k": "Tokens are drawn from this many of the likeliest.",
    "top_p": "Tokens are drawn from the fewest likeliest ones that have this probability together.",
    "user": "Taken and not used.",
}


def describe(schemas: dict[str, Any]) -> None:
    """Gives each property of these JSON schemas its description, in place."""
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            if name in FIELDS:
                field["description"] = FIELDS[name]
