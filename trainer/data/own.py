"""Datasets from a user's own files: parts of several files each, and held-out parts that are cut off."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from runtimes.base.folders import atomic_folder
from runtimes.base.kinds import DATASET
from runtimes.base.sealed import FileFacts, file_facts
from runtimes.contract.id_files import IDS_PER_CHECK
from runtimes.contract.vocabulary import Vocab, save_vocab
from trainer.data.archives import Tick
from trainer.data.dataset import MIN_PART_TOKENS, SPLITS, DatasetFacts, save_facts, smallest_dtype, write_part
from trainer.data.published import progress_bar, total_bytes

# In place of a corpus's name.
OWN_TEXT = "own text"
OWN_IDS = "own ids"
HELD_OUT_PERCENT = 5  # per cent of the training ids for each part that was not given
JOINED = (
    "several files follow one another without a token between them, because the vocabulary has none for the "
    "end of a document"
)
Encode = Callable[[Path, Tick], Iterator[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class OwnFiles:
    """The files of each part. Where valid or test is empty, it is cut off the end of the training ids."""

    train: Sequence[Path]
    valid: Sequence[Path] = ()
    test: Sequence[Path] = ()

    def of(self, split: str) -> Sequence[Path]:
        files: Sequence[Path] = getattr(self, split)
        return files

    @property
    def all(self) -> list[Path]:
        return [path for split in SPLITS for path in self.of(split)]

    @property
    def joined(self) -> bool:
        """Whether a part has several files, which follow one another there."""
        return any(len(self.of(split)) > 1 for split in SPLITS)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A new dataset."""

    facts: DatasetFacts
    notes: list[str] = field(default_factory=list)
    """Facts that the user did not ask for and should know, a clause each."""


def write_dataset(
    out: Path,
    *,
    corpus: str,
    vocab: Vocab,
    files: OwnFiles,
    encode: Encode,
    joined: bool,
    force: bool,
) -> Prepared:
    """The dataset `out`, which appears as a whole, with the ids that `encode` gives for each file.

    joined: whether several documents follow one another without a token between them, which is noted.
    """
    notes = [JOINED] if joined else []
    with atomic_folder(out, DATASET, force=force, sources=files.all) as folder:
        save_vocab(folder, vocab)
        sources: dict[str, FileFacts] = {}
        for split in SPLITS:
            paths = files.of(split)
            if not paths:
                continue
            with progress_bar(f"encoding {split}", total_bytes(paths)) as tick:
                pieces = (piece for path in paths for piece in encode(path, tick))
                write_part(folder / f"{split}.bin", pieces, vocab.size)
            for number, path in enumerate(paths):
                name = f"{split}/{path.name}"
                sources[name if name not in sources else f"{split}/{number}/{path.name}"] = file_facts(path)
        missing = [split for split in ("valid", "test") if not files.of(split)]
        if missing:
            where = "at the end of a document or line" if cut_off(folder, missing, vocab) else "at any token"
            parts, are = ("part was", "is") if len(missing) == 1 else ("parts were", "are")
            notes.append(
                f"the {' and '.join(missing)} {parts} not given and {are} the last "
                f"{HELD_OUT_PERCENT * len(missing)} % of the training ids, cut {where}"
            )
        facts = save_facts(folder, vocab, corpus=corpus, published=False, sources=sources)
    return Prepared(facts=facts, notes=notes)


def cut_off(folder: Path, missing: Sequence[str], vocab: Vocab) -> bool:
    """Moves the last 5 % of `train.bin` to a file of its own for each of the `missing` parts.

    They are cut after a token that ends a document or a line, if one comes soon enough. Returns whether all
    cuts are after such a token.
    """
    path = folder / "train.bin"
    dtype = np.dtype(smallest_dtype(vocab.size)).newbyteorder("<")
    ids = np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
    percents = [100 - HELD_OUT_PERCENT * left for left in range(len(missing), 0, -1)]
    exact = [len(ids) * percent // 100 for percent in percents]
    found = [_after(ids, percent, vocab.special.after_text) for percent in percents]
    cuts = [at if cut is None else cut for cut, at in zip(found, exact, strict=True)]
    if any(end - start < MIN_PART_TOKENS for start, end in itertools.pairwise([*cuts, len(ids)])):
        found = [None]
        cuts = exact
    for split, (start, end) in zip(missing, itertools.pairwise([*cuts, len(ids)]), strict=True):
        blocks = (ids[at : min(at + IDS_PER_CHECK, end)] for at in range(start, end, IDS_PER_CHECK))
        write_part(folder / f"{split}.bin", blocks, vocab.size)
    del ids  # before the file that it maps becomes shorter
    os.truncate(path, cuts[0] * dtype.itemsize)
    return None not in found


def _after(ids: np.ndarray, percent: int, mark: int | None) -> int | None:
    """The index after the first `mark` in the 5 % of the ids that begin at `percent`; None without one."""
    start, end = (len(ids) * share // 100 for share in (percent, percent + HELD_OUT_PERCENT))
    for at in range(start, end, IDS_PER_CHECK):
        if mark is not None and len(hits := np.flatnonzero(ids[at : min(at + IDS_PER_CHECK, end)] == mark)):
            return at + int(hits[0]) + 1
    return None
