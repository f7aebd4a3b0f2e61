"""Reads vocabularies of other projects, symbol by symbol. They are never rebuilt from a text.

- Words become a `WordVocab`. It splits a text at white space, has `<eos>` for a newline, and maps every other
  word to the project's unknown symbol. With the `<S>` of the One Billion Word benchmark, `<S>` comes before
  and after each line.
- Decimal byte values (enwik8) become a `ByteVocab` of these bytes. A newline is `<eos>` if the vocabulary
  has that symbol; otherwise newlines are left out.
- Single characters (text8, with `_` for a blank) become a `CharVocab`.

The projects may change a text before they split it: Hugging Face applies Moses tokenisation and `@-@`. This
project does not change texts, so prepare them in the same way first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_bytes
from runtimes.base.ranges import counted
from runtimes.base.text import text_lines
from runtimes.contract.vocabulary import (
    END_OF_LINE,
    ByteVocab,
    CharVocab,
    IdsVocab,
    SubwordVocab,
    Vocab,
    WordVocab,
    not_unicode,
    vocab_from_file,
)
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.values import Foreign

UNKNOWNS = ("<unk>", "<UNK>")
# In the place of a file: the tokens are ids, as of music or events. An absolute path names a file `ids`.
IDS = Path("ids")
SIZE_ROUNDING_TOKENS = (
    1024  # tokens by which projects round the size of a model up, and a tenth of the size at most
)
SENTENCE = "<S>"  # before and after each line of the One Billion Word benchmark


@dataclass(frozen=True)
class ReadVocabulary:
    """A vocabulary, the name of its data set if the file holds one, and notes for the user."""

    vocab: Vocab
    dataset: str | None = None
    notes: tuple[str, ...] = ()


def read_vocabulary(path: Path, *, size: int) -> ReadVocabulary:
    """Returns the vocabulary in a file of one of the projects, or in one that this project reads.

    These are a `vocab.json`, a `tokenizer.json` and a SentencePiece `.model`. A model may have some more
    tokens than a file of subwords, because some projects round their number up. The path `ids` means that
    the tokens are plain numbers. Raises ArtefactError if the file is damaged or the vocabulary has another
    size.
    """
    if path == IDS:
        return ReadVocabulary(IdsVocab(size), notes=("the tokens are plain ids; as text, they are numbers",))
    if path.suffix in (".json", ".model"):
        vocab = vocab_from_file(path)
        missing = size - vocab.size
        if isinstance(vocab, SubwordVocab) and 0 < missing < min(SIZE_ROUNDING_TOKENS, size / 10):
            note = f"the last {missing} of the model's {size} tokens are not in the vocabulary"
            enlarged = SubwordVocab(vocab.library, vocab.content, size=size, special=vocab.special)
            return ReadVocabulary(enlarged, notes=(note,))
        return _sized(ReadVocabulary(vocab), size, path)
    if path.suffix == ".txt":
        # These projects read the first word of each line.
        lines = read_lines(path)
        return vocabulary([words[0] for line in lines if (words := line.split())], where=path, size=size)
    return vocabulary(read_pickle(path), where=path, size=size)


def vocabulary(content: Any, *, where: Path, size: int, end_of_line: str = END_OF_LINE) -> ReadVocabulary:
    """Returns the vocabulary in the content of a file.

    The content is a list of symbols, a vocabulary object, or a corpus that holds one. end_of_line: the
    project's symbol for it. Raises ArtefactError if the content is none of these, or has another size.
    """
    facts = content.state if isinstance(content, Foreign) else content
    dataset = None
    lower_case = False
    symbols = facts
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
    if broken := not_unicode(symbols):
        raise ArtefactError(f"{where} is not a vocabulary: its symbol {broken[:20]!a} is not Unicode text.")
    found = translated(symbols, lower_case=lower_case, end_of_line=end_of_line)
    return _sized(
        ReadVocabulary(found.vocab, dataset if isinstance(dataset, str) else None, found.notes), size, where
    )


def translated(symbols: list[str], *, lower_case: bool, end_of_line: str = END_OF_LINE) -> ReadVocabulary:
    """Returns the vocabulary for the symbols of another project, in their order."""
    others = [symbol for symbol in symbols if symbol != end_of_line]
    if others and all(
        symbol.isascii() and symbol.isdecimal() and len(symbol) < 4 and str(int(symbol)) == symbol
        for symbol in others
    ):
        values = [10 if symbol == end_of_line else int(symbol) for symbol in symbols]
        if max(values) < 256 and len(set(values)) == len(values):
            if 10 in values:
                return ReadVocabulary(
                    ByteVocab(values), notes=(f"the newline is the symbol {end_of_line} of the project",)
                )
            return ReadVocabulary(
                ByteVocab(values, skipped=[10]),
                notes=("newlines of a text are left out, as in the project",),
            )
    if others and all(len(symbol) == 1 for symbol in others):
        characters = [
            "\n" if symbol == end_of_line else " " if symbol == "_" else symbol for symbol in symbols
        ]
        if len(set(characters)) == len(characters):
            return ReadVocabulary(
                CharVocab(characters),
                notes=("a blank is the symbol _ of the project",) if "_" in symbols else (),
            )
    sentence = SENTENCE in symbols and end_of_line not in symbols
    ends = SENTENCE if sentence else end_of_line if end_of_line in symbols else None
    vocab = WordVocab(
        symbols,
        unknown=next((symbol for symbol in UNKNOWNS if symbol in symbols), UNKNOWNS[0]),
        end_of_line=ends,
        start_of_line=SENTENCE if sentence else None,
        lower_case=lower_case,
    )
    return ReadVocabulary(
        vocab, notes=("texts are split at white space: tokenise them in the same way as the training text",)
    )


def _sized(found: ReadVocabulary, size: int, where: Path) -> ReadVocabulary:
    if found.vocab.size != size:
        raise ArtefactError(
            f"{where} has {counted(found.vocab.size, 'symbol')} and the model {size:,}; "
            "name the vocabulary that the model was trained with, with --vocab FILE."
        )
    return found


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a text without their ends."""
    return [*text_lines([read_bytes(path)], str(path))]
