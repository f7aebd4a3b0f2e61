"""Every case: listed, measured at a tiny size, and checked before it is timed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks import checked_sessions
from benchmarks.cases import (
    CASES,
    DRAWN,
    PACKAGES,
    growing_cache,
    load_case,
    mamba,
    overhead,
    policy,
    precision,
    serve,
    sliding_window,
    start,
    steps,
    training,
)
from benchmarks.configs import BenchmarkConfig
from benchmarks.harness import Job
from benchmarks.serving.server import Served
from runtimes.base.errors import ArtefactError
from runtimes.contract.session import Session
from runtimes.sessions.ort_gpu.driver import DriverFacts
from runtimes.tasks.check import CheckReport
from tests.benchmarks.conftest import call
from xl_export.graph import step

ROOT = Path(__file__).parents[2]
HAS_COMPILER = shutil.which("g++") is not None
FUSED = ("--operators", "fused") if HAS_COMPILER else ()
Measure = Callable[..., dict[str, Any]]
Rows = Sequence[dict[str, Any]]


def values(rows: Rows, *names: str) -> list[Any]:
    return [tuple(row[name] for name in names) for row in rows]


def check_steps(rows: Rows, tiny: BenchmarkConfig) -> None:
    assert values(rows, "kind", "form", "mem_len", "streams", "tokens") == [
        ("decode", "ring", 8, 1, 1),
        ("decode", "ring", 20, 1, 1),
        ("segment", "ring", 12, 1, 8),
        ("batch", "ring", 12, 1, 1),
        ("batch", "ring", 12, 3, 1),
        *(("form", form, 12, 1, 1) for form in ("ring", "shift", "hidden")),
    ]
    one, three = rows[3:5]
    stream = 4 * 2 * 2 * 2 * 4 * 13  # fp32, layers, keys and values, A = 2 heads x 4, M + 1
    assert three["step_bytes"] - one["step_bytes"] == 2 * stream
    assert three["multiply_adds"] == 3 * one["multiply_adds"]
    assert {row["operators"] for row in rows if row["form"] != "ring"} == {"standard"}


def check_latency(rows: Rows, tiny: BenchmarkConfig) -> None:
    for row in rows:
        token = row["token_ms"]
        assert (token["repeats"], len(row["turn_medians_ms"])) == (30, 3)
        assert token["fastest"] <= token["median"] <= row["p99_ms"] <= token["slowest"]


def check_growing_cache(rows: Rows, tiny: BenchmarkConfig) -> None:
    per_token = 4 * 2 * 2 * 2 * 4  # fp32, keys and values, layers, heads, K
    assert values(rows, "position", "growing_bytes") == [(at, per_token * at) for at in (0, 5, 40)]
    assert len({row["fixed_bytes"] for row in rows}) == 1


def check_sliding_window(rows: Rows, tiny: BenchmarkConfig) -> None:
    assert values(rows, "attention_length") == [(8,), (20,)]
    assert {row[side]["repeats"] for row in rows for side in ("window_ms", "segment_ms")} == {3}


def check_precision(rows: Rows, tiny: BenchmarkConfig) -> None:
    assert values(rows, "precision", "memory_precision") == [("fp32", "fp32"), ("int8", "int8")]
    assert [row["quality"] is None for row in rows] == [True, False]


def check_overhead(rows: Rows, tiny: BenchmarkConfig) -> None:
    python, busy = ([row for row in rows if row["part"] == part] for part in overhead.PARTS)
    assert values(python, "precision") == [("fp32",), ("int4",)]
    assert values(busy, "other_processes", "side") == [
        (others, side) for others in (0, 1) for side in ("default", "one thread", "all threads")
    ]
    assert {row["token_ms"]["repeats"] for row in busy} == {3}


def check_load(rows: Rows, tiny: BenchmarkConfig) -> None:
    for row in rows:
        assert row["open_ms"]["median"] > 0
        assert row["resident_bytes"] > row["needed_bytes"]


def check_start(rows: Rows, tiny: BenchmarkConfig) -> None:
    assert values(rows[:2], "side") == [("artefact, Python",), ("plain ONNX Runtime",)]
    for row in rows:
        assert 0 < row["resident_bytes"] <= row["peak_bytes"]
        assert 0 < row["model_bytes"] < row["runtime_bytes"]
        assert row["first_ms"]["repeats"] == row["token_cpu_ms"]["repeats"] == 1


def check_policy(rows: Rows, tiny: BenchmarkConfig) -> None:
    assert values(rows[:3], "side") == [(policy.PYTHON,), (policy.PYTORCH,), (policy.GROWING,)]
    # The system refuses the settings below, so that there is nothing but ordinary scheduling.
    networks = ("LSTM", "GRU", "Transformer-XL", "GTrXL")
    expected = [(network, "Python", policy.ORDINARY) for network in networks]
    assert values(rows[3:], "network", "program", "settings") == expected
    for row in rows:
        assert row["steps"] == row["step_ms"]["repeats"] == 5 - row["skipped_ticks"]
        assert 0 < row["step_ms"]["median"] <= row["p99_ms"] <= row["step_ms"]["slowest"]


def check_mamba(rows: Rows, tiny: BenchmarkConfig) -> None:
    ours = [("artefact", "fp32"), ("artefact", "int8"), (mamba.PYTORCH, "fp32")]
    assert values(rows[:3], "side", "precision") == ours
    full, coarse, exact = (row["weight_bytes"] for row in rows[:3])
    assert coarse < exact <= full
    assert len(rows) == (3 if mamba.llama.missing() else 5)
    assert {row["token_ms"]["repeats"] for row in rows} == {2}


def check_training(rows: Rows, tiny: BenchmarkConfig) -> None:
    sides = [("fp32", 8), ("no memory", 0), ("bf16", 8), ("spans", 48), ("whole spans", 48)]
    assert values(rows, "side", "mem_len") == sides
    assert rows[1]["over_no_memory"] == 1


def check_serve(rows: Rows, tiny: BenchmarkConfig) -> None:
    throughput = [("throughput", side) for side in (serve.LOOP, serve.BASELINE, serve.OURS)]
    assert values(rows, "part", "side") == [
        *throughput,
        ("overhead", serve.OURS),
        ("overhead", serve.BASELINE),
    ]
    assert rows[2]["over_loop"]["median"] > 0


Check = Callable[[Rows, BenchmarkConfig], None]
# Options of a tiny run, constants of its module, and what is expected of its rows.
SMALL: dict[str, tuple[tuple[object, ...], dict[str, Any], Check]] = {
    "steps": (FUSED, {"STREAMS": (1, 3)}, check_steps),
    "latency": (("--repeats", 30), {"TURN_TOKENS": 10}, check_latency),
    "growing-cache": (("--lengths", "5,40,0"), {}, check_growing_cache),
    "sliding-window": (("--lengths", "20,8", *FUSED), {}, check_sliding_window),
    "precision": ((), {"PRECISIONS": (("fp32", "fp32"), ("int8", "int8"))}, check_precision),
    "overhead": (("--repeats", 3), {"PRECISIONS": ("fp32", "int4"), "OTHERS": (0, 1)}, check_overhead),
    "load": (("--repeats", 1), {}, check_load),
    "start": (("--repeats", 1), {"TIMED": 5, "has_cpp": lambda: False}, check_start),
    "policy": (
        ("--repeats", 5),
        {
            "WARMUP_STEPS": 2,
            "has_cpp": lambda: False,
            "real_time_settings": lambda: ("--priority", "100"),
        },
        check_policy,
    ),
    "mamba": (("--repeats", 2), {"TURN_TOKENS": 2}, check_mamba),
    "training": (("--repeats", 1), {}, check_training),
    "serve": (
        ("--repeats", 1, "--only", "throughput", "--only", "overhead"),
        {"OVERHEAD_STREAMS": (2,), "THROUGHPUT_STREAMS": (2,), "WARMUP_TOKENS": 3, "WINDOW_SECONDS": 0.2},
        check_serve,
    ),
}
SLOW = ("policy", "mamba", "serve", "training", "steps", "overhead")
NEED_A_COMPILER = ("latency", "growing-cache", "serve")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SMALL]
)
def test_a_case_is_measured(
    name: str, tiny: BenchmarkConfig, measured: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows differ by their keys, its table can be written, and it can be compared and drawn."""
    if name in NEED_A_COMPILER and not HAS_COMPILER:
        pytest.skip("there is no g++ here to build the fused operator with")
    options, constants, check = SMALL[name]
    case = load_case(name)
    if hasattr(case, "unavailable") and (reason := case.unavailable()):
        pytest.skip(reason)
    for constant, value in constants.items():
        monkeypatch.setattr(case, constant, value)
    plot = tmp_path / "plot.svg"
    document = measured(name, *options, *(("--plot", plot) if name in DRAWN else ()))
    assert document["command"].startswith(f"python -m benchmarks run {name} ")
    rows = document["rows"]
    check(rows, tiny)
    assert len({json.dumps([row.get(key) for key in case.KEYS]) for row in rows}) == len(rows)
    history = tmp_path / "history.jsonl"
    compared = json.loads(call("compare", history, history, "--json").stdout)
    assert {change["ratio"] for change in compared["changes"]} == {1.0}
    assert (name in DRAWN) == plot.is_file()


