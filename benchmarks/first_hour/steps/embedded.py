"""The PTX that an engine embeds, launched through the CUDA driver against the naive operator: no TensorRT."""

from __future__ import annotations

from benchmarks.first_hour.record import Record
from xl_export.tensorrt.kernels.cases import CASES
from xl_export.tensorrt.kernels.driver import Driver, try_kernels

QUICK_CASES = 2


def run(record: Record) -> None:
    """Every case and tactic that an engine for this GPU may have."""
    driver = Driver()
    record.fact("multiprocessors", driver.multiprocessors)
    for name in list(CASES)[: QUICK_CASES if record.quick else None]:
        with record.attempt(name):
            for tried in try_kernels({name: CASES[name]}, driver=driver):
                tactic, join = tried.tactic, tried.join.block_t
                label = f"{name}, {tactic.kernel} {tactic.block_t} x {tactic.block_j}, joined by {join}"
                said = (
                    f"differs from float64 by at most {tried.difference:.2e} (tolerance {tried.tolerance:g})"
                )
                record.check(label, tried.passed, f"{said}; {tried.milliseconds:.3g} ms")
