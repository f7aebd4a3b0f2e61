"""Writes the files with which onnxruntime-genai loads a ring artefact and its tokenizer without changes.

What it reads was found in its sources, release 0.18, and in onnxruntime-extensions, which computes
its tokenizers: `tokenizer.json`, and a class of tokenizers named in `tokenizer_config.json`. Only byte-level
BPE is computed there exactly as `tokenizers` does, so only that is written; bytes and characters are a
byte-level BPE, too.
"""

from __future__ import annotations

import json
from typing import Any

from runtimes.contract.sampling import GENAI, Sampler, genai_search
from runtimes.contract.spec import GRAPH, Spec
from runtimes.contract.vocabulary import ByteVocab, CharVocab, SubwordVocab, Vocab
from runtimes.contract.vocabulary.files import TRANSFORMERS_NAMES

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_STREAM = 1 << 20  # tokens; genai keeps their ids, 4 bytes each
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def takes(spec: Spec) -> bool:
    """Whether genai can run the artefact.

    It needs a ring of one shape for all layers, in float32, and a graph that gives its logits for all
    positions, with sizes that vary.
    """
    one_shape = len({state.shape for state in spec.state}) == 1
    in_a_ring = spec.in_place and not spec.linear_ring and not spec.in_ort_format and not spec.fixed_rows
    varies = not spec.token_graphs and not spec.model.selective
    return in_a_ring and varies and one_shape and spec.state_dtype == "float32"


def genai_files(spec: Spec, vocab: Vocab) -> dict[str, dict[str, Any]]:
    """The JSON documents for the folder of a ring artefact, by file name.

    A vocabulary of which genai cannot compute the same tokens has no tokenizer there: words, ids,
    SentencePiece, and the other kinds of `tokenizers`.
    """
    return {GENAI: genai_config(spec, vocab), **_tokenizer_files(vocab)}


def genai_config(spec: Spec, vocab: Vocab) -> dict[str, Any]:
    """The configuration for the folder of a ring artefact.

    Past and present share one buffer, the graph's S slots, so the lengths here only bound how long a stream
    may grow. The first prompt of one row is fed in pieces of the artefact's segment (`chunk_size`), so it may
    have any length. genai refuses to cut the prompts of a batch; `chunk_size` 0 takes them in one piece,
    which must not be longer than a segment. They must have equal lengths, because the graph has no mask for
    genai's padding.
    """
    model = spec.model
    special = vocab.special
    # genai always stops at one token, the padding where none is said to end a text. In a vocabulary without
    # an end it is the last, which hardly ever comes: of words the rarest, of bytes one that UTF-8 lacks.
    end = model.vocab_size - 1 if special.end_of_document is None else special.end_of_document
    beginning = {} if special.beginning is None else {"bos_token_id": special.beginning}
    return {
        "model": {
            "type": "decoder",
            "eos_token_id": [end],
            **beginning,
            "pad_token_id": end if special.padding is None else special.padding,
            "vocab_size": model.vocab_size,
            "context_length": MAX_STREAM,
            "decoder": {
                "filename": GRAPH,
                "head_size": model.head_dim,
                "hidden_size": model.d_model,
                "num_attention_heads": model.heads,
                "num_key_value_heads": model.heads,
                "num_hidden_layers": model.layers,
                "session_options": {"provider_options": []},
                "inputs": {
                    "input_ids": "input_ids",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": MAX_STREAM,
            "chunk_size": spec.rule.segment,
            "past_present_share_buffer": True,
            "num_beams": 1,
            **genai_search(Sampler(), model.vocab_size),
        },
    }


def _tokenizer_files(vocab: Vocab) -> dict[str, dict[str, Any]]:
    config = {
        "tokenizer_class": "GPT2Tokenizer",  # byte-level BPE
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_STREAM,
    }
    if isinstance(vocab, SubwordVocab) and _is_byte_level(vocab):
        added = json.loads(vocab.content).get("added_tokens", [])
        names = {token["id"]: token["content"] for token in added}
        ids = vocab.special.to_json()
        special = {
            key: names[ids[meaning]]
            for key, meaning in TRANSFORMERS_NAMES.items()
            if ids.get(meaning) in names
        }
        return {TOKENIZER_CONFIG: config | special}  # the tokenizer itself lies in every artefact
    if isinstance(vocab, ByteVocab) and not vocab.skipped:
        return {TOKENIZER: byte_level([bytes([value]) for value in vocab.values]), TOKENIZER_CONFIG: config}
    if isinstance(vocab, CharVocab):
        return {TOKENIZER: byte_level([s.encode() for s in vocab.symbols]), TOKENIZER_CONFIG: config}
    return {}


def byte_level(symbols: list[bytes]) -> dict[str, Any]:
    """A `tokenizer.json` of byte-level BPE that gives each symbol, a byte or a character, its index as id.

    A character of several bytes is merged from its first two bytes, then the next. The bytes and beginnings
    of characters that are no symbols themselves have ids from V on, which the graph refuses: so a character
    that the model does not know is an error, as it is everywhere else.
    """
    alphabet = dict(enumerate(byte_alphabet()))
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    merges: dict[tuple[bytes, bytes], None] = {}  # an ordered set
    for symbol in symbols:
        for length in range(1, len(symbol)):
            merges[symbol[:length], symbol[length : length + 1]] = None
    for byte in range(256):
        ids.setdefault(bytes([byte]), len(ids))
    for first, second in merges:
        ids.setdefault(first + second, len(ids))

    spelled = {part: part.decode("latin-1").translate(alphabet) for part in ids}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {spelled[part]: i for part, i in ids.items()},
        "merges": [[spelled[first], spelled[second]] for first, second in merges],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": model,
    }


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE, as in the code of GPT-2.

    A printable byte of Latin-1 is itself, and the others are the characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _is_byte_level(vocab: SubwordVocab) -> bool:
    """Whether a `tokenizer.json` is byte-level BPE like GPT-2's, which genai computes exactly.

    Every byte must be a token, since genai does not leave out those that are none. An added token must be
    found wherever its text occurs, and nothing but its text.
    """
    if vocab.library != "tokenizers":
        return False
    data = json.loads(vocab.content)
    model, before, decoder = (data.get(name) or {} for name in ("model", "pre_tokenizer", "decoder"))
    added = data.get("added_tokens") or []
    plain = not any(token.get(option) for token in added for option in ("lstrip", "rstrip", "single_word"))
    normalised = any(token.get("normalized") and not token.get("special") for token in added)
    within = all(token["id"] < vocab.size for token in added)  # otherwise the library gave it another id
    return (
        model.get("type") == "BPE"
        and plain
        and within
        and not normalised
        and set(byte_alphabet()) <= set(model.get("vocab") or {})
        and not model.get("end_of_word_suffix")
        and not model.get("continuing_subword_prefix")
        and not model.get("ignore_merges")
        and not model.get("byte_fallback")
        and not model.get("dropout")
        and data.get("normalizer") is None
        and before.get("type") == "ByteLevel"
        and before.get("add_prefix_space") is False
        and before.get("use_regex", True) is True
        and decoder.get("type") == "ByteLevel"
    )
