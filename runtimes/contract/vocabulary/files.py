"""Vocabularies on disk: `vocab.json`, and the file of a subword library that may be next to it.

A vocabulary is stored next to its model. It is never rebuilt from a corpus.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from runtimes.base.files import Content, atomic_file, read_bytes, read_json, write_json
from runtimes.base.text import UTF16_MARKS
from runtimes.contract.model_facts import MAX_SIZE
from runtimes.contract.vocabulary.base import SpecialTokens, Vocab, not_unicode
from runtimes.contract.vocabulary.ids import IdsVocab
from runtimes.contract.vocabulary.subword import FILES, Library, SubwordVocab
from runtimes.contract.vocabulary.symbols import ByteVocab, CharVocab
from runtimes.contract.vocabulary.word import WORD_OPTIONS, WordVocab

VOCAB = "vocab.json"
VOCAB_FILES = (VOCAB, *FILES.values())  # `vocab.json`, and what may be next to it
# The files next to a `tokenizer.json` in which Hugging Face's `transformers` says which tokens are special.
TRANSFORMERS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
TRANSFORMERS_NAMES = {
    "eos_token": "end_of_document",
    "bos_token": "beginning",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def save_vocab(folder: Path, vocab: Vocab) -> None:
    """Writes `vocab.json`, and the library's file that belongs next to it."""
    if isinstance(vocab, SubwordVocab):
        with atomic_file(folder / FILES[vocab.library]) as temporary:
            temporary.write_bytes(vocab.content)
    write_json(folder / VOCAB, vocab.to_json())


def load_vocab(
    path: Path,
    content: Content | None = None,
    files: Mapping[str, Content] | None = None,
) -> Vocab:
    """The vocabulary in a `vocab.json`; raises ArtefactError when it is not one.

    Every symbol is Unicode text, so that what a model generates can be printed and encoded. content, files:
    of `vocab.json` and of the files next to it, if they were read and verified already.
    """
    data = read_json(path, content)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "byte":
        return _byte_vocab(data, path)
    if kind == "ids":
        return _ids_vocab(data, path)
    if kind == "subword":
        return _subword_vocab(data, path, files or {})
    if kind not in ("char", "word"):
        raise ArtefactError(
            f"{path} is not a vocabulary; expected kind byte, char, word, subword or ids, as in the "
            "vocab.json of a run."
        )
    symbols = _symbols(data.get("symbols"), path, kind=kind, what="symbols")
    if kind == "char":
        if set(map(len, symbols)) - {1}:
            raise ArtefactError(f"{path} is not a char vocabulary; a symbol is longer than one character.")
        return CharVocab(symbols)
    return WordVocab(symbols, **_word_options(data, path))


def vocab_from_file(path: Path) -> Vocab:
    """The vocabulary in a user's file: a `vocab.json` of this project, a `tokenizer.json` of the
    library `tokenizers`, or a `.model` of SentencePiece.

    For a `tokenizer.json`, the files of `transformers` in the same folder say which tokens are special;
    without them the usual names do. Raises ArtefactError for any other file.
    """
    content = read_bytes(path).removeprefix(codecs.BOM_UTF8)  # the library `tokenizers` accepts none
    if content.lstrip()[:1] != b"{" and content[:2] not in UTF16_MARKS:
        return _opened("sentencepiece", content, path)
    data = read_json(path, content)
    if "kind" in data:
        return load_vocab(path, content)
    if not isinstance(data.get("model"), dict):
        raise ArtefactError(
            f"{path} is no vocabulary; give the vocab.json of a run, a tokenizer.json of the library "
            "tokenizers, or a .model file of SentencePiece."
        )
    vocab = _opened("tokenizers", content, path)
    special = vocab.special.to_json() | _named_by_transformers(path, vocab)
    # Some projects name one token for everything; such a token is not a sign of an unknown symbol.
    if special.get("unknown") in (special.get("end_of_document"), special.get("beginning")):
        special.pop("unknown", None)
    return SubwordVocab("tokenizers", content, special=SpecialTokens(**special))


def _opened(library: Library, content: bytes, path: Path) -> SubwordVocab:
    try:
        vocab = SubwordVocab(library, content)
    except ArtefactError as error:
        raise ArtefactError(f"{path} is no vocabulary that can be read: {error}") from error
    if not 1 <= vocab.size <= MAX_SIZE:
        raise ArtefactError(
            f"{path} is no vocabulary that can be used: its largest id makes {vocab.size} tokens, and a "
            f"model has at most {MAX_SIZE}; give another file."
        )
    return vocab


