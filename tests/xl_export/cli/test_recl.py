"""`xl-export recl`: the table, its figures, the picture, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes import open_session
from runtimes.contract.rule import MemoryRule
from runtimes.tasks.context_losses import context_losses, spread_positions
from runtimes.tasks.effective_context import recl, relative_gains
from tests.commands import json_of, xl


@pytest.fixture
def text_file(text: str, tmp_path: Path) -> Path:
    (tmp_path / "some.txt").write_text(text[:400], encoding="utf-8")
    return tmp_path / "some.txt"


@pytest.fixture(scope="module")
def other(make_run: Callable[..., Path]) -> Path:
    """Another model over the same characters, with a shorter memory."""
    return make_run(seed=1, rule=MemoryRule(mem_len=6, segment=4))


def test_the_table_holds_the_recl_of_the_group(
    run: Path, artefacts: dict[str, Path], other: Path, text_file: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    group, lengths = (run, artefacts["ring"], other), (4, 8, 12, 16)
    out = tmp_path / "recl.json"
    options = (
        "--text",
        text_file,
        "--lengths",
        "4:16:4",
        "--positions",
        12,
        "--r",
        0.1,
        "--r",
        0.5,
        "--r",
        1,
        "--out",
        out,
    )
    result = xl("recl", *group, *options, "--json")
    report = json_of(result)
    assert report == json.loads(out.read_text())
    assert (report["lengths"], report["positions"], report["threshold"]) == ([4, 8, 12, 16], 12, 0.01)

    positions = spread_positions(400, count=12, longest=16)
    sessions = [open_session(path) for path in group]
    losses = np.stack(
        [[context_losses(s, tokens[:400], positions, context=c) for c in lengths] for s in sessions]
    )
    for j, r in enumerate((0.1, 0.5, 1.0)):
        entries = [model["by_r"][j] for model in report["models"]]
        assert [entry["r"] for entry in entries] == [r] * 3
        assert [(entry["recl"], entry["at_least"]) for entry in entries] == [
            (x.length, x.at_least) for x in recl(losses, lengths, r=r)
        ]
        assert np.allclose(
            [entry["relative_gain"] for entry in entries], relative_gains(losses, r=r), atol=1e-6
        )
    assert [model["rule"]["mem_len"] for model in report["models"]] == [16, 16, 6]
    lines = xl("recl", *group, *options, "--force").stdout.splitlines()
    assert lines[0].split() == ["model", "r", "=", "0.1", "r", "=", "0.5", "r", "=", "1"]
    for line, path, model in zip(lines[1:4], group, report["models"], strict=True):
        assert line.replace("≥ ", "≥").split() == [
            str(path),
            *(entry["shown"].replace("≥ ", "≥") for entry in model["by_r"]),
        ]
