"""The case `serve`: its reader of events, and every part against a real server of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.cases.serving import bench, others, parts, serve
from benchmarks.cases.serving.bench import Row, Sizes, timing
from benchmarks.cases.serving.events import Answer, LoadError
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Limits
from runtimes.base.errors import ArtefactError

SMALL = Sizes(streams=(1, 2), together=2, prompt=24, arriving=2, listening=2, clients=3, stored=12, warm=3)


def call(tmp_path: Path, *names: str) -> list[dict[str, Any]]:
    history = tmp_path / "history.jsonl"
    only = [word for name in names for word in ("--only", name)]
    options = ["--config", "tiny", "--threads", "1", "--repeats", "1", "--tokens", "1000", "--minutes", "0.02"]
    result = CliRunner().invoke(main, ["serve", *options, *only, "--history", str(history)])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(history.read_text())["rows"]
    return rows


def test_x(tiny: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "SIZES", SMALL)
    for part in serve.PARTS:
        import time
        b = time.time()
        rows = call(tmp_path / part, part)
        print(part, time.time() - b)
        for row in rows: print({k: v for k, v in row.items() if v not in (None, "")})
