"""`python -m benchmarks run`: what it prints and appends, when it judges claims, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys

import pytest

from benchmarks import history
from benchmarks.cases import memory_forms
from benchmarks.measure import Timing
from runtimes.base.errors import UserError
from tests.benchmarks.shown import call

BAD = [
    (["--config", "huge"], "'huge' is not one of 'demo', 'tales', 'small'"),
    (["--attention-lengths", "64,0"], "--attention-lengths is '64,0'; expected numbers from 1 to 16384"),
    (["--threads", "4096"], "--threads is 4096; expected a whole number from 1 to"),
    (["--plot", "result.pdf"], "ends in .png"),
    (["--plot", "no/such/folder/result.png"], "No such file or directory"),
    (["--csv", "result.txt"], "ends in .csv"),
]


def test_each_run_is_appended_as_it_is_printed(instant, tmp_path):
    history = tmp_path / "new" / "history.jsonl"
    options = ("decode", "--config", "tiny", "--threads", 1, "--history", history)
    result = call("run", *options, "--json")
    assert result.exit_code == 0, result.output
    (line,) = history.read_text().splitlines()
    document = json.loads(line)
    assert document == json.loads(result.stdout)
    assert document["machine"]["cpus"] >= 1
    assert document["limits"]["read_bytes"] > 0
    assert {"python", "numpy", "onnxruntime"} <= set(document["versions"])
    assert (document["config"], document["threads"], document["precision"]) == ("tiny", 1, "fp32")
    printed = call("run", *options, "--operators", "fused").stdout
    assert ", fused operator\n" in printed
    assert len(history.read_text().splitlines()) == 2


CLAIMS = [
    ((), 5, "**MISSED**: it took 5.0 times"),
    ((), 8, "Holds: it took 8.0"),
    (("--mem-len", 5), 8, None),
    (("--config", "small"), 8, None),
]


@pytest.mark.parametrize(("options", "hidden", "verdict"), CLAIMS)
def test_the_claim_is_judged_only_where_it_was_made(options, hidden, verdict, tmp_path, monkeypatch):
    run = lambda job: [form_row("ring", 1), form_row("hidden", hidden)]  # noqa: E731
    monkeypatch.setattr(memory_forms, "CASE", dataclasses.replace(memory_forms.CASE, run=run))
    given = ("--config", "enwik8-base", *options, "--threads", 1, "--history", tmp_path / "h.jsonl")
    result = call("run", "memory-forms", *given)
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
    result = call("run", "memory-forms", "--config", "tiny", "--history", tmp_path)
    assert result.exit_code == 2
    assert "which is a folder; give a file name" in result.stderr
    assert not result.stdout


def test_what_fails_while_it_is_measured_leaves_no_history(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_forms, "random_artefact", lambda *_: sys.exit(143))
    call("run", "memory-forms", "--config", "tiny", "--history", tmp_path / "history.jsonl")
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


def form_row(form, milliseconds):
    token = Timing(median=milliseconds, fastest=milliseconds, slowest=milliseconds, repeats=1)
    return memory_forms.Row(
        form=form,
        mem_len=12,
        token=token,
        ring_ratio=milliseconds,
    )


def test_help_is_cheap():
    code = (
        "import sys, benchmarks.__main__; "
        "sys.exit(sorted({'torch', 'onnx_ir', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
