"""Datasets from a user's own files: parts of several files each, and held-out parts that are cut off."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from runtimes.base.errors import UserError
from runtimes.base.folders import atomic_folder
from runtimes.base.sealed import FileFacts, file_facts
from runtimes.contract.id_files import CHECKED
from runtimes.contract.vocabulary import VOCAB_FILES, Vocab, save_vocab
from trainer.data.dataset import DATA, SPLITS, DatasetFacts, save_facts, smallest_dtype, write_part
from trainer.data.published import Tick, progress_bar

# In place of a corpus's name.
OWN_TEXT = "own text"
OWN_IDS = "own ids"
LEAST = 2  # tokens of a part: one is fed and the other predicted
HELD_OUT = 5  # per cent of the training ids for each part that was not given
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
    # What the user did not ask for and should know, a clause each.
    notes: list[str] = field(default_factory=list)


def write_dataset(
    out: Path,
    *,
    corpus: str,
    vocab: Vocab,
    files: OwnFiles,
    encode: Encode,
    joined: bool,
    force: bool,
    progress: bool,
) -> Prepared:
    """The dataset `out`, which appears as a whole, with the ids that `encode` gives for each file.

    joined: whether several documents follow one another without a token between them, which is noted. Raises
    UserError for a part that is too short to predict a token.
    """
    notes = [JOINED] if joined else []
    with atomic_folder(out, force=force, marker=DATA, sources=files.all) as folder:
        save_vocab(folder, vocab)
        tokens = {}
        facts = {}
        held: Counter[tuple[str, Path]] = Counter()  # how many tokens each file of each part has
        sources: dict[str, FileFacts] = {}
        for split in SPLITS:
            if not files.of(split):
                continue
            num_bytes = sum(path.stat().st_size for path in files.of(split) if path.is_file())
            path = folder / f"{split}.bin"
            with progress_bar(f"encoding {split}", progress, num_bytes) as tick:
                ids = (
                    piece
                    for source in files.of(split)
                    for piece in _counted(encode(source, tick), held, (split, source))
                )
                tokens[split], facts[path.name] = write_part(path, ids, vocab.size)
            for number, source in enumerate(files.of(split)):
                name = f"{split}/{source.name}"
                sources[name if name not in sources else f"{split}/{number}/{source.name}"] = file_facts(
                    source
                )
        missing = [split for split in ("valid", "test") if not files.of(split)]
        _refuse_too_few(files, tokens, held, missing)
        notes += [
            f"{path} has no tokens"
            for split in SPLITS
            for path in dict.fromkeys(files.of(split))
            if not held[split, path]
        ]
        if missing:
            counts, at_ends = cut_off(folder, missing, vocab)
            tokens |= counts
            facts |= {f"{split}.bin": file_facts(folder / f"{split}.bin") for split in counts}
            where = "at the end of a document or line" if at_ends else "at any token"
            several = len(missing) > 1
            notes.append(
                f"the {' and '.join(missing)} {'parts were' if several else 'part was'} not given and "
                f"{'are' if several else 'is'} the last "
                f"{HELD_OUT * len(missing)} % of the training ids, cut {where}"
            )
        facts |= {name: file_facts(folder / name) for name in VOCAB_FILES if (folder / name).is_file()}
        made = DatasetFacts(
            corpus=corpus,
            published=False,
            dtype=smallest_dtype(vocab.size),
            vocab_size=vocab.size,
            tokens={split: tokens[split] for split in SPLITS},
            files=facts,
            sources=sources,
        )
        made = save_facts(folder, made)
    return Prepared(facts=made, notes=notes)


def _counted(
    pieces: Iterator[np.ndarray], held: Counter[tuple[str, Path]], where: tuple[str, Path]
) -> Iterator[np.ndarray]:
    for ids in pieces:
        held[where] += len(ids)
        yield ids


def _refuse_too_few(
    files: OwnFiles, tokens: dict[str, int], held: Counter[tuple[str, Path]], missing: Sequence[str]
) -> None:
    """Raises UserError, which names the files, for a part in which no token can be predicted.

    tokens: in each part that was given. missing: the parts that will be cut off the training part.
    """
    for split, count in tokens.items():
        parts = _sizes(count, len(missing)) if split == "train" else [count]
        if min(parts) >= LEAST:
            continue
        paths = list(dict.fromkeys(files.of(split)))
        empty = [path for path in paths if not held[split, path]]
        blamed = empty or paths
        named = ", ".join(map(str, blamed[:3])) + ", …" * (len(blamed) > 3)
        has = "has" if len(blamed) == 1 else "have"
        found = f"{named} {has} {'no' if empty else count} token{'s' * (count != 1 or len(empty) > 0)}"
        if empty and len(empty) < len(paths):
            found += f" and the {split} part has {count}"
        if count < LEAST:
            raise UserError(f"{found}, too few to predict one; give more for --{split}.")
        cut = " and ".join(missing)
        options = " and ".join(f"--{part}" for part in missing)
        raise UserError(
            f"{found}, too few to cut the {cut} part{'s' * (len(missing) > 1)} from the end; give more, or "
            f"give {options}."
        )


def _sizes(count: int, missing: int) -> list[int]:
    """The sizes of the training part and of each part cut off its end, where no document ends near."""
    cuts = [0, *(count * (100 - HELD_OUT * left) // 100 for left in range(missing, 0, -1)), count]
    return [end - start for start, end in itertools.pairwise(cuts)]


def cut_off(folder: Path, missing: Sequence[str], vocab: Vocab) -> tuple[dict[str, int], bool]:
    """Moves the last 5 % of `train.bin` to a file of its own for each of the `missing` parts.

    They are cut after a token that ends a document or a line, if one comes soon enough. Returns the number of
    ids in each file, and whether all cuts are after such a token.
    """
    path = folder / "train.bin"
    mark = vocab.special.after_text
    dtype = smallest_dtype(vocab.size)
    ids = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r") if path.stat().st_size else np.empty(0)
    percents = [100 - HELD_OUT * left for left in range(len(missing), 0, -1)]
    found = [_after(ids, percent, mark) for percent in percents]
    exact = [len(ids) * percent // 100 for percent in percents]
    cuts = [exact_cut if cut is None else cut for cut, exact_cut in zip(found, exact, strict=True)]
    ends = [*cuts[1:], len(ids)]
    if any(end - start < 2 for start, end in zip(cuts, ends, strict=True)):
        found = [None]
        cuts = exact
        ends = [*exact[1:], len(ids)]
    counts = {"train": cuts[0]}
    for split, start, end in zip(missing, cuts, ends, strict=True):
        blocks = (ids[at : min(at + CHECKED, end)] for at in range(start, end, CHECKED))
        counts[split], _ = write_part(folder / f"{split}.bin", blocks, vocab.size)
    itemsize = ids.itemsize
    del ids  # before the file that it maps becomes shorter
    os.truncate(path, cuts[0] * itemsize)
    return counts, None not in found


def _after(ids: np.ndarray, percent: int, mark: int | None) -> int | None:
    """The index after the first `mark` in the 5 % of the ids that begin at `percent`; None without one."""
    start, end = (len(ids) * share // 100 for share in (percent, percent + HELD_OUT))
    for at in range(start, end, CHECKED):
        if mark is not None and len(hits := np.flatnonzero(ids[at : min(at + CHECKED, end)] == mark)):
            return at + int(hits[0]) + 1
    return None
