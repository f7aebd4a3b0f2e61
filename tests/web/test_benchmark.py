"""`python -m benchmarks web` at a tiny size: every side is checked, then measured; the claim is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.cases import web
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Timing
from tests.benchmarks.conftest import tiny  # noqa: F401
from tests.benchmarks.shown import on_terminal
from tests.web.npm import copied_module, node, packages


@pytest.mark.slow
def test_every_side_is_checked_and_measured(
    tiny: BenchmarkConfig,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node(), packages()
    monkeypatch.setattr(web, "WEB", copied_module(tmp_path / "web"))
    monkeypatch.setattr(web, "REST", 0)
    history = tmp_path / "history.jsonl"
    arguments = ["run", "web", "--config", "tiny", "--threads", "1", "--history", str(history)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    rows = {row["side"]: row for row in json.loads(history.read_text())["rows"]}
    assert {web.IN_PLACE, web.COPIES, web.PYTHON} <= rows.keys()
    for side, row in rows.items():
        assert row["late"]["median"] > 0
        assert (row["early"] is None) == (side == web.CPP)
        assert (row["times_cpp"] is None) == (web.CPP not in rows)


def test_the_claim_is_judged_by_the_ratios() -> None:
    def row(side: str, milliseconds: float, times_cpp: float) -> web.Row:
        timing = Timing(median=milliseconds, fastest=milliseconds, slowest=milliseconds, repeats=1)
        return web.Row(side=side, mem_len=8, late=timing, early=timing, times_cpp=times_cpp)

    for in_place, copies, verdict in ((2, 4, "Holds"), (4, 4, "**MISSED**")):
        rows = [row(web.IN_PLACE, in_place, in_place), row(web.COPIES, copies, copies), row(web.CPP, 1, 1)]
        claims = on_terminal("web", rows, config="medium")[-2:]
        assert [f". {verdict}: " in claim for claim in claims] == [True, True]
