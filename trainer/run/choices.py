"""The names that a user chooses from, each list once: public corpora, and vocabularies of a text."""

from __future__ import annotations

from typing import Literal, get_args

CorpusName = Literal["enwik8", "text8", "wikitext-103", "one-billion-word", "penn-treebank"]

CORPUS_NAMES: tuple[CorpusName, ...] = get_args(CorpusName)
# The vocabularies that a text itself gives; any other is a file.
VOCAB_KINDS = ("byte", "char", "word")
VOCAB_SUFFIXES = (".json", ".model")
SHORT_NAMES: dict[str, CorpusName] = {
    "wt103": "wikitext-103",
    "lm1b": "one-billion-word",
    "ptb": "penn-treebank",
}
