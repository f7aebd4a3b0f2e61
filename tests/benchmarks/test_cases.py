"""Every case: listed, measured at a tiny size, checked before it is timed, and kept as the list says."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import checked_sessions
from benchmarks.cases import (
    CASES,
    ENTRIES,
    PACKAGES,
    busy,
    growing_cache,
    latency,
    memory_forms,
    overhead,
    policy,
    precision,
    score,
    sliding_window,
    training,
)
from benchmarks.cases.learning import architectures
from benchmarks.cases.on_gpu import gpu
from benchmarks.cases.serving.serve import PACKAGES as SERVER_PACKAGES
from benchmarks.configs import CONFIGS, BenchmarkConfig
from benchmarks.measure import Timing
from benchmarks.models import random_weights
from runtimes.base.errors import ArtefactError
from runtimes.sessions.ort_gpu.driver import DriverFacts
from runtimes.tasks.check import CheckReport
from tests.benchmarks.shown import call, rows_of
from xl_export.graph import step

ROOT = Path(__file__).parents[2]
# The fused operator, unless there is no compiler here to build it with.
FUSED = ("--operators", "fused") if shutil.which("g++") else ()


def measured(tmp_path: Path, *arguments: object) -> list[dict[str, Any]]:
    """The documents that a run of cases appended, one for each."""
    history = tmp_path / "history.jsonl"
    result = call("run", *arguments, "--config", "tiny", "--threads", 1, "--history", history)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in history.read_text().splitlines()]


def test_list_has_a_line_for_every_case() -> None:
    lines = call("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(CASES)
    assert all(len(line.split()) > 4 for line in lines)


# Packages that most installations lack, and those that the cases are declared with.
ABSENT = (*SERVER_PACKAGES, "matplotlib", "ray", "tensorrt", "tensorrt_rtx", "tokenizers", "triton")
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
from benchmarks.__main__ import main
from benchmarks.cases import CASES
if sys.argv[2] == "open":
    list(CASES.values())
else:
    main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (ABSENT, ("open",)),
        ((*ABSENT, *PACKAGES), ("list",)),
        ((*ABSENT, *PACKAGES), ("run", "--help")),
    ],
)
def test_cases_are_listed_without_the_packages_that_they_measure(
    absent: tuple[str, ...], words: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", WITHOUT, ",".join(absent), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert words == ("open",) or all(name in ended.stdout for name in ENTRIES)


@pytest.mark.parametrize("name", CASES)
def test_every_case_declares_fields_that_exist(name: str) -> None:
    case = CASES[name]
    row = import_module(case.run.__module__).Row
    assert (case.name, case.draw is not None) == (name, ENTRIES[name].draws)
    assert set(case.keys) <= set(row.__dataclass_fields__)


def test_steps_are_measured_drawn_and_written_as_csv(tiny: BenchmarkConfig, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "rows.csv", tmp_path / "decode.png"
    documents = [measured(tmp_path, "decode", "--plot", picture, *FUSED)[-1]]
    documents += [measured(tmp_path, "segment")[-1], measured(tmp_path, "batch", "--csv", table)[-1]]
    shapes = [
        [(row["mem_len"], row["batch"], row["tokens"]) for row in document["rows"]] for document in documents
    ]
    assert shapes == [[(8, 1, 1), (20, 1, 1)], [(12, 1, 8)], [(12, 1, 1), (12, 3, 1)]]
    operators = [document["rows"][0]["operators"] for document in documents]
    assert operators == ["fused" if FUSED else "standard", "standard", "standard"]
    for row in [row for document in documents for row in document["rows"]]:
        assert row["ratio"] == pytest.approx(row["pytorch"]["median"] / row["onnxruntime"]["median"])
        assert row["multiply_adds"] > 0
    one, three = documents[2]["rows"]
    stream = 4 * 2 * 2 * 2 * 4 * 13  # fp32, layers, keys and values, A = 2 heads x 4, M + 1
    assert three["num_bytes"] - one["num_bytes"] == 2 * stream
    assert three["multiply_adds"] == 3 * one["multiply_adds"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    with open(table, newline="") as lines:
        written = list(csv.DictReader(lines))
    assert [line["case"] for line in written] == ["batch", "batch"]
    assert float(written[0]["onnxruntime.median"]) == one["onnxruntime"]["median"]


def test_sliding_window_compares_equal_sides(tiny: BenchmarkConfig, tmp_path: Path) -> None:
    (document,) = measured(tmp_path, "sliding-window", "--attention-lengths", "20,8")
    assert [row["attention_length"] for row in document["rows"]] == [8, 20]
    for row in document["rows"]:
        assert row["window"]["repeats"] == row["segment"]["repeats"] == tiny.repeats
        assert row["ratio"] == pytest.approx(row["window"]["median"] / row["segment"]["median"])
        assert row["table_9"] is None
    document = measured(tmp_path, "sliding-window", "--attention-lengths", "8", *FUSED)[1]
    assert {row["operators"] for row in document["rows"]} == {"fused" if FUSED else "standard"}


def test_forms_of_memory_are_measured_beside_the_ring(tiny: BenchmarkConfig, tmp_path: Path) -> None:
    (document,) = measured(tmp_path, "memory-forms", *FUSED)
    rows = document["rows"]
    assert [row["form"] for row in rows] == ["ring", "shift", "hidden"]
    assert [row["operators"] for row in rows] == ["fused" if FUSED else "standard", "standard", "standard"]
    assert rows[0]["ring_ratio"] == 1
    assert all(row["token"]["repeats"] == tiny.token_repeats for row in rows)


def test_precision_measures_the_quality_of_a_trained_run(
    make_run: Callable[..., Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = precision.PRECISIONS
    monkeypatch.setattr(precision, "PRECISIONS", (pairs[0], ("int8", "fp32"), pairs[-1]))
    run, history = make_run(), tmp_path / "history.jsonl"
    (run / "test.txt").write_text(text[:200], encoding="utf-8")
    result = call("run", "precision", "--run", run, "--threads", 1, "--repeats", 3, "--history", history)
    assert result.exit_code == 0, result.output
    document = json.loads(history.read_text())
    assert document["config"] == run.name
    rows = document["rows"]
    assert [row["measured"] is None for row in rows] == [True, False, False]
    assert rows[1]["measured"]["tokens"] == 199
    assert rows[1]["mem_len"] == 16
    assert f"{rows[1]['measured']['bits_per_token']:.4f}" in result.output
    assert result.stdout.count("too few tokens to judge") == 2
    assert "BEYOND" not in result.stdout


def test_score_predicts_the_same_tokens_on_each_side(tiny: BenchmarkConfig, tmp_path: Path) -> None:
    (document,) = measured(tmp_path, "score")
    stream, texts, alone = document["rows"]
    assert [row["side"] for row in (stream, texts, alone)] == ["one stream", "texts", "one by one"]
    assert stream["tokens"] == texts["tokens"] == sum(map(len, score.draw_texts(40, 256)))
    assert (stream["ratio"], texts["texts"], alone["texts"]) == (1, 40, 10)
    assert 0 < alone["tokens"] < texts["tokens"]
    assert texts["ratio"] == pytest.approx(texts["token"]["median"] / stream["token"]["median"])


def test_overhead_is_measured_for_each_precision(
    tiny: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "PRECISIONS", ("fp32", "int4"))
    (document,) = measured(tmp_path, "overhead", "--repeats", 3)
    assert [row["precision"] for row in document["rows"]] == ["fp32", "int4"]
    assert {row[side]["repeats"] for row in document["rows"] for side in ("onnxruntime", "generate")} == {3}


@pytest.mark.slow
def test_rtx_engines_compute_nothing_twice(tiny: BenchmarkConfig, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")
    sides = ("ring-fp16-operators", "ring-fp16-node")
    (document,) = measured(tmp_path, "rtx-build", *(word for side in sides for word in ("--only", side)))
    assert [row["layers"]["KV_CACHE_UPDATE"] for row in document["rows"]] == [2 * tiny.model.layers] * 2
    assert [row["repeated"] for row in document["rows"]] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("cpp", [[], ["artefact, C++"]], ids=len)
def test_a_policy_is_timed_at_a_fixed_rate_on_every_side(
    cpp: list[str], tiny: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "WARM", 2)
    small = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, layers=1))  # quick to trace
    monkeypatch.setitem(CONFIGS, "tiny", small)
    monkeypatch.setattr(policy, "has_cpp", lambda: bool(cpp))  # to compile takes seconds
    (document,) = measured(tmp_path, "policy", "--repeats", 5)
    rows = {row["side"]: row for row in document["rows"]}
    assert list(rows) == ["artefact, Python", *cpp, "PyTorch", "PyTorch, growing window"]
    for row in rows.values():
        assert row["steps"] == row["step"]["repeats"] == 5
        assert 0 < row["step"]["median"] <= row["p99"] <= row["step"]["slowest"]


def test_a_wrong_policy_is_not_timed(tiny: BenchmarkConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    right = policy.Policy(tiny.model, tiny.mem_len).eval()
    monkeypatch.setattr(policy, "_artefact_step", lambda artefact: policy._pytorch_step(right))
    policy._compare(right, Path(), tiny.mem_len)
    monkeypatch.setattr(policy, "_growing_step", lambda *_: lambda observation: np.ones(4, np.float32))
    with pytest.raises(ArtefactError, match="growing window differs from PyTorch"):
        policy._compare(right, Path(), tiny.mem_len)


def test_the_default_threads_are_compared_on_a_busy_machine(
    tiny: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy, "OTHERS", (0, 1))
    (document,) = measured(tmp_path, "busy", "--repeats", 3)
    sides = [(row["others"], row["side"], row["repeats"]) for row in document["rows"]]
    assert sides == [(n, side, 3) for n in (0, 1) for side in ("default", "one thread", "all threads")]
    monkeypatch.setattr(busy, "fed", lambda session, tokens: (np.full(23, session), None))
    with pytest.raises(ArtefactError, match="the side with one thread differs from the default by 1 nats"):
        busy.compare({"default": 0.0, "one thread": 1.0})  # type: ignore[dict-item]


def test_latency_has_percentiles_of_consecutive_tokens_on_both_sides(
    tiny: BenchmarkConfig, tmp_path: Path
) -> None:
    (document,) = measured(tmp_path, "latency")
    assert [row["side"] for row in document["rows"]] == ["fixed memory", "growing cache"]
    for row in document["rows"]:
        assert row["token"]["repeats"] == tiny.consecutive
        assert row["token"]["fastest"] <= row["token"]["median"] <= row["p99"] <= row["token"]["slowest"]


def test_the_growing_cache_equals_pytorch_at_every_length(tiny: BenchmarkConfig, tmp_path: Path) -> None:
    weights, tokens = random_weights(tiny.model), np.random.default_rng(0).integers(0, 256, 40)
    cache = latency.Growing(tmp_path / "growing", weights, tiny.model, 40, threads=1)
    answers = np.stack([cache.next_logits(int(token)) for token in tokens])
    truth = latency.pytorch_logits(weights, tiny.model, tokens)
    assert latency.compared(answers, truth) < 2e-5
    with pytest.raises(ArtefactError, match="the growing cache differs from PyTorch"):
        latency.compared(answers, np.roll(truth, 1, axis=0))


def test_load_measures_both_sides(tiny: BenchmarkConfig, tmp_path: Path) -> None:
    (opened,) = measured(tmp_path, "load", "--repeats", 1)
    assert [row["side"] for row in opened["rows"]] == ["artefact", "run in PyTorch"]
    for row in opened["rows"]:
        assert row["open"]["median"] > 0
        assert row["resident_bytes"] > row["needed_bytes"]


def test_training_steps_are_timed_with_memory_and_without(
    tiny: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_a_second(sides: dict[str, Any], **options: Any) -> dict[str, Timing]:
        for train_once in sides.values():
            train_once()
        return {name: Timing(median=1e3, fastest=1e3, slowest=1e3, repeats=1) for name in sides}

    monkeypatch.setattr(training, "take_turns", in_a_second)
    (document,) = measured(tmp_path, "training")
    assert [row["mem_len"] for row in document["rows"] if row["side"] is None] == [8, 0]
    assert [row["side"] for row in document["rows"][2:]] == ["bf16", "spans", "whole spans"]
    # Every step takes a second here. One of spans computes four times as many tokens.
    assert [row["token"]["median"] for row in document["rows"]] == [1e3 / (2 * T) for T in (8, 8, 8, 32, 32)]
    assert [row["ratio"] for row in document["rows"]] == [1, 1, 1, 0.25, 0.25]


def test_without_a_gpu_its_case_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ask_driver", lambda: DriverFacts(fault="no NVIDIA driver is installed"))
    result = call("run", "gpu", "--history", tmp_path / "history.jsonl")
    assert result.exit_code == 0, result.output
    assert result.stdout == "gpu is skipped: no NVIDIA driver is installed\n"
    assert not (tmp_path / "history.jsonl").exists()


def test_growing_cache_starts_equal_and_then_holds_more(tiny: BenchmarkConfig, tmp_path: Path) -> None:
    (document,) = measured(tmp_path, "growing-cache")
    rows = {row["position"]: row for row in document["rows"]}
    assert list(rows) == list(tiny.growing_positions)
    assert all(row["growing"]["median"] > 0 for row in rows.values())
    assert len({row["fixed_bytes"] for row in rows.values()}) == 1
    per_token = 4 * 2 * 2 * 2 * 4  # fp32, keys and values, layers, heads, K
    assert [row["growing_bytes"] for row in rows.values()] == [per_token * at for at in rows]


REPORT = CheckReport(
    passed=False,
    max_difference=1.0,
    tolerance=1e-4,
    mean_difference=1.0,
    mean_tolerance=1e-4,
    tokens=9,
    seconds=0.0,
    against="PyTorch",
    computed_by="the fused operator",
)


def shifted_table(module: Any) -> Callable[..., np.ndarray]:
    right = module.position_table
    return lambda *which: np.roll(right(*which), 1, axis=2)


RIGHT_SCORES = score.score_texts
# The case, what is put in the place of which function of a module, and the refusal.
WRONG: dict[str, tuple[str, dict[tuple[Any, str], Any], str]] = {
    "artefact": ("decode", {(step, "position_table"): shifted_table(step)}, "differs from PyTorch"),
    "fused operator": (
        "decode",
        {(checked_sessions, "check"): lambda artefact, *, threads, device: {"cpu": REPORT}[device]},
        "the fused operator failed its check",
    ),
    "growing graph": (
        "latency",
        {(latency, "position_table"): shifted_table(latency)},
        "the growing cache differs from PyTorch",
    ),
    "growing cache": (
        "growing-cache",
        {(growing_cache, "nats_apart"): lambda one, other: 0.5},
        r"differs from the side with fixed memory by 0\.5 nats",
    ),
    "window": (
        "sliding-window",
        {(sliding_window, "naive_next_logits"): lambda w, model, t: np.arange(model.vocab_size) / 1},
        "window of 8 tokens differs from the naive model",
    ),
    "form": (
        "memory-forms",
        {
            (memory_forms, "random_artefact"): lambda job, form: form,
            (memory_forms, "open_checked"): lambda form, **_: form,
            (memory_forms, "fed"): lambda form, _: (np.full(9, float(form != "ring")), None),
        },
        "the shift form differs from the ring",
    ),
    "scores": (
        "score",
        {
            (score, "score_texts"): lambda session, texts, **given: RIGHT_SCORES(
                session, [text[::-1] for text in texts], **given
            )
        },
        "side by side differ from texts scored one by one",
    ),
    "attention of training": (
        "training",
        {
            (architectures, "relative_attention"): lambda *a, **k: (
                architectures.naive_attention(*a, **k) * 1.01
            )
        },
        "fast and naive attention differ",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_side_is_not_timed(
    wrong: str, tiny: BenchmarkConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong == "fused operator" and not FUSED:
        pytest.skip("there is no g++ here to build the fused operator with")
    name, replaced, refusal = WRONG[wrong]
    for (module, function), fault in replaced.items():
        monkeypatch.setattr(module, function, fault)
    module = import_module(CASES[name].run.__module__)
    timer = "in_turns" if name == "latency" else "take_turns"
    monkeypatch.setattr(module, timer, lambda *_, **__: pytest.fail("timed in spite of a wrong answer"))
    options = {"operators": "fused"} if wrong == "fused operator" else {}
    with pytest.raises(ArtefactError, match=refusal):
        rows_of(name, tiny, **options)
