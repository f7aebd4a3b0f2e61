"""The part `stall`: how long one client waits while another one sends as much as it may."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases.serving.attacks import ATTACKS
from benchmarks.cases.serving.bench import Bench, Row, baseline_steps
from benchmarks.cases.serving.server import ROOT, serving
from benchmarks.measure import Timing
from runtimes.sessions.open import open_session

MODEL = ROOT / "examples" / "stories" / "tales"  # its tokens are parts of words, which cost most to encode
KEYS = {"attacker": "attacker-0123456789abcdef", "other": "other-0123456789abcdef"}
HEALTH = 50.0  # milliseconds
KINDS = (*ATTACKS, "snapshots", "headers of 60 MB")
AT_ONCE = 8  # requests of the attacker


def stall(bench: Bench) -> Iterator[Row]:
    """The longest answer to `/health`, and to a text of 5 KB that another tenant encodes, during each attack,
    and the memory that the attack takes. Servers take turns: this one, and that of `bench.before`.

    Targets: 50 ms, and twice the time of an idle server and one step of the model.
    """
    if not MODEL.is_dir():
        yield Row(
            part="stall", side="all", streams=AT_ONCE, unit="ms", figure=None, note=f"{MODEL.name} is missing"
        )
        return
    session = open_session(MODEL, threads=1, device="cpu")
    step = baseline_steps(session, 1, 8, session.rule.segment, at=session.rule.mem_len).seconds * 1e3
    versions = {"now": ROOT} | ({} if bench.before is None else {"before": bench.before})
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys"
        keys.touch(mode=0o600)
        keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()), encoding="utf-8")
        for kind in KINDS[: bench.sizes.attacks]:
            found: dict[str, list[dict[str, Any]]] = {version: [] for version in versions}
            for at in range(bench.repeats):
                for version, root in versions.items():
                    bench.progress(f"stall: {kind}, {version}")
                    # A server of its own each: what an attack has begun may go on after it.
                    state = Path(name) / f"{kind} {version} {at}"
                    options = ("--api-keys", keys, "--state", state)
                    with serving(MODEL, threads=1, options=options, root=root) as served:
                        job = {"attack": kind, "at_once": AT_ONCE, "seconds": bench.sizes.attacked}
                        found[version].append(served.load("stall", **job, keys=list(KEYS.values())))
            for version, rounds in found.items():
                yield from _rows(kind, version, rounds, step)


def _rows(kind: str, version: str, rounds: list[dict[str, Any]], step: float) -> Iterator[Row]:
    common: dict[str, Any] = {"part": "stall", "streams": AT_ONCE, "threads": 1}
    idle = median(median(each["idle"]["short"]) for each in rounds)
    for asked, title, most in (
        ("health", "/health", HEALTH),
        ("short", "a text of 5 KB", 2 * idle + step),
    ):
        middle = median(median(each["busy"][asked]) for each in rounds)
        usual = median(median(each["idle"][asked]) for each in rounds)
        yield Row(
            side=f"{kind}, {version}: {title}, longest",
            unit="ms",
            figure=Timing.of([max(each["busy"][asked]) for each in rounds]),
            most=most if version == "now" else None,
            note=f"median {middle:.3g} ms, of an idle server {usual:.3g} ms",
            **common,
        )
    yield Row(
        side=f"{kind}, {version}: more memory",
        unit="MB",
        figure=Timing.of([each["resident"] / 1e6 for each in rounds]),
        **common,
    )
