"""Long random schedules of streams. test_signals.py kills a command that saves them."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtimes import Session, open_session
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import FUSED, load_spec
from runtimes.contract.tensors import FORMS
from runtimes.sessions.onnx_runtime import OrtSession
from tests.architectures import ARCHITECTURES
from tests.schedule import Schedule
from xl_export.artefact.export import export

STATUS = Path("/proc/self/statm")
MiB = 1 << 20
GROWTH = 48 * MiB  # of the resident memory, between the second quarter of the rounds and the last
Make = Callable[..., Path]


def any_model(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """An architecture and its sizes; half of those whose rule is free get a random one."""
    name = chance.choice(list(ARCHITECTURES))
    sizes = dict(ARCHITECTURES[name])
    if "rule" not in sizes and "positions" not in sizes and chance.random() < 0.5:
        sizes["rule"] = MemoryRule(
            mem_len=chance.randint(0, 24),
            segment=chance.randint(1, 12),
            mask=chance.choice(("same-length", "full")),
            clamp_len=chance.choice((None, chance.randint(1, 20))),
            initial_memory=chance.choice(("masked", "zeros")),
        )
    return name, sizes


def soak_round(
    seed: int, operations: int, make_run: Make, folder: Path, fused: Path | None
) -> tuple[Counter[str], float]:
    """One model in each form of memory; what was done, and the largest difference in nats."""
    chance = random.Random(seed)
    name, sizes = any_model(chance)
    run = make_run(seed=seed, **sizes)
    counts: Counter[str] = Counter()
    worst = 0.0
    for form in FORMS:
        artefact = export(run, folder / f"{seed}-{form}", memory=form)  # type: ignore[arg-type]
        sessions: list[Session] = [
            OrtSession.open(artefact, threads=threads, kernel="standard") for threads in (1, 2)
        ]
        if fused and FUSED in load_spec(artefact).files:
            sessions.append(OrtSession.open(artefact, threads=2, kernel="fused"))
        work = folder / f"{seed}-{form}-files"
        work.mkdir()
        by_row = form == "ring" and not sizes.get("from_segment_end")
        schedule = Schedule(sessions, open_session(run), chance, work, by_row=by_row)
        try:
            schedule.run(schedule.choose(operations))
        except AssertionError as error:
            raise AssertionError(
                f"{name} with {form} memory; repeat with SOAK_SEED={seed}.\n{error}"
            ) from error
        counts += schedule.counts
        counts["fused" if len(sessions) > 2 else "standard only"] += operations
        worst = max(worst, schedule.worst)
    return counts, worst


@pytest.mark.slow
def test_a_round_of_the_soak_passes(make_run: Make, tmp_path: Path) -> None:
    counts, worst = soak_round(5, 20, make_run, tmp_path, None)
    assert counts["step"] > 0
    assert 0 < worst < 1e-4


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_of_streams(
    rounds: Callable[[str], Iterator[int]], make_run: Make, tmp_path: Path, fused_library: Path | None
) -> None:
    total: Counter[str] = Counter()
    resident, worst, done = [], 0.0, 0
    for number in rounds("streams"):
        counts, largest = soak_round(number, 400, make_run, tmp_path, fused_library)
        total, worst, done = total + counts, max(worst, largest), done + 1
        resident.append(_resident())
        print(f"soak: streams, {done} rounds, {worst:.1e} nats, {resident[-1] / MiB:.0f} MiB", flush=True)
    print(f"soak: streams, {dict(total)}", flush=True)
    quarter = len(resident) // 4
    if quarter > 1:
        growth = max(resident[-quarter:]) - max(resident[quarter : 2 * quarter])
        assert growth < GROWTH, f"the process grew by {growth / MiB:.0f} MiB: {resident}"


def _resident() -> int:
    gc.collect()
    return int(STATUS.read_text().split()[1]) * 4096 if STATUS.is_file() else 0
