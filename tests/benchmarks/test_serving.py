"""The case `serve`: its parts against a real server of a tiny model, and its table."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.cases.serving import serve
from benchmarks.cases.serving.serve import Bench, Row, window
from benchmarks.cases.serving.server import Served, serving
from benchmarks.configs import CONFIGS, BenchmarkConfig
from benchmarks.documents import NOTHING, table
from benchmarks.measure import Timing
from benchmarks.runs import History
from runtimes.base.errors import ArtefactError
from runtimes.contract.session import Session
from tests.benchmarks.shown import a_run, call, in_documents, on_terminal
from xl_export.serve.http.base import server as opening

SIZES: dict[str, Any] = {
    "STREAMS": (1, 2),
    "TOGETHER": 2,
    "PROMPT": 24,
    "ARRIVING": 2,
    "LISTENING": 2,
    "CLIENTS": 2,
    "STORED": 10,
    "WARM": 3,
    "ATTACKED": 1.0,
}
OPERATIONS = {
    *("streams created", "appends", "continuations", "clients that left", "forks", "rewinds"),
    *("completions", "scores"),
}


class Recorder:
    """A session that notes where its streams are, and computes nothing."""

    def __init__(self) -> None:
        self.vocab, self.fed = SimpleNamespace(size=5), list[tuple[list[int], list[int]]]()

    def start(self, rows: int) -> SimpleNamespace:
        return SimpleNamespace(positions=np.zeros(rows, np.int64), tensors={"key": np.ones(2)})

    def predict(self, tokens: np.ndarray, memory: SimpleNamespace) -> None:
        self.fed.append((memory.positions.tolist(), tokens[:, 0].tolist()))
        memory.positions += tokens.shape[1]


def bench_of(config: BenchmarkConfig) -> Bench:
    """A run of the case that needs no artefact."""
    facts: dict[str, Any] = {"threads": 1, "given_threads": 1, "folder": Path(), "artefact": Path()}
    return Bench(config=config, default_threads=1, **facts)


def test_the_loop_is_where_the_streams_of_the_server_are(tiny: BenchmarkConfig) -> None:
    """With as much memory behind them, or its tokens would cost less than theirs."""
    bench = bench_of(tiny)
    session = Recorder()
    bench.baseline_loop(cast(Session, session), 2)
    first, last = tiny.segment + serve.WARM, tiny.segment + bench.long
    assert [at for at, _ in session.fed[-(last - first) :]] == [[at, at] for at in range(first, last)]
    assert min(at for positions, _ in session.fed for at in positions) >= 0


@pytest.fixture
def one_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All parts ask one server, which is started by the first of them; an attack needs one of its own."""
    with contextlib.ExitStack() as stack:
        found: list[Served] = []

        @contextlib.contextmanager
        def shared(artefact: Path, *, threads: int, options: Any = ()) -> Iterator[Served]:
            if "--api-keys" in options:
                with serving(artefact, threads=threads, options=options) as served:
                    yield served
                return
            if not found:
                folder = ("--state", artefact.parent / "state", "--cache", 0)
                found.append(stack.enter_context(serving(artefact, threads=threads, options=folder)))
            yield found[0]

        monkeypatch.setattr(serve, "serving", shared)
        for name, value in SIZES.items():
            monkeypatch.setattr(serve, name, value)
        kind = "500,000 ids"
        monkeypatch.setattr(serve, "ATTACKS", {kind: serve.ATTACKS[kind]})
        yield


