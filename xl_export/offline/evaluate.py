"""`xl-export eval --ray`: the loss of a text whose lanes are scored by actors."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.tasks.evaluate import Score, checked_lanes, nats_of_lanes
from xl_export.offline.cluster import Facts, facts_of, finished_units, in_tasks, open_same
from xl_export.offline.finished import Finished

LANES = 4  # of a unit: rows of one batch


class EvaluateLanes:
    """The work of an actor: the losses of some lanes as the bytes of an array, float64 [targets]."""

    def __init__(
        self,
        model: str,
        device: str,
        threads: int,
        facts: Facts,
        rule: MemoryRule,
        segment: int,
        carry_memory: bool,
    ) -> None:
        self._session = open_same(model, device, threads, facts, rule)
        self._segment = segment
        self._carry_memory = carry_memory

    def __call__(self, unit: bytes) -> bytes:
        with np.load(io.BytesIO(unit), allow_pickle=False) as arrays:
            tokens = arrays["tokens"]
            starts = arrays["starts"].tolist()
        nats = nats_of_lanes(
            self._session, tokens, starts, segment=self._segment, carry_memory=self._carry_memory
        )
        return bytes(nats.astype("<f8").tobytes())


def evaluate_on_ray(
    session: Session,
    tokens: np.ndarray,
    *,
    model: Path,
    work: Path,
    actors: int,
    threads: int,
    device: str = "auto",
    lanes: int = 1,
    segment: int | None = None,
    carry_memory: bool = True,
    progress: Callable[[int], None] = lambda done: None,
) -> Score:
    """The score of `runtimes.tasks.evaluate`, with lanes scored by actors. Needs `cluster`.

    session: of the model, under the rule to score with. work: as in `xl_export.offline.score`. Raises what
    `evaluate` raises, and UserError for a work folder of another call.
    """
    tokens, segment, starts = checked_lanes(session, tokens, lanes=lanes, segment=segment)
    path = str(model.resolve())
    [facts] = in_tasks(facts_of, [(path, device, threads, session.rule)])
    facts["model"] = session.identity  # of the session that has encoded the text: actors compare with it
    plan = facts | {
        "text": hashlib.sha256(np.ascontiguousarray(tokens, "<i8")).hexdigest(),
        "settings": [lanes, segment, carry_memory, to_json(session.rule)],
    }
    groups = [starts[at : at + LANES + 1] for at in range(0, lanes, LANES)]
    with closing(Finished(work, plan, blocks=len(groups))) as finished:
        began = time.perf_counter()
        done = len(tokens) - 1
        missing = finished.missing
        done -= sum(groups[number][-1] - groups[number][0] for number in missing)
        units = [(number, _packed(tokens, groups[number])) for number in missing]
        options: dict[str, Any] = {
            "model": path,
            "device": device,
            "threads": threads,
            "facts": facts,
            "rule": session.rule,
            "segment": segment,
            "carry_memory": carry_memory,
        }
        for unit in finished_units(units, EvaluateLanes, options, actors=actors, threads=threads):
            finished.write(unit.number, unit.content)
            done += groups[unit.number][-1] - groups[unit.number][0]
            progress(done)
        token_nats = np.frombuffer(b"".join(finished.contents()), "<f8").astype(np.float64)
        finished.remove()
    return Score(
        tokens=len(token_nats),
        nats=float(token_nats.sum()),
        seconds=time.perf_counter() - began,
        segment=segment,
        lanes=lanes,
        memory_carried=carry_memory,
        rule=session.rule,
        token_nats=token_nats,
    )


def _packed(tokens: np.ndarray, starts: list[int]) -> bytes:
    stream = io.BytesIO()
    own = np.asarray(tokens[starts[0] : starts[-1] + 1], np.int64)
    np.savez(stream, tokens=own, starts=np.array(starts))
    return stream.getvalue()
