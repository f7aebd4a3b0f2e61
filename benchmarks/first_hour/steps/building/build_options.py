"""The options of a build of TensorRT, each tried alone: built with it, checked, and refitted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps.engines import keep_build, options_of
from benchmarks.first_hour.steps.models import Kind, artefact_of, config_of
from runtimes import check
from runtimes.sessions.tensorrt.device_memory import Cuda
from xl_export.deployment.refit import refit
from xl_export.tensorrt.build import build

KIND = Kind(target="tensorrt", form="ring", precision="fp16")
CHANGES: dict[str, dict[str, Any]] = {
    "--hardware same-capability": {"hardware": "same-capability"},
    "--hardware ampere-plus": {"hardware": "ampere-plus"},
    "--version-compatible": {"version_compatible": True},
    "--workspace-mib 64": {"workspace_mib": 64},
    "--optimization-level 5": {"optimization_level": 5},
}


def run(record: Record) -> None:
    """Keeps a check for each option, what a timing cache saves, and a check of a refitted engine."""
    config = config_of("small", quick=record.quick)
    artefact, capability = artefact_of(record, config, KIND), Cuda().gpu.compute_capability
    usual = options_of("tensorrt", "native", capability)
    for name, changes in CHANGES.items():
        with record.attempt(name):
            _checked(record, name, artefact, artefact.with_name("engine-option"), replace(usual, **changes))
    cache = artefact.with_name("timing.cache")
    for name in ("--timing-cache, empty", "--timing-cache, used again"):
        with record.attempt(name):
            folder = artefact.with_name("engine-cached")
            _checked(record, name, artefact, folder, replace(usual, timing_cache=cache))
    with record.attempt("refit"):
        engine, out = artefact.with_name("engine-to-refit"), artefact.with_name("engine-refitted")
        _checked(record, "--refit", artefact, engine, replace(usual, refit=True))
        other = artefact_of(record, replace(config, name=f"{config.name}-other"), KIND, seed=1)
        shutil.rmtree(out, ignore_errors=True)
        refit(engine, other, out)
        report = check(out)
        record.check("refit", report.passed, f"with the weights of another model: {report.sentence}")


def _checked(record: Record, name: str, artefact: Path, out: Path, options: Any) -> None:
    shutil.rmtree(out, ignore_errors=True)
    keep_build(record, name, build(artefact, out, options))
    report = check(out)
    record.check(name, report.passed, report.sentence)
