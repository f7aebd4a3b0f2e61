"""The case that says what memory is worth to the model of the chorales, on a few made-up events."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.cases.learning import music_memory
from runtimes.base.errors import ArtefactError
from runtimes.sessions.open import open_session
from runtimes.tasks.context_losses import spread_positions
from runtimes.tasks.evaluate import evaluate
from tests.benchmarks.shown import rows_of
from xl_export.demo.shipped import MUSIC, find_shipped

CHORALES = find_shipped(MUSIC)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Pieces that repeat four events, and a test part of 400 events."""
    folder = tmp_path_factory.mktemp("sources")
    for part, pieces in (("train", 40), ("test", 10)):
        lines = [json.dumps([0, 1, *[20, 30, 40, 50] * 9, 3, 4]) for _ in range(pieces)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def measure(parts, **options):
    return rows_of("music-memory", music_memory.CASE.size({}), parts=parts, **options)


@pytest.fixture(scope="module")
def rows(parts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(music_memory, "EVENTS", 24)
        patch.setattr(music_memory, "WINDOWS", (16, 256))
        return measure(parts, repeats=1)


def test_every_way_is_compared_with_memory_at_the_same_events(rows, parts):
    session = open_session(CHORALES, threads=1)
    test = np.concatenate([json.loads(line) for line in (parts / "test.jsonl").read_text().splitlines()])
    nats = evaluate(session, test).token_nats
    at = spread_positions(400, count=24, longest=256)
    named = {row.name: row for row in rows}
    assert math.isclose(
        named["memory of 256, the whole part"].bits_per_event, nats.mean() / math.log(2), rel_tol=1e-6
    )
    memory = named["memory of 256"]
    assert math.isclose(memory.bits_per_event, nats[at - 1].mean() / math.log(2), rel_tol=1e-6)
    assert (memory.events, memory.more) == (24, None)
    for row in rows[2:]:
        assert math.isclose(row.more, row.bits_per_event - memory.bits_per_event, abs_tol=1e-6)
        assert row.error > 0
    # A window that is as long as the memory sees what memory sees, but the token 256 before, in full.
    assert abs(named["sliding window of 256"].more) < abs(named["sliding window of 16"].more)
    # The n-grams have counted these very events.
    assert named["5-grams, Kneser-Ney"].bits_per_event < 0.3
    timed = [row.name for row in rows if row.timing is not None]
    assert timed == [row.name for row in rows if row.name.startswith("sliding") or row is memory]
    assert all(row.timing.repeats == 1 for row in rows if row.timing is not None)


def test_a_missing_artefact_is_named(parts, monkeypatch):
    monkeypatch.setattr(music_memory, "find_shipped", lambda artefact: None)
    with pytest.raises(ArtefactError, match=r"chorales is not there; train it as examples/music/README\.md"):
        measure(parts)
