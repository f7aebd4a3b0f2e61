"""`python -m benchmarks list`, `run` and `compare`, end to end at a tiny size."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import checked_sessions, history
from benchmarks.__main__ import main
from benchmarks.baselines import vanilla
from benchmarks.cases import memory_forms, precision, sliding_window
from benchmarks.cases.precision import PRECISIONS
from benchmarks.configs import CONFIGS
from benchmarks.measure import Timing
from runtimes.base.errors import ArtefactError, UserError
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.check import CheckReport
from tests.benchmarks.shown import rows_of
from tests.nightly import every

NEEDS_GCC = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no g++ here to build the fused operator with"
)
BAD = [
    (["--config", "huge"], "'huge' is not one of 'demo', 'tales', 'small'"),
    (["--attention-lengths", "64,0"], "--attention-lengths is '64,0'; expected numbers from 1 to 16384"),
    (["--threads", "4096"], "--threads is 4096; expected a whole number from 1 to"),
    (["--plot", "result.pdf"], "ends in .png"),
    (["--plot", "no/such/folder/result.png"], "No such file or directory"),
    (["--csv", "result.txt"], "ends in .csv"),
]


def call(*arguments):
    """`call("list")`, or a command in one text."""
    if len(arguments) == 1:
        arguments = arguments[0].split()
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@NEEDS_GCC
@pytest.mark.parametrize("case", every(3, ["decode", "segment", "batch"]))
def test_steps_are_measured_with_the_fused_operator(case, tiny, tmp_path):
    history = tmp_path / "history.jsonl"
    result = call(case, "--config", "tiny", "--threads", 1, "--history", history, "--operators", "fused")
    assert result.exit_code == 0, result.output
    rows = json.loads(history.read_text())["rows"]
    assert {row["operators"] for row in rows} == {"fused"}
    assert ", fused operator\n" in result.stdout


def test_precision_of_a_trained_run(make_run, text, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "PRECISIONS", (*PRECISIONS[:1], ("int8", "fp32"), PRECISIONS[-1]))
    run, history = make_run(), tmp_path / "history.jsonl"
    (run / "test.txt").write_text(text[:200], encoding="utf-8")
    result = call("precision", "--run", run, "--threads", 1, "--repeats", 3, "--history", history)
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


@NEEDS_GCC
@pytest.mark.parametrize("case", ["sliding-window", "memory-forms"])
def test_the_fused_operator_is_measured_where_it_is_asked_for(case, tiny, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(OrtSession, "open", recording(OrtSession.open, opened))
    history = tmp_path / "history.jsonl"
    result = call(case, "--config", "tiny", "--threads", 1, "--history", history, "--operators", "fused")
    assert result.exit_code == 0, result.output
    row = json.loads(history.read_text())["rows"][0]
    assert row["operators"] == "fused"
    assert "fused" in opened


def recording(open_session, opened):
    def recorded(folder, *, threads=None, kernel="auto"):
        session = open_session(folder, threads=threads, kernel=kernel)
        opened.append(session.kernel)
        return session

    return recorded


def test_sliding_window(tiny, tmp_path):
    history, picture = tmp_path / "new" / "history.jsonl", tmp_path / "result.png"
    options = ("run", "sliding-window", "--config", "tiny", "--threads", 1, "--history", history, "--json")
    result = call(*options, "--attention-lengths", "20,8", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    (line,) = history.read_text().splitlines()
    document = json.loads(line)
    assert document == json.loads(result.stdout)
    assert [row["attention_length"] for row in document["rows"]] == [8, 20]
    for row in document["rows"]:
        assert row["window"]["repeats"] == row["segment"]["repeats"] == tiny.repeats
        assert row["ratio"] == pytest.approx(row["window"]["median"] / row["segment"]["median"])
        assert row["predicted_ratio"] == pytest.approx(
            row["window_multiply_adds"] / row["segment_multiply_adds"]
        )
        assert row["difference"] < row["tolerance"]
        assert row["table_9"] is None
    assert document["machine"]["cpus"] >= 1
    assert document["limits"]["read_bytes"] > 0
    assert {"python", "numpy", "onnxruntime"} <= set(document["versions"])
    assert (document["config"], document["threads"], document["precision"]) == ("tiny", 1, "fp32")
    assert call(*options, "--attention-lengths", "8").exit_code == 0
    assert len(history.read_text().splitlines()) == 2


def test_memory_forms(tiny, tmp_path):
    history = tmp_path / "history.jsonl"
    result = call(
        "memory-forms", "--config", "tiny", "--threads", 1, "--history", history
    )  # a name alone runs the case
    assert result.exit_code == 0, result.output
    assert "Claim: `hidden` takes at least 1e-09 times as long as `ring`. Holds: " in result.stdout
    rows = json.loads(history.read_text())["rows"]
    assert [row["form"] for row in rows] == ["ring", "shift", "hidden"]
    assert rows[0]["ring_ratio"] == 1
    assert rows[0]["difference"] == 0
    assert all(row["token"]["repeats"] == tiny.token_repeats and row["difference"] < 1e-4 for row in rows)


CLAIMS = [(12, 6, "**MISSED**: it took 6.0 times"), (5, 8, None)]


@pytest.mark.parametrize(("mem_len", "hidden", "verdict"), CLAIMS)
def test_the_claim_is_judged_only_where_it_was_made(mem_len, hidden, verdict, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(CONFIGS, "tiny", dataclasses.replace(tiny, ring_claim=7.0))
    run = lambda job: [form_row("ring", 1), form_row("hidden", hidden)]  # noqa: E731
    monkeypatch.setattr(memory_forms, "CASE", dataclasses.replace(memory_forms.CASE, run=run))
    options = f"--config tiny --threads 1 --mem-len {mem_len} --history {tmp_path}/h.jsonl"
    result = call(f"run memory-forms {options}")
    assert result.exit_code == 0, result.output
    assert ("Claim: " in result.stdout) == (verdict is not None)
    assert verdict is None or verdict in result.stdout


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_bad_input_is_one_sentence(options, sentence, tmp_path):
    history = tmp_path / "history.jsonl"
    result = call("run", "sliding-window", "--history", history, *options)
    assert result.exit_code == 2
    assert not result.stdout
    assert not history.exists()
    assert result.stderr.startswith("Error: ")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_history_that_cannot_be_written_is_refused_before_measuring(tiny, tmp_path):
    result = call("memory-forms", "--config", "tiny", "--history", tmp_path)
    assert result.exit_code == 2
    assert "which is a folder; give a file name" in result.stderr
    assert not result.stdout


def test_what_fails_while_it_is_measured_leaves_no_history(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_forms, "random_artefact", lambda *_: sys.exit(143))
    call("memory-forms", "--config", "tiny", "--history", tmp_path / "history.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_history_as_it_was(tmp_path):
    path = tmp_path / "history.jsonl"
    history.append(path, {"case": "one"})
    before = path.read_text()
    resource = pytest.importorskip("resource")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(UserError, match="could not be written"):
            history.append(path, {"case": "two"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == before


def test_a_wrong_window_is_not_timed(tiny, monkeypatch):
    monkeypatch.setattr(
        vanilla,
        "naive_next_logits",
        lambda weights, model, tokens: np.arange(model.vocab_size, dtype=np.float32),
    )
    monkeypatch.setattr(
        sliding_window, "take_turns", lambda *_, **__: pytest.fail("timed in spite of a wrong answer")
    )
    with pytest.raises(ArtefactError, match="nothing was measured"):
        rows_of("sliding-window", tiny)


@NEEDS_GCC
def test_a_wrong_fused_operator_is_not_timed(tiny, monkeypatch):
    wrong = CheckReport(
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
    monkeypatch.setattr(
        checked_sessions, "check", lambda artefact, *, threads, device: {"cpu": wrong}[device]
    )
    monkeypatch.setattr(
        sliding_window, "take_turns", lambda *_, **__: pytest.fail("timed in spite of a wrong answer")
    )
    with pytest.raises(ArtefactError, match="the fused operator failed its check"):
        rows_of("sliding-window", tiny, operators="fused")


def test_forms_that_disagree_are_not_timed(tiny, monkeypatch):
    monkeypatch.setattr(memory_forms, "random_artefact", lambda job, form: form)
    monkeypatch.setattr(memory_forms, "open_checked", lambda form, **_: form)
    monkeypatch.setattr(memory_forms, "fed", lambda form, _: (np.full(9, float(form != "ring")), None))
    monkeypatch.setattr(
        memory_forms, "take_turns", lambda *_, **__: pytest.fail("timed in spite of a wrong answer")
    )
    with pytest.raises(ArtefactError, match="the shift form differs from the ring"):
        rows_of("memory-forms", tiny)


def form_row(form, milliseconds):
    token = Timing(median=milliseconds, fastest=milliseconds, slowest=milliseconds, repeats=1)
    return memory_forms.Row(
        form=form,
        mem_len=12,
        token=token,
        ring_ratio=milliseconds,
        num_bytes=1,
        multiply_adds=1,
        difference=0.0,
    )


def test_help_is_cheap():
    code = (
        "import sys, benchmarks.__main__; "
        "sys.exit(sorted({'torch', 'onnx_ir', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
