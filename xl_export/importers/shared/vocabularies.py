"""Vocabularies of other projects as ours, symbol by symbol: taken from beside the checkpoint, never built
anew.

- Words become a `WordVocab`: words between white space, `<eos>` for a newline, and their unknown symbol for
  every other word. With the `<S>` of the One Billion Word benchmark, `<S>` stands before and after each line.
- Decimal byte values (enwik8) become a `ByteVocab` of those bytes. A newline is `<eos>` where they have one;
  otherwise newlines are left out.
- Single characters (text8, with `_` for a blank) become a `CharVocab`.

Their code may change a text before it looks symbols up: Hugging Face applies Moses tokenisation and `@-@`.
This project does not, so texts must be prepared in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_bytes
from runtimes.contract.vocabulary import END_OF_LINE, ByteVocab, CharVocab, Vocab, WordVocab, load_vocab
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.values import Foreign

UNKNOWNS = ("<unk>", "<UNK>")
SENTENCE = "<S>"  # before and after each line of the One Billion Word benchmark


@dataclass(frozen=True)
class ReadVocabulary:
    """A vocabulary, the name of the data set where the file has one, and what must be said about it."""

    vocab: Vocab
    dataset: str | None = None
    notes: tuple[str, ...] = ()


def read_vocabulary(path: Path, *, size: int) -> ReadVocabulary:
    """The vocabulary in a file of any of the projects, or in our `vocab.json`; raises ArtefactError if its
    size is another."""
    if path.suffix == ".json":
        return _sized(ReadVocabulary(load_vocab(path)), size, path)
    if path.suffix == ".txt":
        return vocabulary(_lines(path), where=path, size=size)
    return vocabulary(read_pickle(path), where=path, size=size)


def vocabulary(content: Any, *, where: Path, size: int) -> ReadVocabulary:
    """The vocabulary in what a file holds: a list of symbols, a vocabulary object, or a corpus that has
    one."""
    facts = content.state if isinstance(content, Foreign) else content
    dataset, lower_case, symbols = None, False, facts
    if isinstance(facts, dict):
        dataset = facts.get("dataset")
        inner = next((facts[name] for name in ("vocab", "_dictionary") if name in facts), facts)
        inner = inner.state if isinstance(inner, Foreign) else inner
        inner = inner if isinstance(inner, dict) else {}
        symbols = inner.get("idx2sym", inner.get("idx2word"))
        lower_case = inner.get("lower_case") is True
    if (
        not isinstance(symbols, list)
        or not symbols
        or not all(isinstance(symbol, str) and symbol for symbol in symbols)
    ):
        raise ArtefactError(
            f"{where} is not a vocabulary; expected a corpus or vocabulary of the checkpoint's project."
        )
    if len(set(symbols)) != len(symbols):
        raise ArtefactError(f"{where} is not a vocabulary: its symbols repeat.")
    if broken := next(
        (symbol for symbol in symbols if any("\ud800" <= letter <= "\udfff" for letter in symbol)), None
    ):
        raise ArtefactError(f"{where} is not a vocabulary: its symbol {broken[:20]!a} is not Unicode text.")
    found = translated(symbols, lower_case=lower_case)
    return _sized(
        ReadVocabulary(found.vocab, dataset if isinstance(dataset, str) else None, found.notes), size, where
    )


def translated(symbols: list[str], *, lower_case: bool) -> ReadVocabulary:
    """Our vocabulary of the symbols of another project, in their order."""
    others = [symbol for symbol in symbols if symbol != END_OF_LINE]
    if others and all(
        symbol.isascii() and symbol.isdecimal() and len(symbol) < 4 and str(int(symbol)) == symbol
        for symbol in others
    ):
        values = [10 if symbol == END_OF_LINE else int(symbol) for symbol in symbols]
        if max(values) < 256 and len(set(values)) == len(values):
            if 10 in values:
                return ReadVocabulary(ByteVocab(values), notes=(f"the newline is their {END_OF_LINE}",))
            return ReadVocabulary(
                ByteVocab(values, skipped=[10]),
                notes=("newlines of a text are left out, as their data code does",),
            )
    if others and all(len(symbol) == 1 for symbol in others):
        characters = [
            "\n" if symbol == END_OF_LINE else " " if symbol == "_" else symbol for symbol in symbols
        ]
        if len(set(characters)) == len(characters):
            return ReadVocabulary(
                CharVocab(characters), notes=("a blank is their _",) if "_" in symbols else ()
            )
    sentence = SENTENCE in symbols and END_OF_LINE not in symbols
    ends = SENTENCE if sentence else END_OF_LINE if END_OF_LINE in symbols else None
    vocab = WordVocab(
        symbols,
        unknown=next((symbol for symbol in UNKNOWNS if symbol in symbols), UNKNOWNS[0]),
        end_of_line=ends,
        start_of_line=SENTENCE if sentence else None,
        lower_case=lower_case,
    )
    return ReadVocabulary(
        vocab, notes=("texts are split at white space: tokenise them as the training text was",)
    )


def _sized(found: ReadVocabulary, size: int, where: Path) -> ReadVocabulary:
    if found.vocab.size != size:
        raise ArtefactError(
            f"{where} has {found.vocab.size} symbol{'s' * (found.vocab.size != 1)} and the model {size}; "
            "give the vocabulary it was trained with, --vocab FILE."
        )
    return found


def _lines(path: Path) -> list[str]:
    """The first word of each line, as these projects read a list of words."""
    try:
        lines = read_bytes(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ArtefactError(f"{path} is not UTF-8 text; expected one symbol on each line.") from error
    return [words[0] for line in lines if (words := line.split())]
