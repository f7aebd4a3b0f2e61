"""`--ray` for `xl-export score` and `xl-export eval`, commands of the edge that know nothing of Ray."""

from __future__ import annotations

import functools
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.files import refuse_replacing
from runtimes.base.machine import available_cpus
from runtimes.base.progress import Progress
from runtimes.cli.eval import eval_command as eval_at_the_edge
from runtimes.cli.eval import score_text
from runtimes.cli.score import score_command as score_at_the_edge
from runtimes.sessions.open import describe
from xl_export.cli.options import extended

SHARED: list[click.Parameter] = [
    click.Option(
        ["--ray"],
        metavar="ADDRESS",
        help="Compute with actors of the Ray cluster at this address. local starts one on this machine; auto "
        "uses the one that runs here.",
    ),
    click.Option(
        ["--actors"],
        type=click.IntRange(1, 1 << 16),
        help="With --ray, how many processes compute; each uses --threads CPUs, by default "
        "1. By default there is one for each CPU of this machine.",
    ),
    click.Option(
        ["--work"],
        type=click.Path(path_type=Path),
        help="With --ray, a folder for what is finished. A call that finds it does only what is missing.",
    ),
]
SCORE_ONLY: list[click.Parameter] = [
    click.Option(
        ["--out"], type=click.Path(path_type=Path), help="With --ray, the file to write the results to."
    ),
    click.Option(
        ["--block"],
        type=click.IntRange(min=1),
        metavar="BYTES",
        help="With --ray, how many bytes of a file are scored and finished at a time. By default 1 MiB; in "
        "Parquet it is always a row group.",
    ),
    click.Option(["--force"], is_flag=True, help="Replace the file of --out if it exists."),
]


def _score(
    *,
    path: Path,
    source: Path,
    ray: str,
    actors: int | None,
    work: Path | None,
    out: Path | None,
    block: int | None,
    force: bool,
    weight: float | None,
    threads: int | None,
    device: Any,
    **options: Any,
) -> None:
    with needs("ray", "fsspec"):
        from xl_export.offline.cluster import cluster
        from xl_export.offline.corpus import BLOCK_BYTES
        from xl_export.offline.score import ScoreOptions, score_corpus
    if out is None:
        raise UserError("--ray writes a file, and none was named; give --out FILE.")
    if weight is not None:
        raise UserError(
            "--weight needs the texts of a group together, which --ray does not keep so; leave it."
        )
    refuse_replacing(out, option="--out", force=force)
    describe(path)  # a cluster takes long to start; what is no model is named before
    threads = threads or 1
    actors = actors or available_cpus()
    began = time.perf_counter()
    with cluster(ray, cpus=actors * threads), ExitStack() as resources:
        totals = score_corpus(
            path,
            _url(source),
            out,
            options=ScoreOptions(block_bytes=block or BLOCK_BYTES, **options),
            work=work or out.with_name(f"{out.name}.parts"),
            actors=actors,
            threads=threads,
            device=str(device),
            progress=_Blocks(resources),
        )
    click.echo("\n".join(totals.lines(time.perf_counter() - began)), err=True)


class _Blocks:
    """Says at the beginning how many blocks are finished already, and later how many of the others are."""

    def __init__(self, resources: ExitStack) -> None:
        """resources: ends the line that shows it."""
        self._resources = resources
        self._before: int | None = None

    def __call__(self, done: int, blocks: int) -> None:
        if self._before is None:
            self._before = done
            self._shown = self._resources.enter_context(Progress("scoring", blocks - done, "blocks"))
            if done:
                click.echo(f"{done:,} of {blocks:,} blocks are finished already", err=True)
        self._shown(done - self._before)


def _url(source: Path) -> str:
    """The input as it was written: a path makes one slash of the two in `s3://bucket`."""
    head, colon, rest = str(source).partition(":/")
    return f"{head}://{rest}" if colon and head.isalnum() else str(source)


def _eval(*, ray: str, actors: int | None, work: Path | None, **options: Any) -> None:
    from xl_export.offline.cluster import cluster
    from xl_export.offline.evaluate import evaluate_on_ray

    if any(mark in str(options[name]) for name in ("mem_len", "segment", "clamp_len") for mark in ",:"):
        raise UserError("--ray scores one setting at a time; give one value of each option.")
    if work is None:
        raise UserError("--ray keeps what is finished in a folder, and none was named; give --work FOLDER.")
    threads = options["threads"] or 1
    actors = actors or available_cpus()
    with cluster(ray, cpus=actors * threads):
        measure = functools.partial(
            evaluate_on_ray,
            model=options["path"],
            work=work,
            actors=actors,
            threads=threads,
            device=str(options["device"]),
        )
        score_text(**options, measure=measure)


score_command = extended(
    score_at_the_edge,
    [*SHARED, *SCORE_ONLY],
    _score,
    "With --ray the input may also be a URL or a glob, of files of lines or of Parquet, and every line goes "
    "to the file of --out, in the order of the files' names. The numbers do not depend on the number of "
    "actors.",
)
eval_command = extended(
    eval_at_the_edge,
    SHARED,
    _eval,
    "With --ray the lanes are scored by actors; give at least four for each of them.",
)
