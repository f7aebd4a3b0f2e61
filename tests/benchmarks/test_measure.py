"""Timing takes turns and leaves warm-up out; limits and machine facts are what a history needs."""

from __future__ import annotations

import json

import pytest

from benchmarks import measure
from benchmarks.machine import machine_facts, versions
from benchmarks.measure import Timing, measure_limits, take_turns
from tests.clock import set_clock


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when a test moves it."""
    now = [0.0]
    set_clock(monkeypatch, measure, perf_counter=lambda: now[0])
    return now


def test_sides_take_turns(monkeypatch):
    order: list[str] = []
    set_clock(monkeypatch, measure, sleep=lambda seconds: order.append("-"))
    sides = {name: lambda name=name: order.append(name) for name in "ab"}
    times = take_turns(sides, repeats=5, warmup=1, turns=2)
    assert "".join(order) == "-aaa-bbb-aaaa-bbbb"  # a rest, one warm-up call, then 2 and 3 timed ones
    assert [times[name].repeats for name in "ab"] == [5, 5]


def test_timing_reports_median_and_extremes(clock):
    durations = iter([50.0, 0.004, 0.001, 0.010])

    def call():
        clock[0] += next(durations)

    timing = take_turns({"a": call}, repeats=3, warmup=1, turns=1)["a"]
    assert (timing.median, timing.fastest, timing.slowest) == pytest.approx((4, 1, 10))
    assert timing.per(2) == Timing(
        median=timing.median / 2, fastest=timing.fastest / 2, slowest=timing.slowest / 2, repeats=3
    )


def test_limits_are_rates(tiny, clock, monkeypatch):
    def ticking():
        clock[0] += 0.25
        return clock[0]

    set_clock(monkeypatch, measure, perf_counter=ticking)  # every call takes a quarter of a second
    limits = measure_limits(1)
    assert limits.read_bytes == pytest.approx(4 * measure.READ_BYTES)
    assert limits.multiply_adds == pytest.approx(4 * measure.MATRIX**3)


def test_machine_facts_are_plain_and_name_no_host_or_path():
    text = json.dumps([machine_facts(), versions()], allow_nan=False)
    assert json.loads(text)[0]["cpu"]
    assert json.loads(text)[1]["onnxruntime"]
    assert "/home" not in text
    assert __import__("platform").node() not in text