def test_every_case_but_the_gpu_has_a_small_run() -> None:
    assert {*SMALL, "gpu"} == set(CASES)
    assert [name for name in CASES if hasattr(load_case(name), "draw")] == list(DRAWN)


def test_a_trained_run_is_measured_with_its_quality(
    make_run: Callable[..., Path], text: str, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "PRECISIONS", (("fp32", "fp32"), ("int8", "fp32")))
    run = make_run()
    (run / "test.txt").write_text(text[:200], encoding="utf-8")
    document = measured("precision", "--config", run, "--repeats", 3)
    assert document["command"].endswith(f"--config {run.name} --repeats 3 --threads 1")
    (full, coarse) = document["rows"]
    assert full["quality"] is None
    assert (coarse["quality"]["tokens"], coarse["mem_len"]) == (199, 16)


def test_a_size_comes_from_a_file(measured: Measure, make_run: Callable[..., Path], tmp_path: Path) -> None:
    sizes = {"layers": 1, "d_model": 16, "heads": 2, "head_dim": 8, "d_ff": 24, "vocab_size": 300}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(sizes), encoding="utf-8")
    options = ("--mem-len", 10, "--segment", 4, "--repeats", 1)
    document = measured("load", "--config", file, *options)
    assert (document["config"], document["model"]["vocab_size"], document["segment"]) == ("mine", 300, 4)
    run = make_run()
    document = measured("load", "--config", run / "config.json", "--repeats", 1)
    recipe = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert (document["config"], document["segment"]) == (run.name, recipe["evaluation"]["segment"])


