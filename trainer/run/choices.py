"""The names that a user chooses from, each list once: public corpora, and kinds of vocabulary."""

from __future__ import annotations

from typing import Literal, get_args

from runtimes.contract.vocabulary import VocabKind

CorpusName = Literal["enwik8", "text8", "wikitext-103", "one-billion-word", "penn-treebank"]

CORPUS_NAMES: tuple[CorpusName, ...] = get_args(CorpusName)
VOCAB_KINDS: tuple[VocabKind, ...] = get_args(VocabKind)
SHORT_NAMES: dict[str, CorpusName] = {
    "wt103": "wikitext-103",
    "lm1b": "one-billion-word",
    "ptb": "penn-treebank",
}
