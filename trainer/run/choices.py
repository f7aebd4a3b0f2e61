"""The names that a user chooses from, each list once: public corpora, and vocabularies of a text."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from runtimes.base.errors import ConfigError

CorpusName = Literal["enwik8", "text8", "wikitext-103", "one-billion-word", "penn-treebank"]

# The vocabularies that a text itself gives; any other is a file.
VOCAB_KINDS = ("byte", "char", "word", "subword")
VOCAB_SUFFIXES = (".json", ".model")
SHORT_NAMES: dict[str, CorpusName] = {
    "wt103": "wikitext-103",
    "lm1b": "one-billion-word",
    "ptb": "penn-treebank",
}


def refuse_vocab_name(name: str) -> None:
    """Raises ConfigError for a name that is neither a kind of vocabulary nor a vocabulary's file."""
    if name in VOCAB_KINDS or Path(name).suffix in VOCAB_SUFFIXES:
        return
    near = difflib.get_close_matches(name, VOCAB_KINDS, n=1)
    meant = f", and {near[0]} was probably meant" if near else ""
    raise ConfigError(
        f"vocab is {name!r:.80}{meant}; expected {', '.join(VOCAB_KINDS)}, or a vocabulary's file "
        "(vocab.json, tokenizer.json, or .model)."
    )