# Packages that most installations lack, and those that the cases are declared with.
ABSENT = (*serve.PACKAGES, "matplotlib", "tensorrt", "tensorrt_rtx", "tokenizers", "triton")
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
from benchmarks.__main__ import main
from benchmarks.cases import CASES, load_case
if sys.argv[2] == "open":
    print(*map(load_case, CASES))
else:
    main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("absent", "words"),
    [(ABSENT, ("open",)), ((*ABSENT, *PACKAGES), ("list",)), ((*ABSENT, *PACKAGES), ("run", "--help"))],
)
def test_cases_are_listed_without_the_packages_that_they_measure(
    absent: tuple[str, ...], words: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", WITHOUT, ",".join(absent), *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert words == ("open",) or all(name in ended.stdout for name in CASES)


def test_without_a_gpu_its_case_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = load_case("gpu")
    monkeypatch.setattr(gpu, "ask_driver", lambda: DriverFacts(fault="no NVIDIA driver is installed"))
    result = call("run", "gpu", "--history", tmp_path / "history.jsonl")
    assert result.exit_code == 0, result.output
    assert result.stdout == "gpu is skipped: no NVIDIA driver is installed\n"
    assert not (tmp_path / "history.jsonl").exists()


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


def shifted_table(*which: Any, right: Any = step.position_table) -> np.ndarray:
    shifted: np.ndarray = np.roll(right(*which), 1, axis=2)
    return shifted


def wrong_form(form: Any, *given: Any, **options: Any) -> Any:
    return np.full(9, float(form != "ring")), None


# The case, its options, what is put in place of which functions, and the refusal.
WRONG: dict[str, tuple[str, dict[str, Any], dict[tuple[Any, str], Any], str]] = {
    "artefact": ("steps", {}, {(step, "position_table"): shifted_table}, "differs from PyTorch"),
    "fused operator": (
        "steps",
        {"operators": "fused"},
        {(checked_sessions, "check"): lambda artefact, *, threads, device: {"cpu": REPORT}[device]},
        "the fused operator failed its check",
    ),
    "form": (
        "steps",
        {"only": ["form"]},
        {
            (steps, "artefact_of"): lambda job, form: form,
            (steps, "open_checked"): lambda form, **_: form,
            (steps, "fed"): wrong_form,
        },
        "the shift form differs from the ring",
    ),
    "consecutive tokens": (
        "latency",
        {},
        {(growing_cache, "nats_apart"): lambda one, other: 0.5},
        r"differs from the side with fixed memory by 0\.5 nats",
    ),
    "growing cache": (
        "growing-cache",
        {},
        {(growing_cache, "nats_apart"): lambda one, other: 0.5},
        r"differs from the side with fixed memory by 0\.5 nats",
    ),
    "window": (
        "sliding-window",
        {},
        {(sliding_window, "exact_next_logits"): lambda w, model, t: np.arange(model.vocab_size) / 1},
        "window of 8 tokens differs from PyTorch",
    ),
    "threads": (
        "overhead",
        {"only": ["busy"]},
        {
            (overhead, "open_session"): lambda path, threads, device: SimpleNamespace(
                vocab=SimpleNamespace(size=2), threads=threads
            ),
            (overhead, "fed"): lambda session, tokens: (np.full(9, float(session.threads == 1)), None),
        },
        "the side with one thread differs from the default by 1 nats",
    ),
    "attention of training": (
        "training",
        {},
        {(training, "relative_attention"): lambda *a, **k: training.naive_attention(*a, **k) * 1.01},
        "fast and naive attention differ",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_side_is_not_timed(
    wrong: str, tiny: BenchmarkConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options, replaced, refusal = WRONG[wrong]
    if not HAS_COMPILER and (options.get("operators") or name in NEED_A_COMPILER):
        pytest.skip("there is no g++ here to build the fused operator with")
    case = load_case(name)
    for (module, function), fault in replaced.items():
        monkeypatch.setattr(module, function, fault)
    for timer in ("take_turns", "milliseconds"):
        fail = lambda *_, **__: pytest.fail("timed in spite of a wrong answer")  # noqa: E731
        monkeypatch.setattr(case, timer, fail, raising=False)
    with pytest.raises(ArtefactError, match=refusal):
        list(case.run(Job(config=tiny, folder=tmp_path, threads=1, options=options)))


def test_a_wrong_policy_is_not_timed(tiny: BenchmarkConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    right = policy.Policy(tiny.model, tiny.mem_len).eval()
    monkeypatch.setattr(policy, "_artefact_step", lambda artefact: policy._pytorch_step(right))
    policy._compare(right, Path(), tiny.mem_len)
    monkeypatch.setattr(policy, "_growing_step", lambda *_: lambda observation: np.ones(4, np.float32))
    with pytest.raises(ArtefactError, match="growing window differs from PyTorch"):
        policy._compare(right, Path(), tiny.mem_len)


def test_a_wrong_peer_is_not_timed() -> None:
    ours, right, wrong = (
        start.Side(name=name, command=[], runtime_bytes=0, model_bytes=0)
        for name in ("ours", "right", "wrong")
    )
    start.compare([ours, right], {"ours": [3, 1, 2], "right": [3, 1, 2]})
    with pytest.raises(ArtefactError, match="wrong differs from ours in token 2"):
        start.compare([ours, wrong], {"ours": [3, 1, 2], "wrong": [3, 1, 1]})


def test_a_wrong_mamba_is_not_timed() -> None:
    right = mamba._Stepped(lambda token, state: (np.array([0.5, 1.0, 2.0]), state))
    wrong = mamba._Stepped(lambda token, state: (np.array([0.5, 1.0, 2.1]), state))
    mamba.compare([right, right, wrong], ["fp32", "fp32", "int8"], 3)
    with pytest.raises(ArtefactError, match="a side in fp32 differs from the artefact in fp32"):
        mamba.compare([right, wrong], ["fp32", "fp32"], 3)


class Recorder:
    """A session that notes where its streams are, and computes nothing."""

    def __init__(self) -> None:
        self.vocab = SimpleNamespace(size=5)
        self.positions: list[list[int]] = []

    def start(self, rows: int) -> SimpleNamespace:
        return SimpleNamespace(positions=np.zeros(rows, np.int64), tensors={"key": np.ones(2)})

    def predict(self, tokens: np.ndarray, memory: SimpleNamespace) -> None:
        self.positions.append(memory.positions.tolist())
        memory.positions += tokens.shape[1]


def test_the_loop_is_where_the_streams_of_the_server_are(tiny: BenchmarkConfig) -> None:
    """Tokens with less memory behind them would cost less."""
    session = Recorder()
    job = Job(config=tiny, folder=Path(), threads=1)
    bench = serve.Bench(job=job, artefact=Path(), session=cast(Session, session), tokens=40)
    bench.loop(2)
    first, last = tiny.segment + serve.WARMUP_TOKENS, tiny.segment + bench.tokens
    assert session.positions[-(last - first) :] == [[at, at] for at in range(first, last)]


def test_other_tokens_than_those_of_generate_are_not_measured(tiny: BenchmarkConfig) -> None:
    wrong = SimpleNamespace(load=lambda **job: {"texts": [[" 1", " 3"]], "window": {}})
    job = Job(config=tiny, folder=Path(), threads=1)
    bench = serve.Bench(job=job, artefact=Path(), session=cast(Session, Recorder()), tokens=40)
    with pytest.raises(ArtefactError, match="stream 0 has other tokens than `generate`"):
        serve.window(cast(Served, wrong), bench, [[0]], [["1", "2"]])


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no g++ here")
@pytest.mark.slow  # it compiles
@pytest.mark.parametrize(("case", "constant"), [(policy, "WARMUP_STEPS"), (start, "TIMED")])
def test_a_cpp_side_is_timed(
    case: ModuleType, constant: str, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case, constant, 2)
    rows = measured(case.__name__.rpartition(".")[2], "--repeats", 5)["rows"]
    assert "artefact, C++" in [row.get("side") for row in rows]
