"""Two results side by side: rows meet by what they are, ratios are of medians, and doubts are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import compare, find_results
from tests.benchmarks.shown import call

MACHINE = {"cpu": "A", "cpus": 2, "system": "Linux x86_64", "memory_bytes": 1 << 34}


def document(day: int, scale: float, *, commit: str = "0123456789ab", **changes: Any) -> dict[str, Any]:
    timing = {name: scale * 2.0 for name in ("median", "fastest", "slowest")}
    rows = [
        {"mem_len": mem_len, "batch": 1, "tokens": 1, "onnxruntime": timing, "num_bytes": 5, "ratio": 3.0}
        for mem_len in changes.pop("lengths", (64, 128))
    ]
    facts = {
        "case": "decode",
        "time": f"2026-11-{day:02}T10:00:00+00:00",
        "config": "small",
        "threads": 2,
        "rows": rows,
        "machine": MACHINE,
        "versions": {"onnxruntime": "1.31.1"},
        "commit": commit,
    }
    return {**facts, **changes}


def write(path: Path, *documents: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(d) + "\n" for d in documents))
    return path


def test_two_commits_of_the_history(tmp_path: Path) -> None:
    write(
        tmp_path / "decode.jsonl", document(1, 1.0, commit="aaaa1111"), document(2, 0.5, commit="bbbb2222+")
    )
    result = call("compare", "aaaa", "bbbb2222", "--history", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [change["row"] for change in report["changes"]] == [
        f"mem len {m}, batch 1, tokens 1" for m in (64, 128)
    ]
    assert [(c["before"], c["after"], c["ratio"]) for c in report["changes"]] == [(2, 1, 0.5)] * 2
    assert report["warnings"] == []
    assert "0.500" in call("compare", "aaaa", "bbbb2222", "--history", tmp_path).stdout


def test_rows_of_several_runs_are_taken_together(tmp_path: Path) -> None:
    """As where each kernel, or each length, was measured in a run of its own."""
    fused = document(1, 4.0) | {"time": "2026-11-01T23:00:00+00:00"}
    fused["rows"] = [{**row, "operators": "fused"} for row in fused["rows"]]
    one = write(
        tmp_path / "one.jsonl", document(1, 1.0, lengths=(64,)), fused, document(1, 1.0, lengths=(256,))
    )
    other = write(tmp_path / "other.jsonl", document(2, 2.0, lengths=(64, 128, 256)))
    report = compare(find_results(str(one), tmp_path), find_results(str(other), tmp_path))
    found = [(change["row"], change["ratio"]) for change in report["changes"]]
    assert found == [("mem len 64, batch 1, tokens 1", 2), ("mem len 256, batch 1, tokens 1", 2)]


def test_rows_without_a_counterpart_are_listed(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", document(1, 1.0, lengths=(64, 256)))
    other = write(tmp_path / "other.jsonl", document(2, 2.0, lengths=(256, 512)))
    result = call("compare", one, other, "--json")
    report = json.loads(result.stdout)
    (change,) = report["changes"]
    assert (change["row"], change["ratio"]) == ("mem len 256, batch 1, tokens 1", 2)
    assert [(row["row"], row["reason"]) for row in report["unmatched"]] == [
        ("mem len 64, batch 1, tokens 1", "only in BEFORE"),
        ("mem len 512, batch 1, tokens 1", "only in AFTER"),
    ]
    assert (
        "decode, small, 2 threads, mem len 64, batch 1, tokens 1: only in BEFORE"
        in call("compare", one, other).stdout
    )


def test_other_machines_and_versions_are_a_warning(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", document(1, 1.0))
    machine = {**MACHINE, "cpu": "B", "threads_wait": "A=1"}
    other = write(
        tmp_path / "other.jsonl", document(2, 1.0, machine=machine, versions={"onnxruntime": "1.32"})
    )
    lines = call("compare", one, other).stdout.splitlines()
    assert lines[0].startswith("warning: the machines differ (A, 2 CPUs, 16 GiB against B, 2 CPUs, 16 GiB)")
    assert lines[1].startswith("warning: PyTorch's threads waited in different ways in decode, small")
    assert lines[2] == "warning: the versions of onnxruntime differ in decode, small"


BAD = ["{}", "x", "[1]"]


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_file_that_holds_no_results_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(line + "\n")
    result = call("compare", path, path)
    assert result.exit_code == 2
    assert "line 1 of" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("which", ["20", "nowhere.jsonl"])
def test_what_names_no_result_is_refused(which: str, tmp_path: Path) -> None:
    write(tmp_path / "decode.jsonl", document(1, 1.0))
    result = call("compare", which, "2026-11-01", "--history", tmp_path)
    assert result.exit_code == 2
    assert "is neither a file nor a commit or date with results" in result.stderr


def test_the_history_of_this_repository_can_be_read() -> None:
    history = Path(__file__).parent.parent.parent / "benchmarks" / "history"
    assert find_results("2026-11-21", history)
    for path in history.glob("*.jsonl"):
        assert {result["case"] for result in find_results(str(path), history)} == {path.stem}
