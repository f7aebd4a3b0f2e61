"""MNN, of Alibaba: what it computes of graphs of fixed sizes (docs/guides/phones.md)."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes import Sampler, generate, open_session
from runtimes.contract.spec import GRAPH
from tests.architectures import ARCHITECTURES
from tests.examples.conftest import EXAMPLES
from tests.nightly import every
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import export

pytest.importorskip("_tools", reason="MNN is not installed; pip install MNN")
KINDS = sorted(name for name in ARCHITECTURES if "softmax" not in name)
CONVERT = "import sys, _tools; _tools.mnnconvert(sys.argv)"


def program(*words: object) -> str:
    """What a program prints. It is one of its own, because MNN and PyTorch both bring threads along."""
    ended = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, check=True)
    return ended.stdout


def converted(run: Path, folder: Path) -> tuple[Path, Path]:
    rule = dataclasses.replace(load_run(run).config.evaluation, segment=1)
    artefact, model = export(run, folder / "fixed", rows=1, rule=rule), folder / "fixed.mnn"
    files = ["--modelFile", artefact / GRAPH, "--MNNModel", model]
    program("-c", CONVERT, "-f", "ONNX", *files, "--bizCode", "xl-export")
    return artefact, model


@pytest.mark.parametrize("kind", every(6, KINDS))
def test_mnn_gives_the_answers_of_the_reference(
    kind: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    said = program(EXAMPLES / "run_in_mnn.py", *converted(make_run(**ARCHITECTURES[kind]), tmp_path))
    found = re.search(r"differs from the reference by at most (\S+) nats", said)
    assert found is not None, said
    assert float(found[1]) < 1e-4


def test_mnn_continues_a_text(run: Path, tmp_path: Path) -> None:
    artefact, model = converted(run, tmp_path)
    pieces = generate(open_session(artefact), ["The "], max_tokens=40, sampler=Sampler(temperature=0))
    expected = "The " + "".join(piece.text for piece in pieces)
    assert program(EXAMPLES / "run_in_mnn.py", artefact, model, "The ").endswith(expected + "\n")
