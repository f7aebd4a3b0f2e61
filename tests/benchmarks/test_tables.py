"""The tables of the documents come from the history, and only from runs that may be published."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import documents
from benchmarks.documents import table
from benchmarks.pictures import PICTURES
from benchmarks.plot import LIGHT
from benchmarks.runs import History, Run, sources
from runtimes.base.errors import ArtefactError
from tests.benchmarks.shown import call
from xl_export.figures.canvas import new_figure

ROOT = Path(__file__).parent.parent.parent
PUBLISHED = History.load(ROOT / "benchmarks" / "history")


def document(**changes: Any) -> dict[str, Any]:
    timing = {"median": 6.0, "fastest": 5.0, "slowest": 13.0, "repeats": 1000}
    row = {"side": "fixed memory", "mem_len": 1600, "token": timing, "p99": 7.0}
    rows = [{**row, "medians": [6.0, 6.1]}, {**row, "side": "growing cache", "medians": [11.0, 14.0]}]
    return {
        "case": "latency",
        "time": "2026-11-01T10:00:00+00:00",
        "config": "enwik8-base",
        "threads": 2,
        "rows": rows,
        "machine": {"cpu": "A", "cpus": 2, "system": "Linux", "memory_bytes": 1 << 34, "busy_cpus": 0.0},
        "versions": {"onnxruntime": "1.31.1"},
        "limits": {"read_bytes": 1e9, "multiply_adds": 1e9},
        "commit": "0123456789abcdef+",
        **changes,
    }


def history(*documents: dict[str, Any]) -> History:
    return History(tuple(Run(d) for d in documents))


def checkout(folder: Path, text: str, *documents: dict[str, Any]) -> Path:
    (folder / "docs").mkdir()
    (folder / "benchmarks" / "history").mkdir(parents=True)
    (folder / "README.md").write_text(text, encoding="utf-8")
    lines = "".join(json.dumps(d) + "\n" for d in documents)
    (folder / "benchmarks" / "history" / "latency.jsonl").write_text(lines, encoding="utf-8")
    return folder


def test_the_documents_of_this_checkout_show_what_the_history_says() -> None:
    assert documents.update(ROOT, PUBLISHED, write=False) == []


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_drawn_from_the_history(name: str) -> None:
    height, draw = PICTURES[name]
    figure = new_figure(8, height)
    draw(figure, PUBLISHED, LIGHT)
    assert figure.get_suptitle()
    assert all(axes.has_data() for axes in figure.axes)
    for suffix in ("", "-dark"):
        assert (ROOT / "docs" / "images" / f"{name}{suffix}.svg").is_file()


def test_tables_are_written_then_agree_then_differ_by_one_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "# Title\n<!-- table: latency -->\n| an earlier table |\n<!-- end of table -->\n"
        "| <!-- figure: token-fixed-memory --><!-- end of figure --> |\n"
        "```\n<!-- table: nothing -->\n```\nand `<!-- figure: nothing -->`\n"
    )
    folder = checkout(tmp_path, text, document())
    monkeypatch.setattr("benchmarks.__main__.ROOT", folder)
    assert call("tables", "--check").exit_code == 1
    result = call("tables")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "written: README.md: latency",
        "written: README.md: token-fixed-memory",
    ]
    written = (folder / "README.md").read_text(encoding="utf-8")
    assert "| <!-- figure: token-fixed-memory -->6.00 ms<!-- end of figure --> |" in written
    assert "fixed memory | 6.00 | 7.00" in written
    assert "earlier" not in written
    assert written.endswith("```\n<!-- table: nothing -->\n```\nand `<!-- figure: nothing -->`\n")
    assert call("tables", "--check").exit_code == 0
    (folder / "README.md").write_text(written.replace("| 7.00", "| 6.40"), encoding="utf-8")
    result = call("tables", "--check")
    assert result.exit_code == 1
    assert result.stdout == "differs from the history: README.md: latency\n"


@pytest.mark.parametrize(
    ("page", "known"),
    [
        ("<!-- table: nothing -->\n<!-- end of table -->\n", "headline"),
        ("<!-- figure: nothing -->6<!-- end of figure -->\n", "token-fixed-memory"),
    ],
)
def test_an_unknown_name_changes_no_document(
    page: str, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = "<!-- table: latency -->\n<!-- end of table -->\n"
    folder = checkout(tmp_path, good, document())
    (folder / "docs" / "page.md").write_text(page, encoding="utf-8")
    monkeypatch.setattr("benchmarks.__main__.ROOT", folder)
    result = call("tables")
    assert result.exit_code == 2
    assert f"names nothing; expected one of {known}" in result.stderr
    assert (folder / "README.md").read_text(encoding="utf-8") == good


def busy(facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "machine": {**facts["machine"], "busy_cpus": 0.5}}


def test_the_newest_run_of_an_idle_machine_is_shown() -> None:
    newer, newest = "2026-11-02T10:00:00+00:00", "2026-11-03T10:00:00+00:00"
    expected = document(time=newer)
    others = [
        document(),
        expected,
        busy(document(time=newest)),
        document(time=newest, threads=1),
        document(time=newest, config="small"),
        document(time=newest, case="decode"),
        document(time=newest, rows=[]),
    ]
    assert history(*others).newest("latency", "enwik8-base").document == expected


def test_a_row_that_names_no_operators_is_standard() -> None:
    runs = []
    for at, field in enumerate(({}, {"operators": "fused"}), start=1):
        facts = copy.deepcopy(document(time=f"2026-11-0{at}T10:00:00+00:00"))
        facts["rows"][0] |= field
        runs.append(facts)
    assert history(*runs).newest("latency", "enwik8-base", operators="standard").document == runs[0]
    assert history(*runs).newest("latency", "enwik8-base", operators="fused").document == runs[1]


def test_a_table_without_a_suitable_run_says_what_to_measure() -> None:
    with pytest.raises(ArtefactError, match="run decode --config enwik8-base"):
        history(document()).newest("decode", "enwik8-base")
    with pytest.raises(ArtefactError, match="no run of latency"):
        history(document()).newest("latency", "enwik8-base", rows=("mem_len", (1600, 3800)))


def test_a_claim_that_is_missed_is_marked() -> None:
    facts = document()
    assert "Holds: the slowest took 2.17 times the median" in "\n".join(table("latency", history(facts)))
    facts["rows"][0]["token"] = facts["rows"][0]["token"] | {"slowest": 30.0}
    assert "**MISSED**: the slowest took 5.00 times" in "\n".join(table("latency", history(facts)))


def test_runs_of_two_machines_are_both_described() -> None:
    other = document(machine={**document()["machine"], "cpu": "B"})
    text = sources(Run(document()), Run(other))
    assert "Machine: A, 2 CPUs, 2 threads, ONNX Runtime 1.31.1; B, 2 CPUs" in text
    assert sources(Run(document()), Run(document())).count("Machine:") == 1
    assert "with uncommitted changes" in text
