"""TensorRT-RTX engines for every GPU that it knows, built ahead of time: this needs no GPU."""

from __future__ import annotations

import shutil

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps.engines import keep_build
from benchmarks.first_hour.steps.models import Kind, artefact_of, config_of
from runtimes.contract.tensors import Form
from runtimes.sessions.tensorrt.module import load_tensorrt
from xl_export.tensorrt.build import build
from xl_export.tensorrt.options import TARGETS, BuildOptions

FORMS: tuple[Form, ...] = ("ring", "shift")


def run(record: Record) -> None:
    """Builds the small model in both forms of memory, and keeps whether a plan came out."""
    load_tensorrt("rtx")  # a package that is missing is the result of the whole step
    config = config_of("small", quick=record.quick)
    for form in FORMS:
        with record.attempt(f"{form} memory"):
            artefact = artefact_of(record, config, Kind(target="tensorrt", form=form, precision="fp16"))
            out = artefact.with_name(f"ahead-{form}")
            shutil.rmtree(out, ignore_errors=True)
            facts = build(artefact, out, BuildOptions(flavour="rtx", compute_capabilities=TARGETS))
            keep_build(record, f"{form} memory", facts)
            record.check(
                f"{form} memory",
                facts.compute_capabilities == TARGETS,
                f"one plan for compute capability {', '.join(facts.compute_capabilities)}, of "
                f"{sum(facts.layers.values())} layers, in {facts.seconds:.1f} s; not executed here",
            )
