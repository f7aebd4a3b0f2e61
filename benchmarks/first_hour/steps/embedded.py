"""The PTX that an engine embeds, launched through the CUDA driver against the naive operator: no TensorRT."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np

from benchmarks.first_hour.record import Record
from benchmarks.measure import Timing
from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.kernels.compile import JOINS, Tactic, tactics
from xl_export.tensorrt.kernels.driver import TOLERANCES, Driver, naive_answer, run_embedded, try_kernels

QUICK_CASES = 2
REPEATS, UNTIMED = 33, 3
# The attention of one layer at the published sizes, as long as the naive operator has room for it.
PUBLISHED = {
    "enwik8-base": Case(T=1, M=1600, H=8, K=64, G=8, R=1601, first=(4000,)),
    "enwik8-base, half a segment": Case(T=64, M=1600, H=8, K=64, G=8, R=1601, first=(4000,)),
    "enwik8-base, ring": Case(T=1, M=1600, H=8, K=64, G=8, R=1601, slot=(40,), first=(4000,)),
    "text8-large": Case(T=1, M=3800, H=8, K=128, G=8, R=3801, first=(9000,)),
}


def run(record: Record) -> None:
    """Every case and tactic that an engine for this GPU may have, and their times at the published sizes."""
    driver = Driver()
    record.fact("multiprocessors", driver.multiprocessors)
    for name in list(CASES)[: QUICK_CASES if record.quick else None]:
        with record.attempt(name):
            for tried in try_kernels({name: CASES[name]}, driver=driver):
                said = (
                    f"differs from float64 by at most {tried.difference:.2e} (tolerance {tried.tolerance:g})"
                )
                label = f"{name}, {_words(tried.tactic)}, joined by {tried.join.block_t}"
                record.check(label, tried.passed, f"{said}; {tried.milliseconds:.3g} ms")
    for name, case in PUBLISHED.items():
        with record.attempt(name):
            time_case(record, driver, name, replace(case, M=50, R=51) if record.quick else case)


def time_case(record: Record, driver: Driver, name: str, case: Case) -> None:
    """Keeps a row for every tactic whose answer is right; single tokens are not tried in tiles."""
    inputs, expected = case.inputs(), naive_answer(case)
    capability = driver.gpu.capability
    for tactic in tactics(case.K, capability, case.dtype):
        if tactic.block_t > case.T:
            continue
        join = JOINS[case.T > 1]
        got = run_embedded(
            driver,
            inputs,
            case.attributes,
            mem_len=case.mem_len,
            tactic=tactic,
            join=join,
            repeats=REPEATS,
        )
        difference, tolerance = float(np.abs(got.answer - expected).max()), TOLERANCES[case.dtype]
        said = f"differs from float64 by at most {difference:.2e} (tolerance {tolerance:g})"
        record.check(f"{name}, {_words(tactic)}", difference <= tolerance, said)
        if difference <= tolerance:
            ms = got.milliseconds[UNTIMED:]
            record.time(
                Timing(median=median(ms), fastest=min(ms), slowest=max(ms), repeats=len(ms)),
                model=f"one attention of {name}",
                side=f"embedded PTX, {_words(tactic)}",
                batch=case.B,
                tokens=case.T,
                num_bytes=sum(array.nbytes for array in inputs.values()) + got.answer.nbytes,
                multiply_adds=3 * case.B * case.H * case.T * (case.M + 1) * case.K,
            )


def _words(tactic: Tactic) -> str:
    return f"{tactic.kernel} {tactic.block_t} x {tactic.block_j}"
