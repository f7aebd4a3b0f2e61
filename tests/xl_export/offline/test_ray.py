"""`score --ray` and `eval --ray` on a cluster of this machine, killed and resumed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import runtimes
from tests.commands import xl

pytest.importorskip("ray", reason="ray is not installed; pip install '.[ray]'")
ROOT = Path(__file__).parents[3]
ARTEFACT = ROOT / "tests" / "data" / "small"
COMMAND = [sys.executable, "-m", "xl_export"]
ENV = os.environ | {"PYTHONPATH": str(ROOT)}
pytestmark = pytest.mark.slow  # Ray takes half a minute to start


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with lines, JSON lines and Parquet; together 600 texts of any length."""
    import pyarrow
    import pyarrow.parquet

    chance, folder = random.Random(0), tmp_path / "corpus"
    folder.mkdir()
    texts = ["".join(chance.choices(" abcdehilmnop", k=chance.randint(0, 40))) for _ in range(600)]
    (folder / "a.txt").write_text("".join(f"{text}\n" for text in texts[:200]))
    (folder / "b.jsonl").write_text(
        "".join(json.dumps({"text": text, "context": "the "}) + "\n" for text in texts[200:400])
    )
    table = pyarrow.table({"text": texts[400:], "id": range(200), "other": texts[400:]})
    pyarrow.parquet.write_table(table, folder / "c.parquet", row_group_size=30)
    return folder


def ray(*arguments: object) -> list[str]:
    return [*COMMAND, *map(str, arguments), "--ray", "local", "--threads", "1"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(ray(*arguments), env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_a_killed_and_resumed_call_gives_one_process_s_scores(corpus: Path, tmp_path: Path) -> None:
    options = ("score", ARTEFACT, "--input", f"{corpus}/*", "--json", "--block", 300)
    whole = run(*options, "--actors", 1, "--out", tmp_path / "whole")
    out, work = tmp_path / "out", tmp_path / "out.parts"
    command = ray(*options, "--actors", 2, "--out", out)
    with subprocess.Popen(command, env=ENV, start_new_session=True, stderr=subprocess.DEVNULL) as first:
        while len(list(work.glob("*.block"))) < 5:
            assert first.poll() is None
            time.sleep(0.01)
        os.killpg(first.pid, signal.SIGKILL)
    kept = {file: file.stat().st_mtime_ns for file in work.glob("*.block")}
    assert not out.exists()
    with subprocess.Popen(command, env=ENV, stderr=subprocess.PIPE, text=True) as second:
        while not out.exists() and second.poll() is None:
            now = {file: file.stat().st_mtime_ns for file in kept if file.exists()}
            assert now.items() <= kept.items()
            time.sleep(0.05)
        said = second.communicate()[1]
    assert second.returncode == 0, said
    assert f"{len(kept)} of " in said
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert whole.stderr.splitlines()[-1] == said.splitlines()[-1]
    assert not work.exists()

    session = runtimes.open_session(ARTEFACT, threads=1, device="cpu")
    found = [json.loads(line) for line in out.read_text().splitlines()]
    scores = runtimes.score_texts(
        session,
        [
            runtimes.TextToScore(text=f["text"], context="the " * (200 <= n < 400))
            for n, f in enumerate(found)
        ],
    )
    for result, score in zip(found, scores, strict=True):
        assert result["log_prob"] == pytest.approx(score.log_prob, abs=1e-4)
    assert [result["id"] for result in found] == [*range(1, 401), *range(200)]


def test_a_text_is_evaluated_as_by_one_process(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(random.Random(1).choices(" abcdehilmnop", k=3000)))
    options = ("eval", ARTEFACT, "--text", text, "--lanes", 16, "--segment", 5)
    alone = xl(*options, "--losses", tmp_path / "alone.csv", "--threads", 1)
    assert alone.exit_code == 0, alone.output
    more = ("--actors", 2, "--work", tmp_path / "work", "--losses", tmp_path / "ray.csv")
    done = run(*options, *more)
    assert done.stdout.splitlines()[0] == alone.stdout.splitlines()[0]
    columns = [
        re.findall(r"-?\d+\.\d{6}$", (tmp_path / f"{n}.csv").read_text(), re.M) for n in ("ray", "alone")
    ]
    assert len(columns[0]) == 2999
    for mine, own in zip(*columns, strict=True):
        assert float(mine) == pytest.approx(float(own), abs=1e-4)


def test_the_fault_of_a_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc\n" * 50 + "Q\n")
    options = ("score", ARTEFACT, "--input", tmp_path / "a.txt", "--out", tmp_path / "out")
    done = subprocess.run(ray(*options), env=ENV, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "line 51 of " in done.stderr
