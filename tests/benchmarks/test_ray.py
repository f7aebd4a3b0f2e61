"""The case `ray`: one process, one actor and two, compared before they are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.serving import ray as case
from benchmarks.configs import BenchmarkConfig
from runtimes import open_session, score_texts
from tests.benchmarks.shown import call, in_documents
from xl_export.offline import cluster
from xl_export.offline.cluster import Unit


def test_an_actor_s_work_is_that_of_one_process(
    artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of actors, done here one block after the other: it needs no Ray."""

    def here(numbered: Any, work: Any, settings: dict[str, Any], **_: Any) -> Any:
        actor = work(**settings)
        for number, block in numbered:
            yield Unit(number=number, content=actor(block), began=0.0, ended=1.0)

    monkeypatch.setattr(cluster, "finished_units", here)
    texts = [[1 + at, 2, 3, 4 + at % 5] for at in range(50)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    found, _, rate = case._actors(artefacts["ring"], corpus, 2)
    expected = list(score_texts(open_session(artefacts["ring"]), texts))
    assert found == pytest.approx([score.log_prob for score in expected], abs=1e-6)
    assert rate == sum(score.tokens for score in expected)  # the blocks took one second


def test_the_table_has_a_line_for_each_side() -> None:
    common = {"seconds": 2.0, "tokens": 1000, "cores": 2, "ray": "2.60.0"}
    rows = [
        case.Row(actors=actors, rate=rate, ratio=rate / 100, **common)  # type: ignore[arg-type]
        for actors, rate in ((0, 120.0), (1, 100.0), (2, 170.0))
    ]
    lines = in_documents("ray", rows)
    assert "| one process, without Ray | 120 | 1.20 | 2.00 |" in lines
    assert "| 2 actors | 170 | 1.70 | 2.00 |" in lines
    assert any("1,000 tokens, Ray 2.60.0" in line for line in lines)
    assert any("Two actors reach at most twice" in line for line in lines)


@pytest.mark.slow  # Ray takes half a minute to start
@pytest.mark.filterwarnings("ignore")  # it warns of its own habits
def test_actors_are_compared_with_one_process_first(
    tiny: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="ray is not installed; pip install '.[ray]'")
    history = tmp_path / "history.jsonl"
    command = ("run", "ray", "--config", "tiny", "--repeats", 1, "--history", history)
    measured = call(*command)
    assert measured.exit_code == 0, measured.output
    (document,) = map(json.loads, history.read_text().splitlines())
    assert [row["actors"] for row in document["rows"]] == [0, 1, 2]
    assert all(row["rate"] > 0 for row in document["rows"])
    really = case._actors

    def wrong(*arguments: Any) -> Any:
        found, seconds, rate = really(*arguments)
        return [found[0] + 1e-3, *found[1:]], seconds, rate

    monkeypatch.setattr(case, "_actors", wrong)
    refused = call(*command)
    assert refused.exit_code == 2
    assert "differ from one process by 0.001 nats a text" in refused.output
    assert len(history.read_text().splitlines()) == 1
