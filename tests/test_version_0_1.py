"""What version 0.1 wrote still opens, under the identity it had, and gives the same answers.

`tests/data/version-0.1` was written by the command line of version 0.1 (commit f42af52): `train`, `data`,
`onnx` and `generate --save-memory`, on the 3,600 characters of its `text.txt`. It is never written again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from runtimes import check, evaluate, generate, load_memory, open_session
from runtimes.sessions import fused_cpu
from runtimes.tasks.sample import Sampler
from tests.commands import xl
from trainer.data.dataset import open_dataset

FOLDER = Path(__file__).parent / "data" / "version-0.1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
ARTEFACTS = [name for name in EXPECTED if name != "run"]


def continued(name: str) -> str:
    """What the saved stream says next, greedily, after the prompt that version 0.1 was given."""
    session = open_session(FOLDER / name, threads=1)
    memory = load_memory(FOLDER / f"{name}-stream.npz", session)
    pieces = generate(session, " and", max_tokens=40, sampler=Sampler(temperature=0), memory=memory)
    return " and" + "".join(piece.text for piece in pieces) + "\n"


@pytest.mark.parametrize("name", EXPECTED)
def test_it_has_its_identity_and_its_scores(name: str) -> None:
    session = open_session(FOLDER / name, threads=1)
    assert session.identity == EXPECTED[name]["identity"]
    tokens = session.vocab.encode((FOLDER / "text.txt").read_bytes())
    score = evaluate(session, tokens)
    assert score.bits_per_token == pytest.approx(EXPECTED[name]["bits_per_token"], rel=1e-3)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_saved_stream_continues(name: str) -> None:
    assert continued(name) == EXPECTED[name]["continued"]


@pytest.mark.parametrize("name", ARTEFACTS)
def test_its_check_passes(name: str) -> None:
    assert check(FOLDER / name, threads=1).passed


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no g++ here to build the fused operator with"
)
def test_the_fused_operator_serves_it_under_the_name_it_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fused_cpu.build()
    report = check(FOLDER / "ring", threads=1)
    assert report.passed
    assert report.kernel == "fused"
    assert continued("ring") == EXPECTED["ring"]["continued"]


@pytest.mark.parametrize("name", ["run", "span-run"])
def test_a_run_is_exported(name: str, tmp_path: Path) -> None:
    assert xl("onnx", FOLDER / name, "--out", tmp_path / "artefact").exit_code == 0
    assert check(tmp_path / "artefact", threads=1).passed


def test_a_stopped_run_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "stopped"
    shutil.copytree(FOLDER / "stopped", run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"text": str(FOLDER / "text.txt")}))
    assert xl("train", "--resume", run).exit_code == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    # Every later pass over the text now begins at another token, which version 0.1 did not do.
    assert (last["step"], last["best_step"]) == (600, 600)
    assert last["validation_bits_per_token"] == pytest.approx(1.1940054514715124, rel=1e-3)


def test_a_prepared_dataset_opens() -> None:
    dataset = open_dataset(FOLDER / "dataset")
    assert dataset.vocab.size == 12
    assert [len(part) for part in (dataset.train, dataset.valid, dataset.test)] == [15, 4, 6]
