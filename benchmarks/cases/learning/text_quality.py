"""How well an artefact predicts a held-out text, compared with n-grams of the same training text and
compressors.

The folder of the text holds train.txt and test.txt, and the same stories as lines of JSON, train.jsonl and
test.jsonl; `examples/stories/prepare.py` writes it. All rows are bits for each byte of test.txt. The model
and the n-grams predict every token of its stories and the end of each. gzip sees only the test text, because
its window is 32 KB. xz sees the training text first: its bits are the size of both together, less the size of
the training text.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.case import Case, Column, Job, Line, file_option
from benchmarks.cases.learning.kneser_ney import KneserNey
from benchmarks.configs import BenchmarkConfig
from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_bytes
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.open import open_session
from runtimes.tasks.evaluate import evaluate
from trainer.data.own_text import encode_file
from trainer.run.config import TrainConfig
from xl_export.demo.shipped import STORIES, find_shipped

ORDER = 5
LANES = 4


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to predict the text."""

    name: str
    bits_per_byte: float
    #: Of the model's tokens, where it predicts these.
    bits_per_token: float | None
    #: Of the artefact's files, or of all arrays of the n-grams; None for a compressor.
    size_bytes: int | None
    #: SHA-256 of train.txt and test.txt.
    texts: dict[str, str] = field(default_factory=dict)
    #: Of the artefact as it was opened; None for the others. A memory that is cut to zero has the rule all
    #: the same.
    identity: str | None = None
    rule: MemoryRule | None = None


def run(job: Job) -> list[Row]:
    """A row for the artefact, with memory and without, for the n-grams and for the two compressors.

    Raises ArtefactError if the artefact is missing.
    """
    artefact = job["artefact"] or find_shipped(STORIES)
    if artefact is None:
        raise ArtefactError(f"{STORIES} is not there; train it as examples/stories/README.md says.")
    parts = job["parts"]
    train = read_bytes(parts / "train.txt")
    test = read_bytes(parts / "test.txt")
    session = open_session(artefact, threads=job.given_threads, device="cpu")
    tokens = {part: _encoded(session.vocab, parts / f"{part}.jsonl") for part in ("train", "test")}
    size = sum(path.stat().st_size for path in artefact.rglob("*") if path.is_file())
    rows = []
    for name, carry in (("artefact", True), ("artefact, memory cut to zero", False)):
        job.progress(f"{name}: {len(tokens['test']):,} tokens")
        rows.append(_of_artefact(session, name, tokens["test"], len(test), size, carry=carry))
    job.progress(f"{ORDER}-grams of {len(tokens['train']):,} tokens")
    rows.append(_of_ngrams(tokens, len(test), vocab_size=session.vocab.size))
    job.progress("compressors")
    rows += _of_compressors(train, test)
    texts = {
        f"{part}.txt": hashlib.sha256(text).hexdigest() for part, text in (("train", train), ("test", test))
    }
    return [replace(row, texts=texts) for row in rows]


def _encoded(vocab: Vocab, path: Path) -> np.ndarray:
    """The tokens of the stories, after the end of a document, so that the first is predicted too."""
    end = vocab.special.end_of_document
    if end is None:
        raise ArtefactError("the artefact's vocabulary has no end of a document; give one of stories.")
    return np.concatenate([[end], *encode_file(path, vocab, "jsonl", lambda num_bytes: None)])


def _of_artefact(
    session: Session, name: str, tokens: np.ndarray, num_bytes: int, size: int, *, carry: bool
) -> Row:
    score = evaluate(session, tokens, lanes=LANES, carry_memory=carry)
    return Row(
        name=name,
        bits_per_byte=score.nats / math.log(2) / num_bytes,
        bits_per_token=score.bits_per_token,
        size_bytes=size,
        identity=session.identity,
        rule=session.rule,
    )


def _of_ngrams(tokens: dict[str, np.ndarray], num_bytes: int, *, vocab_size: int) -> Row:
    model = KneserNey(tokens["train"], vocab_size=vocab_size, order=ORDER)
    bits = -np.log2(model.probabilities(tokens["test"])[1:])
    return Row(
        name=f"{ORDER}-grams, Kneser-Ney",
        bits_per_byte=float(bits.sum()) / num_bytes,
        bits_per_token=float(bits.mean()),
        size_bytes=sum(array.nbytes for order in model.orders for array in vars(order).values()),
    )


def _of_compressors(train: bytes, test: bytes) -> list[Row]:
    best = lzma.PRESET_EXTREME | 9
    after = len(lzma.compress(train + test, preset=best)) - len(lzma.compress(train, preset=best))
    sizes = {
        "xz -9e, after the training text": after,
        "xz -9e, alone": len(lzma.compress(test, preset=best)),
        "gzip -9, alone": len(gzip.compress(test, 9)),
    }
    return [
        Row(name=name, bits_per_byte=8 * size / len(test), bits_per_token=None, size_bytes=None)
        for name, size in sizes.items()
    ]


def _notes(lines: Sequence[Line]) -> list[str]:
    row = lines[0].row
    if not row.get("identity"):
        return []
    hashes = ", ".join(f"{name} {digest[:12]}…" for name, digest in row["texts"].items())
    return [
        f"Artefact {row['identity'][:12]}…, memory of {row['rule']['mem_len']:,} tokens, segments of "
        f"{row['rule']['segment']:,}; SHA-256 of the texts: {hashes}."
    ]


CASE = Case(
    name="text-quality",
    run=run,
    keys=("name",),
    columns=(
        Column("what predicts the text", "name"),
        Column("bits per byte", "bits_per_byte", ".3f"),
        Column("bits per token", "bits_per_token", ".3f"),
        Column(
            "size", lambda row, run: "" if row["size_bytes"] is None else f"{row['size_bytes'] / 1e6:,.1f} MB"
        ),
    ),
    notes=_notes,
    options=(
        file_option(
            "--parts", "The folder that examples/stories/prepare.py has written.", default=Path("stories")
        ),
        file_option("--artefact", "The artefact; the one in examples/stories by default."),
    ),
    size=lambda options: BenchmarkConfig.of("stories", TrainConfig.load("stories")),
    # How busy the machine was changes nothing.
    published=lambda history: history.of("text-quality")[-1:],
    precision="int8",
)
