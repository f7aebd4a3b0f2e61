"""The tables and numbers of the documents come from the history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cases import DRAWN, load_case
from benchmarks.harness import cells
from benchmarks.history import newest, read_results, source
from benchmarks.measure import timing
from benchmarks.plots import draw
from benchmarks.tables import fill, table, update
from tests.benchmarks.conftest import a_result, call

ROOT = Path(__file__).parents[2]
HISTORY = read_results(ROOT / "benchmarks" / "history.jsonl")
ROW = {"side": "artefact", "open_ms": timing([6.0]), "resident_bytes": 7_000_000}
RESULT = a_result("load", [ROW, {**ROW, "side": "run in PyTorch", "open_ms": timing([1234.5])}])


def test_the_documents_of_this_checkout_show_what_the_history_says() -> None:
    assert update(ROOT, HISTORY, write=False) == []


@pytest.mark.parametrize("name", DRAWN)
def test_a_result_of_the_history_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ((_, document), *_) = newest(HISTORY, name, {"busy": ["yes"]})
    draw(tmp_path / "plot.svg", load_case(name), document)
    assert f"D {document['model']['d_model']}" in (tmp_path / "plot.svg").read_text()


def test_tables_are_written_then_agree_then_differ_by_one_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, history = tmp_path / "README.md", tmp_path / "benchmarks" / "history.jsonl"
    page.write_text(
        "# Title\n<!-- table: load config=tiny -->\n| an earlier table |\n<!-- end of table -->\n"
        "| <!-- number: load config=tiny side=artefact 'opening, ms' --><!-- end of number --> |\n"
        "```\n<!-- table: nothing -->\n<!-- end of table -->\n```\nand `<!-- number: nothing -->`\n",
        encoding="utf-8",
    )
    (tmp_path / "docs").mkdir()
    history.parent.mkdir()
    history.write_text(json.dumps(RESULT) + "\n", encoding="utf-8")
    monkeypatch.setattr("benchmarks.__main__.ROOT", tmp_path)
    assert call("tables", "--check").exit_code == 1
    result = call("tables")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2
    written = page.read_text(encoding="utf-8")
    assert "'opening, ms' -->6.00<!-- end of number --> |" in written
    assert "| artefact | 6.00 | 7.00 |" in written
    assert "| run in PyTorch | 1,234 | 7.00 |" in written
    assert (
        "Measured by `python -m benchmarks run load` on 2026-11-01 at commit `0123456789ab` with" in written
    )
    assert "earlier" not in written
    assert written.endswith(
        "```\n<!-- table: nothing -->\n<!-- end of table -->\n```\nand `<!-- number: nothing -->`\n"
    )
    assert call("tables", "--check").exit_code == 0
    page.write_text(written.replace("| 7.00", "| 6.40"), encoding="utf-8")
    result = call("tables", "--check")
    assert result.exit_code == 1
    assert result.stdout == "differs from the history: README.md: load config=tiny\n"
    (tmp_path / "docs" / "page.md").write_text("<!-- number: nothing A -->6<!-- end of number -->\n")
    result = call("tables")
    assert result.exit_code == 2
    assert "a page names the case 'nothing'; expected one of steps" in result.stderr
    assert "6.40" in page.read_text(encoding="utf-8")


def test_a_table_chooses_columns_and_puts_values_across() -> None:
    chosen = table("load config=tiny 'columns=side;opening, ms'", [RESULT])
    assert chosen[:4] == [
        "| side | opening, ms |",
        "|---|---|",
        "| artefact | 6.00 |",
        "| run in PyTorch | 1,234 |",
    ]
    across = table(
        "load config=tiny 'columns=side;opening, ms;resident MB' 'across=side;opening, ms'", [RESULT]
    )
    assert across[0] == "| resident MB | artefact | run in PyTorch |"
    assert across[2] == "| 7.00 | 6.00 | 1,234 |"
    text, _ = fill("<!-- number: load config=tiny 'opening, ms' --><!-- end of number -->", [RESULT])
    assert "-->6.00 and 1,234<!--" in text


def test_an_empty_column_is_left_out() -> None:
    titles, _ = cells(load_case("load").COLUMNS, [(ROW, RESULT)])
    assert titles == ["side", "opening, ms", "resident MB"]


def test_results_of_two_machines_are_both_described() -> None:
    other = {**RESULT, "machine": {**RESULT["machine"], "cpu": "B"}}
    text = source([RESULT, other])
    assert "Machine: A, 2 CPUs, 2 threads, ONNX Runtime 1.31.1; B, 2 CPUs" in text
    assert source([RESULT, RESULT]).count("Machine:") == 1