@pytest.mark.slow  # it starts a server for each part
def test_every_part_measures_a_server_whose_tokens_are_right(
    tiny: BenchmarkConfig, tmp_path: Path, one_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a client that is late reads many tokens at once, so the streams have to be long.
    monkeypatch.setitem(CONFIGS, "tiny", replace(tiny, token_repeats=60))
    history = tmp_path / "history.jsonl"
    options = ["--config", "tiny", "--threads", "1", "--repeats", "1", "--tokens", "1000"]
    options += ["--minutes", "0.01"]
    only = [word for part in serve.PARTS if part != "others" for word in ("--only", part)]
    result = call("run", "serve", *options, *only, "--history", history)
    assert result.exit_code == 0, result.output
    document = json.loads(history.read_text())
    rows = {(row["part"], row["side"], row["streams"]): row for row in document["rows"]}
    assert [row["most"] for row in rows.values() if row["side"] == "whole"] == [80.0, None]
    assert {part for part, _, _ in rows} == set(serve.PARTS) - {"others"}
    for row in rows.values():
        assert row["figure"]["repeats"] > 0
        assert row["figure"]["fastest"] <= row["figure"]["median"] <= row["figure"]["slowest"]
    ratio = rows["throughput", "server over baseline loop, 1 thread", 2]
    assert ratio["figure"]["median"] > 0
    assert ratio["least"] is None  # the mark is for another size
    # The baseline server has given the same tokens, or nothing would have been measured.
    assert rows["throughput", "baseline server over baseline loop, 1 thread", 2]["figure"]["median"] > 0
    assert ("overhead", "baseline server", 1) in rows
    assert rows["between", "prompts of 24 arrive, p99", 2]["figure"]["repeats"] > 0
    assert rows["between", "first token after 24 tokens", 1]["most"] > 0
    late = rows["long", "token 1,000 over token 250", 1]
    assert (late["most"], late["figure"]["repeats"]) == (1.05, serve.TURNS)
    note = rows["resident", "end over first tenth of 0.01 minutes", SIZES["STORED"]]["note"]
    done = {name: int(count) for count, name in re.findall(r"(\d+) ([a-z ]+)", note)}
    assert set(done) == OPERATIONS
    # However short the time is, each client does each of them once.
    assert min(done.values()) >= SIZES["CLIENTS"]
    assert rows["stall", "500,000 ids: /health, longest", 8]["most"] == 50.0


def test_other_tokens_than_those_of_generate_are_not_measured(
    tiny: BenchmarkConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def load(self, do: str, **job: Any) -> dict[str, Any]:
            return {"texts": [[" 1", " 3"]], "window": {}}

    with pytest.raises(ArtefactError, match="stream 0 has other tokens through the server"):
        window(Wrong(), bench_of(tiny), [[0]], [["1", "2"]])


def test_the_table_shows_targets() -> None:
    rows = [
        Row(part="overhead", side="whole", streams=16, unit="µs", figure=Timing.of([12.0, 14.0]), most=15.0),
        Row(part="overhead", side="whole", streams=1, unit="µs", figure=Timing.of([81.0]), most=80.0),
        Row(
            part="throughput",
            side="ratio",
            streams=8,
            unit="ratio",
            figure=Timing.of([0.98]),
            least=0.97,
            threads=2,
            note="n",
        ),
    ]
    written = in_documents("serve", rows, config="small")
    assert "| overhead | small | whole | 16 | 13.0 | µs | at most 15.0: holds |" in written
    assert "| overhead | small | whole | 1 | 81.0 | µs | at most 80.0: **MISSED** |" in written
    assert written[-1].count("python -m benchmarks run serve") == 1
    shown = on_terminal("serve", rows)
    assert any("**MISSED**" in line for line in shown)
    assert any(line.endswith("n; 2 threads") for line in shown)
    history = History((a_run("serve", rows, config="small"),))
    assert table("serve", history)[2:5] == written[2:5]  # those with a target
    assert table("serve", History(())) == [NOTHING]


def test_the_default_threads_are_those_of_the_server(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "available_cpus", lambda: 5)
    for short, expected in ((True, 4), (False, 5)):
        monkeypatch.setattr(opening, "has_short_steps", lambda session, short=short: short)
        assert serve._default_threads(artefacts["ring"]) == expected
