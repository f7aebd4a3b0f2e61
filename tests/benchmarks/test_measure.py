"""Timing takes turns and leaves warm-up out; limits and machine facts are what a history needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import machine, measure
from benchmarks.cases import CASES
from benchmarks.configs import CONFIGS
from benchmarks.history import Result
from benchmarks.machine import HostClock, machine_facts, versions
from benchmarks.measure import Limits, Timing, measure_limits, take_turns
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
    assert (
        limits.read_milliseconds(limits.read_bytes)
        == limits.compute_milliseconds(limits.multiply_adds)
        == 1000
    )


def test_machine_facts_are_plain_and_name_no_host_or_path():
    text = json.dumps([machine_facts(), versions()], allow_nan=False)
    assert json.loads(text)[0]["cpu"]
    assert json.loads(text)[1]["onnxruntime"]
    assert "/home" not in text
    assert __import__("platform").node() not in text


def test_what_the_host_keeps_is_read_from_the_system(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    now = iter([10.0, 20.0, 30.0, 40.0])
    set_clock(monkeypatch, machine, monotonic=lambda: next(now))
    line = "cpu  9 9 9 9 9 9 9 {} 5 5\ncpu0 9 9 9 9 9 9 9 9 9 9\n"
    stat.write_text(line.format(400))
    before = HostClock.now()
    stat.write_text(line.format(500))
    assert HostClock.now().share_since(before) == pytest.approx(1.0 / (10 * 2))
    stat.write_text("cpu  9 9 9 9\n")  # of a kernel or a sandbox that counts less
    assert HostClock.now().stolen is None
    stat.unlink()
    assert HostClock.now().share_since(before) is None  # a system that does not tell


def test_a_result_says_what_the_host_kept(monkeypatch):
    result = Result(
        case=CASES["latency"],
        config=CONFIGS["small"],
        threads=1,
        file=Path("x"),
        limits=Limits(read_bytes=1e9, multiply_adds=1e9),
        machine={"cpu": "A", "cpus": 2, "busy_cpus": 0.0},
        versions={},
        began=HostClock(seconds=0.0, stolen=0.0),
    )
    for stolen, noted in ((0.1, False), (0.3, True), (None, False)):
        monkeypatch.setattr(HostClock, "now", classmethod(lambda cls, s=stolen: cls(seconds=10.0, stolen=s)))
        monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
        after = result.remeasured()
        assert any("steal time" in line for line in after.machine_lines) is noted
        assert not noted or any("1.5% of the CPU time" in line for line in after.machine_lines)
        expected = None if stolen is None else stolen / 20
        assert after.document([])["machine"]["stolen"] == expected
        assert "stolen" not in result.machine
