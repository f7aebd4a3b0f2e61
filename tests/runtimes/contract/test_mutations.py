"""Every file of an artefact is damaged in hundreds of ways: each ends in one sentence, or in a check that
passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from xl_export.artefact.export import export

ROOT = Path(__file__).parents[3]
WORKER = "tests.runtimes.contract.mutation_worker"


# One damage of `every`; the forms differ only in the graph. `ort`: a ring in ONNX Runtime's own format.
EVERY = [
    ("ring", 12),
    *(
        pytest.param(form, every, marks=pytest.mark.slow)
        for form, every in (("ring", 1), ("shift", 1), ("hidden", 1), ("ort", 3))
    ),
]


@pytest.mark.parametrize(("form", "every"), EVERY)
def test_every_damage_ends_in_one_sentence_or_a_passing_check(
    form: str, every: int, artefacts: dict[str, Path], run: Path, tmp_path: Path
) -> None:
    folder = export(run, tmp_path / "ort", storage="ort") if form == "ort" else artefacts[form]
    worker = subprocess.run(
        [sys.executable, "-m", WORKER, folder, tmp_path / "copy", "0", str(every)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [
        json.loads(line) for line in worker.stdout.splitlines()
    ]  # so ONNX Runtime printed nothing of its own
    assert worker.returncode == 0, (worker.returncode, lines[-1], worker.stderr[-2000:])
    assert worker.stderr == ""  # what the command line adds to its one sentence
    results = [line for line in lines if "outcome" in line]
    assert [line for line in results if line["outcome"].startswith("bug")] == []
    sealed = {
        "sealed spec",
        "sealed file",
    }  # those alone may compute something else, and then the check says so
    assert [line for line in results if line["outcome"] == "failed" and line["kind"] not in sealed] == []
    assert results[0] == {"kind": "whole", "what": "untouched", "outcome": "passed"}
    counts = Counter((line["kind"], line["outcome"]) for line in results)
    assert counts["bytes", "refused"] > 100 // every, counts
    assert counts["spec", "refused"] > 100 // every, counts
    assert counts["sealed spec", "refused"] > 100 // every, counts
    assert counts["sealed file", "refused"] > 50 // every, counts
    assert counts["sealed file", "failed"] > 0, counts  # some damage did get as far as the numbers
