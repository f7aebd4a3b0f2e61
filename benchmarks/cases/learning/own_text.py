"""What `xl-export train --text FILE --minutes M` reaches with texts of several sizes.

Each text is the beginning of one file. As the command does, the plan measures the speed of this machine and
fixes the number of steps. So the scores do not depend on what else the machine does later, and a run that was
stopped goes on when the case is called again with the same --out.
"""

from __future__ import annotations

import codecs
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.case import Case, Column, Job, Line, file_option, minutes_option
from benchmarks.configs import BenchmarkConfig
from benchmarks.runs import Figures, History, Run
from runtimes.base.errors import TextError
from runtimes.base.files import sha256
from runtimes.tasks.evaluate import evaluate
from runtimes.tasks.generate import generate
from trainer.model.model import count_parameters
from trainer.run.checkpoint import TEST, load_run
from trainer.run.config import TrainConfig
from trainer.run.history import CONFIG
from trainer.run.session import TorchSession
from trainer.training.loop import resume, train
from trainer.training.plan import plan

SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000)  # bytes
LANES = 8  # rows of the score
SHOWN = 40  # tokens of the sample
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One text, trained for a stated time."""

    text_bytes: int
    minutes: float
    layers: int
    d_model: int
    parameters: int
    vocab_size: int
    steps: int
    #: Tokens of a step.
    step_tokens: int
    #: Of the held-out end of the text that `train` writes to test.txt, with the weights that validated best.
    bits_per_byte: float
    #: What the model writes after the beginning of test.txt, with seed 1, not selected.
    sample: str
    #: Name and SHA-256 of the file.
    source: str
    sha256: str


def run(job: Job) -> Iterator[Row]:
    """A row for each size that the file has; the texts and their runs are in --out."""
    source: Path | None = job["text"]
    num_bytes = source.stat().st_size if source and source.is_file() else 0
    if source is None or num_bytes < SIZES[0]:
        raise TextError(f"own-text needs a UTF-8 text of {SIZES[0]:,} bytes or more; give --text FILE.")
    digest = sha256(source)
    out: Path = job["out"]
    minutes = job["minutes"]
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(job.threads)
    for size in (size for size in SIZES if size <= num_bytes):
        found = {"text_bytes": size, "minutes": minutes, "sha256": digest}
        if row := next((row for row in job.earlier if found.items() <= row.items()), None):
            yield Row(**row)
            continue
        folder = out / f"{digest[:8]}-{size}-{minutes:g}"
        if (folder / CONFIG).is_file():
            job.progress(f"going on with {folder}")
            resume(folder, progress=False)
        else:
            text = out / f"{digest[:8]}-{size}.txt"
            text.write_bytes(_beginning(source, size))
            config, sentence = plan(text=str(text), minutes=minutes)
            job.progress(sentence)
            train(dataclasses.replace(config, threads=job.threads), folder, progress=False)
        made = _row(folder, size, minutes, source.name, digest)
        job.keep(made)
        yield made


def _row(folder: Path, size: int, minutes: float, source: str, digest: str) -> Row:
    session = TorchSession.open(folder)
    config = load_run(folder).config
    test = (folder / TEST).read_text(encoding="utf-8")
    tokens = session.vocab.encode(test)
    nats = evaluate(session, tokens, lanes=LANES).nats
    pieces = generate(session, [tokens[: config.evaluation.mem_len]], max_tokens=SHOWN, seed=SEED)
    return Row(
        text_bytes=size,
        minutes=minutes,
        layers=config.model.layers,
        d_model=config.model.d_model,
        parameters=count_parameters(config.model),
        vocab_size=config.model.vocab_size,
        steps=config.steps,
        step_tokens=config.batch * config.training.segment,
        bits_per_byte=nats / math.log(2) / len(test.encode()),
        sample="".join(piece.text for piece in pieces),
        source=source,
        sha256=digest,
    )


def _beginning(source: Path, size: int) -> bytes:
    """The first bytes of a text, without half a character at the end."""
    try:
        with source.open("rb") as stream:
            return codecs.getincrementaldecoder("utf-8")().decode(stream.read(size)).encode()
    except UnicodeDecodeError as error:
        raise TextError(f"{source} is not UTF-8; convert it, or give another text.") from error


def newest(history: History) -> list[Run]:
    """The newest run of each size and time, of the text that was measured last."""
    runs = history.of("own-text")
    found = {
        (run.rows[0]["text_bytes"], run.rows[0]["minutes"]): run
        for run in runs
        if run.rows[0]["sha256"] == runs[-1].rows[0]["sha256"]
    }
    return [found[key] for key in sorted(found)]


def _text(row: Figures, run: Run) -> str:
    kilobytes = row["text_bytes"] // 1000
    return f"{kilobytes} kB" if kilobytes < 1000 else f"{kilobytes // 1000} MB"


def _sample(row: Figures, run: Run) -> str:
    words = " ".join(row["sample"].split()).replace("|", "\\|").replace("`", "'")
    return f"`{words[:60]}`"


def _notes(lines: Sequence[Line]) -> list[str]:
    row = lines[0].row
    return [
        f"The texts are the beginnings of {row['source']} (SHA-256 {row['sha256'][:12]}…).",
        "A sample continues the beginning of the held-out part (seed 1, not selected), without line ends.",
    ]


CASE = Case(
    name="own-text",
    run=run,
    keys=("text_bytes", "minutes", "sha256"),
    columns=(
        Column("text", _text),
        Column("minutes", "minutes", "g"),
        Column("layers × width", lambda row, run: f"{row['layers']} × {row['d_model']}"),
        Column("parameters", "parameters", lambda count: f"{count / 1e6:.2f}M"),
        Column("million tokens trained", lambda row, run: f"{row['steps'] * row['step_tokens'] / 1e6:.2f}"),
        Column("held-out bits per byte", "bits_per_byte", ".2f"),
        Column("a sample", _sample),
    ),
    notes=_notes,
    options=(
        file_option("--text", "A UTF-8 text; its beginnings are trained on."),
        minutes_option("The time for each size; 10 by default.", 10.0),
        file_option("--out", "The folder for texts and runs.", default=Path("own-text")),
    ),
    size=lambda options: BenchmarkConfig.of("own-text", TrainConfig.load("tiny")),  # the rows have the sizes
    published=newest,
    resumable=True,
    engine="torch",
)
