"""An engine of one kind: built, checked, compared, saved and opened again, and timed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import timed
from benchmarks.first_hour.steps.models import Kind, artefact_of, config_of
from runtimes import open_session
from runtimes.contract.engine import NAMES, PLAN, Attention, EngineFacts, Flavour
from runtimes.contract.precision import Precision
from runtimes.contract.tensors import Form
from runtimes.sessions.tensorrt.device_memory import Cuda
from xl_export.tensorrt.build import LAYERS, build
from xl_export.tensorrt.options import BuildOptions

MOST_ROWS = max(timed.BATCHES)


def run(
    record: Record,
    *,
    size: str,
    flavour: Flavour,
    attention: Attention,
    form: Form,
    precision: Precision,
    written: Attention = "plugin",
) -> None:
    """Builds the engine of a model on this GPU and keeps what it does.

    written: whether attention in the graph is one node with a body (`plugin`), or ONNX Attention (`native`).
    """
    config = config_of(size, quick=record.quick)
    kind = Kind(target="tensorrt", form=form, precision=precision, attention=written)
    artefact = artefact_of(record, config, kind)
    out = artefact.with_name(f"engine-{flavour}-{attention}-{kind.folder}")
    shutil.rmtree(out, ignore_errors=True)
    facts = build(artefact, out, options_of(flavour, attention, Cuda().gpu.compute_capability))
    side = f"{NAMES[flavour]}, {attention}, {form}, {precision}" + ", ONNX Attention" * (written == "native")
    keep_build(record, side, facts)
    keep_layers(record, side, out)
    timed.tried(
        record, out, open_session(out), config, side=side, form=form, precision=precision, artefact=artefact
    )


def options_of(flavour: Flavour, attention: Attention, compute_capability: str) -> BuildOptions:
    """The options of an engine for this GPU, for one stream and for several."""
    return BuildOptions(
        flavour=flavour,
        attention=attention,
        compute_capabilities=(compute_capability,) if flavour == "rtx" else (),
        batch=(1, 1, MOST_ROWS),
        # The plugin's token profile has one size: that of the step that is timed first.
        token_batch=(1, 1, 1) if attention == "plugin" else (1, 1, MOST_ROWS),
    )


def keep_build(record: Record, side: str, facts: EngineFacts) -> None:
    """Keeps what a build says about its engine."""
    record.fact(
        f"{side}: built",
        f"in {facts.seconds:.1f} s by {NAMES[facts.flavour]} {facts.version}; the plan has "
        f"{facts.files[PLAN].num_bytes / 2**20:.1f} MiB and {sum(facts.layers.values())} layers, of which "
        f"{facts.plugin_layers} are the plugin's",
    )


def keep_layers(record: Record, side: str, folder: Path) -> None:
    """Keeps how many layers the plan has by TensorRT's inspector, whose file is there where a GPU built it.

    They are fewer than those of the network, which TensorRT joins.
    """
    name = f"{side}: {LAYERS}"
    with record.attempt(name):
        if not (folder / LAYERS).is_file():
            record.check(name, False, "it is not in the folder of the engine, although a GPU built it")
            return
        layers = json.loads((folder / LAYERS).read_text("utf-8"))["Layers"]
        record.fact(f"{side}: layers of the plan", len(layers))
        record.check(name, len(layers) > 0, f"it is JSON, and has {len(layers)} layers")
