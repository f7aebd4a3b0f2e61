"""Measures what memory is worth and what it costs: `measure.py ARTEFACT --sources FOLDER`.

FOLDER is the one that `prepare.py` kept ids in; its test part is scored. Three ways of reading the same music
are compared at the same events: with memory, with memory cut to zero at each segment, and with a sliding
window, which reads the last events again for each new one. Differences are paired; ± is one standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import numpy as np
from refuse import prepared_part, refusals
from scheme import BEATS, IDS

import runtimes
from runtimes.tasks.context_losses import context_losses, spread_positions

HISTORY = Path(__file__).with_name("measurements.jsonl")
WINDOWS = (16, 32, 64, 128, 256)  # events
TURNS, WARMUP, CALLS = 4, 3, 10


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("artefact", type=Path)
    options.add_argument("--sources", type=Path, required=True)
    options.add_argument("--positions", type=int, default=1000, help="events at which the ways are compared")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--times", action="store_true", help="measure the times alone, which takes a minute")
    given = options.parse_args()
    with refusals():
        _measure(given)


def _measure(given: argparse.Namespace) -> None:
    path = prepared_part(given.sources, "test")
    session = runtimes.open_session(given.artefact, threads=given.threads)
    lines = path.read_text().splitlines()
    tokens = np.concatenate([np.array(json.loads(line)) for line in lines])
    beats = int(np.isin(tokens, [IDS[name] for name in BEATS]).sum())

    costs = milliseconds_of_each_way(session, tokens)
    scores: dict[str, object] = {}
    if given.times:
        print("\n".join(f"{name}: {cost:.2f} ms for a new event" for name, cost in costs.items()))
    else:
        rows = bits_of_each_way(session, tokens, given.positions)
        whole = runtimes.evaluate(session, tokens).bits_per_token
        per_beat = whole * len(tokens) / beats
        print(f"all {len(tokens):,} events with memory: {whole:.4f} bits per event, {per_beat:.2f} per beat")
        print(table(rows, costs))
        scores = {
            "events": len(tokens),
            "bits_per_event": whole,
            "positions": given.positions,
            "bits": {name: float(bits.mean()) for name, bits in rows.items()},
        }
    record = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": session.identity,
        "precision": session.spec.precision if session.spec else "fp32",
        "rule": {"mem_len": session.rule.mem_len, "segment": session.rule.segment, "mask": session.rule.mask},
        **scores,
        "threads": given.threads,
        "milliseconds": costs,
    }
    with HISTORY.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def bits_of_each_way(session: runtimes.Session, tokens: np.ndarray, count: int) -> dict[str, np.ndarray]:
    """Returns the bits of the same `count` events [N], spread over the music, for each way of reading."""
    positions = spread_positions(len(tokens), count=count, longest=session.rule.mem_len)
    ways = {
        f"memory of {session.rule.mem_len}": runtimes.evaluate(session, tokens).token_nats[positions - 1],
        f"memory cut to zero, segments of {session.rule.segment}": runtimes.evaluate(
            session, tokens, carry_memory=False
        ).token_nats[positions - 1],
    }
    for window in WINDOWS:
        ways[f"sliding window of {window}"] = context_losses(session, tokens, positions, context=window)
    return {name: nats / math.log(2) for name, nats in ways.items()}


def milliseconds_of_each_way(session: runtimes.Session, tokens: np.ndarray) -> dict[str, float]:
    """Returns the median time to compute the distribution of the next event; the ways take turns.

    A turn is several calls one after the other, as in use: then the weights are in the caches of the
    processor. After a call of another way they are not.
    """
    full, fresh = session.start(1), session.start(1)
    for at in range(0, session.rule.slots + 1, session.rule.segment):
        session.predict(tokens[None, at : at + session.rule.segment], full)

    def window(length: int) -> None:
        fresh.positions[:] = 0
        for at in range(0, length, session.rule.segment):
            session.predict(tokens[None, at : min(at + session.rule.segment, length)], fresh)

    calls: dict[str, Callable[[], object]] = {
        f"memory of {session.rule.mem_len}": lambda: session.predict(tokens[None, :1], full)
    }
    for length in WINDOWS:
        calls[f"sliding window of {length}"] = lambda length=length: window(length)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            for number in range(WARMUP + CALLS):
                began = time.perf_counter()
                call()
                if number >= WARMUP:
                    times[name].append((time.perf_counter() - began) * 1e3)
    return {name: median(values) for name, values in times.items()}


def table(rows: dict[str, np.ndarray], costs: dict[str, float]) -> str:
    """Returns the comparison as a table in Markdown."""
    first = next(iter(rows.values()))
    lines = ["| read with | bits per event | more than with memory | ms per new event |", "|---|---|---|---|"]
    for name, bits in rows.items():
        more = bits - first
        difference = (
            f"{more.mean():+.3f} ± {more.std() / math.sqrt(len(more)):.3f}" if bits is not first else ""
        )
        cost = f"{costs[name]:.2f}" if name in costs else ""
        lines.append(f"| {name} | {bits.mean():.3f} | {difference} | {cost} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