def _named_by_transformers(path: Path, vocab: SubwordVocab) -> dict[str, int]:
    """The ids of the special tokens that the files next to a `tokenizer.json` name.

    They are the library's ids, which are not always the ids in the file.
    """
    named = {}
    for file in TRANSFORMERS_FILES:
        beside = path.with_name(file)
        data = read_json(beside) if beside.is_file() else {}
        for name, meaning in TRANSFORMERS_NAMES.items():
            token = data.get(name) if isinstance(data, dict) else None
            text = token.get("content") if isinstance(token, dict) else token
            found = vocab.id_of(text) if isinstance(text, str) else None
            if found is not None and found < vocab.size:
                named[meaning] = found
    return named


def _byte_vocab(data: dict[str, Any], path: Path) -> ByteVocab:
    values, skipped = (
        data.get(name, default) for name, default in (("values", [*range(256)]), ("skipped", []))
    )
    lists = isinstance(values, list) and isinstance(skipped, list)
    if not lists or not values or not all(type(x) is int and 0 <= x < 256 for x in (*values, *skipped)):
        raise ArtefactError(
            f"{path} is not a byte vocabulary; expected lists of bytes as its values and skipped."
        )
    if len(set(values)) != len(values):
        raise ArtefactError(f"{path} is not a byte vocabulary; its values repeat.")
    return ByteVocab(values, skipped)


def _ids_vocab(data: dict[str, Any], path: Path) -> IdsVocab:
    size = _size(data, path)
    names = data.get("names")
    if names is not None:
        names = _symbols(names, path, kind="ids", what="names")
        if len(names) != size or any(name.split() != [name] for name in names):
            raise ArtefactError(
                f"{path} is not an ids vocabulary; expected {size} names without white space, one for each "
                "token."
            )
    return IdsVocab(size, names=names, special=_special(data, size, path))


def _subword_vocab(data: dict[str, Any], path: Path, files: Mapping[str, Content]) -> SubwordVocab:
    library = data.get("library")
    size = _size(data, path)
    if library not in FILES or data.get("file") != FILES[library]:
        raise ArtefactError(
            f"{path} is not a subword vocabulary; expected one of the libraries {', '.join(FILES)} with its "
            "file."
        )
    name = FILES[library]
    beside = path.with_name(name)
    if name not in files and not beside.is_file():
        raise ArtefactError(f"{beside} is missing; copy the whole folder again.")
    content = bytes(files[name] if name in files else read_bytes(beside))
    if hashlib.sha256(content).hexdigest() != data.get("sha256"):
        raise ArtefactError(
            f"{beside} was altered: its SHA-256 is not the one in {path.name}; copy it again."
        )
    return SubwordVocab(library, content, size=size, special=_special(data, size, path))


def _size(data: dict[str, Any], path: Path) -> int:
    size = data.get("size")
    if type(size) is not int or not 1 <= size <= MAX_SIZE:
        raise ArtefactError(
            f"{path} is not a vocabulary; its size is {size!r:.40}, expected 1 to {MAX_SIZE} tokens."
        )
    return size


def _special(data: dict[str, Any], size: int, path: Path) -> SpecialTokens:
    special = data.get("special", {})
    known = SpecialTokens.__dataclass_fields__
    if not isinstance(special, dict) or not all(
        name in known and type(token) is int and 0 <= token < size for name, token in special.items()
    ):
        raise ArtefactError(
            f"{path} is not a vocabulary; its special tokens are {special!r:.80}, expected ids below {size} "
            f"for {', '.join(known)}."
        )
    return SpecialTokens(**special)


def _symbols(symbols: Any, path: Path, *, kind: str, what: str) -> list[str]:
    """The symbols of a vocabulary: texts, no two the same."""
    if not isinstance(symbols, list) or set(map(type, symbols)) - {str} or "" in symbols:
        raise ArtefactError(f"{path} is not a {kind} vocabulary; expected a list of {what}.")
    if len(set(symbols)) != len(symbols):
        raise ArtefactError(f"{path} is not a {kind} vocabulary; its {what} repeat.")
    if (symbol := not_unicode(symbols)) is not None:
        raise ArtefactError(
            f"{path} is not a {kind} vocabulary; its symbol {symbol!r:.80} has half of a surrogate pair, "
            "which is no Unicode text."
        )
    return symbols


def _word_options(data: dict[str, Any], path: Path) -> dict[str, Any]:
    options = {name: data[name] for name in WORD_OPTIONS if name in data}
    marks = {
        name: mark
        for name, mark in options.items()
        if name != "lower_case" and (mark is not None or name == "unknown")
    }
    if not all(isinstance(mark, str) and mark.split() == [mark] for mark in marks.values()):
        raise ArtefactError(
            f"{path} is not a word vocabulary; its symbols {marks!r:.80} are not single words."
        )
    if not isinstance(options.get("lower_case", False), bool):
        raise ArtefactError(
            f"{path} is not a word vocabulary; its lower_case is {options['lower_case']!r:.40}."
        )
    return options
