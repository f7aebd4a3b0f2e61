"""TensorRT-RTX engines built ahead of time, without a GPU: layers, bytes and seconds. None of them runs.

Each graph is compared with PyTorch at export, and counted as TensorRT's parser reads it.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import click

from benchmarks.case import Case, Column, Job, megabytes, only_option, option
from benchmarks.models import random_run
from runtimes.contract.engine import PLAN, Attention
from runtimes.contract.precision import Precision
from runtimes.contract.spec import GRAPH
from runtimes.contract.tensors import Form
from xl_export import export
from xl_export.tensorrt.build import build
from xl_export.tensorrt.network import equal_nodes, inline_attention, read_model
from xl_export.tensorrt.options import TARGETS, BuildOptions

# The form of memory, the precision, and how the graph has attention: `native` as standard operators, `plugin`
# as one node, whose body is built here because TensorRT-RTX takes no plugins from Python.
SIDES: dict[str, tuple[Form, Precision, Attention]] = {
    f"{form}-{precision}-{'node' if attention == 'plugin' else 'operators'}": (form, precision, attention)
    for form in ("ring", "shift")
    for precision in ("fp16", "int8")
    for attention in ("plugin", "native")
}

SHOWN = {"plugin": "a node", "native": "operators"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine."""

    memory: Form
    precision: Precision
    attention: Attention
    #: Of the network that the parser makes, by kind.
    layers: dict[str, int]
    #: How many of them compute integers: masks, distances and positions.
    integer_layers: int
    #: Nodes of the parsed graph that compute what an earlier node computes.
    repeated: int
    plan_bytes: int
    seconds: float
    #: The version of TensorRT-RTX.
    version: str


def run(job: Job) -> Iterator[Row]:
    """A row for each engine, for one compute capability."""
    model = random_run(job)
    for side in job.chosen(SIDES):
        memory, precision, attention = SIDES[side]
        job.progress(f"{side}: exporting, then building for {job['capability']}")
        artefact = export(
            model,
            job.folder / side,
            memory=memory,
            target="tensorrt",
            precision=precision,
            attention=attention,
        )
        options = BuildOptions(flavour="rtx", compute_capabilities=(job["capability"],), batch=(1, 1, 1))
        engine = job.folder / f"{side}-engine"
        facts = build(artefact, engine, options)
        kinds = Counter(facts.types)
        yield Row(
            memory=memory,
            precision=precision,
            attention=attention,
            layers=facts.layers,
            integer_layers=kinds["INT64"] + kinds["INT32"],
            repeated=equal_nodes(inline_attention(read_model(artefact / GRAPH))),
            plan_bytes=(engine / PLAN).stat().st_size,
            seconds=facts.seconds,
            version=facts.version,
        )


def _unavailable() -> str | None:
    if importlib.util.find_spec("tensorrt_rtx"):
        return None
    return "tensorrt-rtx is not installed (it is for Linux on x86-64)"


CASE = Case(
    name="rtx-build",
    run=run,
    keys=("memory", "precision", "attention"),
    columns=(
        Column("model", lambda row, run: run.document["config"]),
        Column("memory", lambda row, run: f"`{row['memory']}`"),
        Column("weights", "precision"),
        Column("attention in the graph", lambda row, run: SHOWN[row["attention"]]),
        Column("layers", lambda row, run: f"{sum(row['layers'].values()):,}"),
        Column("of integers", "integer_layers"),
        Column("of attention", lambda row, run: f"{row['layers'].get('ATTENTION_INPUT', 0)}"),
        Column("of ring writes", lambda row, run: f"{row['layers'].get('KV_CACHE_UPDATE', 0)}"),
        Column("computed twice", "repeated"),
        Column("plan, MB", "plan_bytes", megabytes),
    ),
    notes=lambda lines: [
        f"TensorRT-RTX {lines[0].row['version']}. Layers are of the network before it fuses them. None ran "
        "on a GPU."
    ],
    options=(
        "config",
        only_option(SIDES, "The engine to build: a memory, weights, and how the graph has attention"),
        option(
            "--capability", "The compute capability to build for.", default="8.9", type=click.Choice(TARGETS)
        ),
    ),
    unavailable=_unavailable,
    published=lambda history: list({run.document["config"]: run for run in history.of("rtx-build")}.values()),
)
