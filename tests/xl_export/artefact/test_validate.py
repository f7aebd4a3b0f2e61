"""Validation sees graphs that are wrong only at one distance, only past the ring's end, or only far into a
stream.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from runtimes import UserError
from runtimes.contract.rule import MemoryRule
from tests.nightly import every
from xl_export.artefact import validate
from xl_export.artefact.export import export
from xl_export.graph import memory, step

RULES = [
    MemoryRule(mem_len=M, segment=T)
    for M in (0, 1, 7, 16, 100, 640, 1600, 3800)
    for T in (1, 2, 3, 8, 64, 128)
]
M = 16  # of the shared run, whose ring has 24 slots


@pytest.fixture(params=["three times around", "once around"])
def around(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lengths of chained streams: that of small memories and that of large ones."""
    if request.param == "once around":
        monkeypatch.setattr(validate, "MAX_PASS_TOKENS", 0)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_chained_segments_are_written_across_the_end_of_the_ring(rule: MemoryRule) -> None:
    segments = validate.chained_segments(rule)
    ends = np.cumsum(segments)
    total, T = int(ends[-1]), rule.segment
    assert 1 <= segments.min() <= segments.max() <= T
    after = set(segments[ends > rule.slots].tolist())
    assert after >= {T, 1, min(7, T)}
    assert total > rule.slots + T
    assert total > validate.RING_PASSES * rule.slots or total > validate.MAX_PASS_TOKENS
    assert (
        total < validate.RING_PASSES * rule.slots + 5 * T + 20
        or total < max(validate.MAX_PASS_TOKENS, rule.slots) + 10 * T + 20
    )
    if T > 1 and rule.mem_len:
        assert not (ends % rule.slots == 0).any()
        crossing = [
            (start // rule.slots, (end - 1) // rule.slots)
            for start, end in itertools.pairwise([0, *ends.tolist()])
        ]
        assert any(first != last for first, last in crossing)


@pytest.mark.parametrize("distance", every(2, [0, 1, M, M // 2]))
def test_one_wrong_row_of_a_table(
    distance: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: None
) -> None:
    table = step.position_table

    def one_row_off(*which: Any) -> np.ndarray:
        rows = table(*which)
        assert rows is not None
        rows[:, :, distance] *= 1.05
        return rows

    monkeypatch.setattr(step, "position_table", one_row_off)
    with pytest.raises(UserError, match=r"^step.onnx differs from PyTorch by .* nats"):
        export(run, tmp_path / "artefact")
    assert list(tmp_path.iterdir()) == []


def wrong_writes(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, ir.Value, ir.Value], ir.Value]
) -> None:
    """Writes where `change(op, first position, ring slots)` says, modulo the slots."""
    make = memory.make_mask

    def made(op: Any, inputs: Any, rule: MemoryRule, rows: int, **form: Any) -> Any:
        first = op.Gather(inputs["position_ids"], op.constant(np.array(0)), axis=1)
        slots = op.constant(np.array(rule.slots))
        return dataclasses.replace(
            make(op, inputs, rule, rows, **form), write_at=op.Mod(change(op, first, slots), slots)
        )

    monkeypatch.setattr(memory, "make_mask", made)


def test_a_ring_that_is_off_by_one_after_its_end(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: None
) -> None:
    one = np.array(1)
    wrong_writes(
        monkeypatch,
        lambda op, first, slots: op.Where(
            op.GreaterOrEqual(first, slots), op.Add(first, op.constant(one)), first
        ),
    )
    with pytest.raises(UserError, match="over 2 streams"):
        export(run, tmp_path / "artefact")


def test_a_ring_that_forgets_where_it_is_beyond_32_bits(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: None
) -> None:
    wrong_writes(
        monkeypatch, lambda op, first, _: op.Cast(op.Cast(first, to=ir.DataType.INT32), to=ir.DataType.INT64)
    )
    with pytest.raises(UserError, match="over a stream beyond token 8,589,"):
        export(run, tmp_path / "artefact")
