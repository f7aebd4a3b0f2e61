"""What a server of many streams costs beside the steps of its model, and what it keeps to under load.

The server is `xl-export serve` in a process of its own, the load comes from another process over raw sockets,
and what they are compared with runs in this process. Every stream is greedy and has the tokens of `generate`;
scores are those of `evaluate`. The model has random weights and a vocabulary of ids, so that each token is an
event. Parts are chosen with --only.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.cases.serving.bench import Bench, Row, Sizes
from benchmarks.cases.serving.others import others
from benchmarks.cases.serving.parts import between, long_stream, overhead, resident, throughput
from benchmarks.cases.serving.stall import stall
from benchmarks.checked_sessions import open_checked
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import Limits
from benchmarks.models import random_weights, write_artefact
from benchmarks.tables.serving import note_of
from runtimes.base.errors import ConfigError
from runtimes.base.machine import available_cpus
from runtimes.contract.rule import MemoryRule
from xl_export.serve.core.settings import EngineSettings

__all__ = ["PARTS", "Row", "chosen", "run", "table", "unavailable"]

PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "overhead": overhead,
    "throughput": throughput,
    "between": between,
    "long": long_stream,
    "resident": resident,
    "stall": stall,
    "others": others,
}
REPEATS, TOKENS, MINUTES = 5, 20_000, 2.0
PACKAGES = ("starlette", "uvicorn", "msgspec", "prometheus_client", "httptools", "websockets")
SIZES = Sizes()


def unavailable() -> str | None:
    """Why this machine cannot measure the case; None where it can."""
    if not sys.platform.startswith("linux"):
        return "the CPU time and the memory of another process are read from Linux"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is missing; install '.[cpu,serve]'" if missing else None


def chosen(names: Sequence[str]) -> list[str]:
    """The parts of these names, in the order of the case; raises ConfigError for an unknown one."""
    for name in names:
        if name not in PARTS:
            raise ConfigError(f"{name} is no part of serve; give --only one of {', '.join(PARTS)}.")
    return [name for name in PARTS if name in names]


def run(
    config: BenchmarkConfig,
    *,
    names: Sequence[str] = (),
    tokens: int = TOKENS,
    minutes: float = MINUTES,
    threads: int | None = None,
    default_threads: bool = False,
    before: Path | None = None,
    repeats: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """The rows of the chosen parts, of all when none is named. Steps are computed by the fused operator.

    tokens: of the stream of the part `long`. minutes: of mixed load in the part `resident`. before: the root
    of another checkout, which the part `stall` is compared with. Raises UserError where the fused operator
    cannot be built, and ArtefactError where it differs from PyTorch.
    default_threads: whether everything but throughput is measured with the threads that the server takes by
    itself, and not with `threads`.
    """
    rule = MemoryRule(mem_len=config.mem_len, segment=config.segment)
    with tempfile.TemporaryDirectory() as name:
        progress("exporting and comparing with PyTorch")
        folder = Path(name)
        weights = random_weights(config.model)
        artefact = write_artefact(folder, config.model, rule, weights, "ring", ids=True)
        threads = checked_threads(threads)
        # Every session here and the server use the fused operator once it is built on this machine. Without
        # this line the figures of a new machine would be those of standard operators, and nobody would know.
        open_checked(artefact, threads=threads, operators="fused")
        bench = Bench(
            config=config,
            folder=folder,
            artefact=artefact,
            threads=threads,
            default_threads=_default_threads(artefact) if default_threads else threads,
            repeats=checked_repeats(repeats, REPEATS),
            tokens=tokens,
            minutes=minutes,
            sizes=SIZES,
            before=before,
            progress=progress,
        )
        return [row for part in chosen(names or tuple(PARTS)) for row in PARTS[part](bench)]


def _default_threads(artefact: Path) -> int:
    """The threads that the server takes for an artefact where it is not told."""
    from xl_export.serve.http.base.models import sources_of  # needs the extra of the server

    (source,) = sources_of([(artefact.name, artefact)], EngineSettings())
    _, threads = source.open_session()
    return threads or available_cpus()


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text, with the mark beside each figure that has one."""
    lines = [f"{'part':<11}{'what':<42}{'streams':>7}{'median':>10}{'from':>9}{'to':>9}  unit; mark"]
    for row in rows:
        what = f"{row.part:<11}{row.side:<42}{row.streams:>7}"
        if row.figure is None:
            lines.append(f"{what}  skipped: {row.note}")
            continue
        figure = row.figure
        numbers = f"{figure.median:>10.4g}{figure.fastest:>9.4g}{figure.slowest:>9.4g}"
        mark = ""
        if row.holds is not None:
            bound = f"at most {row.most:.4g}" if row.most is not None else f"at least {row.least:.4g}"
            mark = f"; {bound}: {'holds' if row.holds else 'MISSED'}"
        note = f" ({noted})" if (noted := note_of(row.to_json())) else ""
        lines.append(f"{what}{numbers}  {row.unit}{mark}{note}")
    return lines
