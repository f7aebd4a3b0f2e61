"""Two thousand damaged checkpoint files: each is read or refused in one sentence; none runs, writes or imports anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

WORKER = Path(__file__).with_name("mutation_worker.py")
ROOT = Path(__file__).parents[3]


def test_every_damaged_file_is_read_or_refused_in_one_sentence(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    worker = subprocess.run([sys.executable, WORKER, tmp_path, "0"], capture_output=True, text=True, timeout=200, env=environment)
    lines = [json.loads(line) for line in worker.stdout.splitlines()]
    assert worker.returncode == 0, (worker.returncode, lines[-1:], worker.stderr[-2000:])
    assert worker.stderr == ""
    results = [line for line in lines if "outcome" in line]
    assert [line for line in results if line["outcome"].startswith("bug")] == []
    assert {line["outcome"] for line in results if line["kind"] == "whole"} == {"read"}
    counts = Counter((line["kind"], line["outcome"]) for line in results)
    assert len(results) > 1000, counts
    for kind in ("zip", "sealed zip", "legacy", "bare", "safetensors", "npz"):
        assert counts[kind, "refused"] > 40, counts
    for kind in ("sealed zip", "legacy", "bare"):  # some damage changes a number or a word, and got as far as the end
        assert counts[kind, "read"] > 10, counts
