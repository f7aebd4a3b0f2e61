"""Prepares files of token ids as a dataset: the tokens of another program, such as music or events."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from runtimes.base.errors import ArtefactError, ConfigError, TextError
from runtimes.base.files import read_text
from runtimes.base.ranges import counted
from runtimes.base.records import json_text
from runtimes.contract.id_files import (
    IDS_PER_CHECK,
    documents,
    number_blocks,
    open_ids,
    refuse_archive,
    refuse_outside,
)
from runtimes.contract.vocabulary import IdsVocab, SpecialTokens, load_vocab
from trainer.data.archives import Tick
from trainer.data.own import OWN_IDS, OwnFiles, Prepared, write_dataset

FIX_SIZE = "give another --vocab-size, or other ids"
FIX_TEXT = "prepare a text with `xl-export prepare text`"


def prepare_ids(
    files: OwnFiles,
    out: Path,
    *,
    vocab: IdsVocab,
    dtype: str | None = None,
    force: bool = False,
) -> Prepared:
    """The dataset `out` of files of ids (see `runtimes.contract.id_files`), read block by block.

    A `.txt` file of numbers is one document, whatever its lines are.
    dtype: of raw `.bin` files. If the vocabulary has an end-of-document token, that token follows each
    document: a file, a row of a two-dimensional array, or a line of a `.jsonl` file. Raises TextError with
    file and index of an id that the vocabulary lacks.
    """

    notes: list[str] = []

    def encode(path: Path, tick: Tick) -> Iterator[np.ndarray]:
        return _encode(path, vocab, dtype if path.suffix == ".bin" else None, tick, notes)

    if dtype is not None and all(path.suffix != ".bin" for path in files.all):
        raise ConfigError(f"--dtype is {dtype}, and none of the files is a .bin file; leave out --dtype.")
    for path in files.all:  # before any work
        _refuse_other(path)
    made = write_dataset(
        out,
        corpus=OWN_IDS,
        vocab=vocab,
        files=files,
        encode=encode,
        joined=files.joined and vocab.special.end_of_document is None,
        force=force,
    )
    return dataclasses.replace(made, notes=[*made.notes, *notes])


def ids_vocab(size: int | None, *, names: Path | None, end_of_document: int | None) -> IdsVocab:
    """The vocabulary of ids from 0 to size - 1. names: a file with one name a line, or a JSON list of names.

    The size may be None if names are given. Raises ConfigError if the three do not fit.
    """
    listed = None if names is None else _names(names)
    if size is None and listed is None:
        raise ConfigError("the number of different tokens is not known; give --vocab-size, or --names.")
    size = len(listed or []) if size is None else size
    if listed is not None and len(listed) != size:
        raise ConfigError(
            f"{names} has {len(listed)} names and --vocab-size is {size}; give one name for each token."
        )
    if end_of_document is not None and not 0 <= end_of_document < size:
        raise ConfigError(
            f"--end-of-document is {end_of_document} and the vocabulary has the ids 0 to {size - 1}; if no "
            f"id is free to end a document, give --vocab-size {end_of_document + 1}."
        )
    vocab = IdsVocab(size, names=listed, special=SpecialTokens(end_of_document=end_of_document))
    try:  # what could not be opened later is refused now
        load_vocab(names or Path("--vocab-size"), json_text(vocab.to_json()).encode())
    except ArtefactError as error:
        raise ConfigError(str(error)) from error
    return vocab


def _names(path: Path) -> list[str]:
    text = read_text(path)
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list):  # as a name such as [PAD] in the first line
        return text.removesuffix("\n").split("\n")
    if not all(isinstance(name, str) for name in names):
        raise TextError(f"{path} is a JSON list of other things than names; give names in quotes.")
    return list(names)


def _refuse_other(path: Path) -> None:
    """Raises TextError for what is no file of ids, and says what to do with it."""
    refuse_archive(path)
    if path.is_dir() or path.suffix not in (".npy", ".bin", ".jsonl", ".txt"):
        raise TextError(
            f"{path} is no file of token ids; give .npy, .bin or .jsonl files, or .txt files of numbers, or "
            f"{FIX_TEXT}."
        )


def _encode(
    path: Path, vocab: IdsVocab, dtype: str | None, tick: Tick, notes: list[str]
) -> Iterator[np.ndarray]:
    """The ids of a file. What the user should know about them is added to `notes` at the end."""
    end = vocab.special.end_of_document
    is_array = path.suffix in (".npy", ".bin")
    several = path.suffix == ".jsonl" or (is_array and open_ids(path, dtype=dtype).ndim == 2)
    if several and end is None:
        raise ConfigError(
            f"{path} holds one document a {'line' if path.suffix == '.jsonl' else 'row'}, and no token was "
            "given to stand between them; give --end-of-document ID."
        )
    inside = 0  # ends of a document before the last token of one
    for number, blocks in enumerate(_documents(path, dtype, tick), 1):
        where = f"{path}, document {number}," if several else path
        start = 0
        last = None
        for block in blocks:
            refuse_outside(block, where, vocab.size, fix=FIX_SIZE, start=start)
            inside += int(np.count_nonzero(block == end))
            start += len(block)
            last = block[-1] if len(block) else last
            yield block
        if end is not None and last is not None:
            if last == end:
                inside -= 1
            else:
                yield np.array([end])
    if end is not None and inside:
        notes.append(
            f"{path} has {end}, the end of a document, {counted(inside, 'time')} before the end "
            "of its documents; if it has another meaning there, choose an id that is free"
        )


def _documents(path: Path, dtype: str | None, tick: Tick) -> Iterator[Iterator[np.ndarray]]:
    """The documents of a file, each as ids in blocks."""
    if path.suffix == ".txt":
        yield number_blocks(path, tick=tick, fix=f"give such a file, or {FIX_TEXT}")
        return
    for ids in documents(path, dtype=dtype, tick=tick):
        if path.suffix != ".jsonl":  # whose lines were counted when they were read
            tick(ids.nbytes)
        yield (ids[start : start + IDS_PER_CHECK] for start in range(0, len(ids), IDS_PER_CHECK))
