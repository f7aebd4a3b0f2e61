"""Vocabularies: between text and token ids. One file for each kind, and `files.py` for what is on disk."""

from runtimes.contract.vocabulary.base import (
    Decoder,
    SpecialTokens,
    Vocab,
    VocabKind,
    WholeTokens,
    decode,
    not_unicode,
    token_texts,
)
from runtimes.contract.vocabulary.files import VOCAB, VOCAB_FILES, load_vocab, save_vocab, vocab_from_file
from runtimes.contract.vocabulary.ids import IdsVocab
from runtimes.contract.vocabulary.subword import SubwordVocab
from runtimes.contract.vocabulary.symbols import ByteVocab, CharVocab
from runtimes.contract.vocabulary.word import END_OF_LINE, UNKNOWN, WordVocab

__all__ = [
    "END_OF_LINE",
    "UNKNOWN",
    "VOCAB",
    "VOCAB_FILES",
    "ByteVocab",
    "CharVocab",
    "Decoder",
    "IdsVocab",
    "SpecialTokens",
    "SubwordVocab",
    "Vocab",
    "VocabKind",
    "WholeTokens",
    "WordVocab",
    "decode",
    "load_vocab",
    "not_unicode",
    "save_vocab",
    "token_texts",
    "vocab_from_file",
]
