"""The stream of measurements: surprise computed in the graph, and streams that continue bit by bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import runtimes
import xl_export
from tests.examples.conftest import EXAMPLES, load_example, run

SIGNAL = EXAMPLES / "signal"


@pytest.fixture(scope="module")
def train() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SIGNAL))  # it imports stream.py, as a script does
        module = load_example("signal", "train")
    module.M, module.T, module.LAYERS, module.D = 8, 4, 1, 16  # quick to trace
    return module


@pytest.fixture(scope="module")
def artefact(train: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained for a moment."""
    torch.manual_seed(0)
    model = train.SensorModel()
    train.train(model, 5, lanes=2)
    rule = xl_export.MemoryRule(mem_len=train.M, segment=train.T)
    return xl_export.trace(model, tmp_path_factory.mktemp("signal") / "artefact", rule=rule)


def printed(program: str, *words: object, text: str = "") -> str:
    ended = run(f"signal/{program}", *words, text=text)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_stream_continues_bit_by_bit_after_saving(artefact: Path, tmp_path: Path) -> None:
    samples = printed("stream.py", "--samples", 60).splitlines(keepends=True)
    assert len(samples) == 60
    whole = printed("watch.py", artefact, tmp_path / "whole", "--all", text="".join(samples))
    first = printed("watch.py", artefact, tmp_path / "parts", "--all", text="".join(samples[:25]))
    second = printed("watch.py", artefact, tmp_path / "parts", "--all", text="".join(samples[25:]))
    assert first + second == whole
    assert whole.splitlines()[-1].startswith("sample 59: ")
    session = runtimes.open_session(artefact)
    one, other = (runtimes.load_memory(tmp_path / name, session) for name in ("whole", "parts"))
    assert one.positions == other.positions == 60
    for name, array in one.tensors.items():
        assert array.tobytes() == other.tensors[name].tobytes()


@pytest.mark.slow
def test_surprise_does_not_depend_on_cuts_or_other_rows(train: ModuleType, artefact: Path) -> None:
    """It is what the last sample's expectation says of the next one, at every length of the steps."""
    session = runtimes.open_session(artefact)
    samples = np.stack([train.make_stream(50, seed)[0] for seed in (1, 2)])
    memory, pieces = session.start(2), []
    for count in (1, 3, 4, 2) * 5:
        at = int(memory.positions[0])
        outputs, memory = session.step({"sample": samples[:, at : at + count]}, memory)
        pieces.append(outputs)
    found = {name: np.concatenate([piece[name] for piece in pieces], axis=1) for name in pieces[0]}
    for row in range(2):
        assert np.abs(train.surprises(session, samples[row]) - found["surprise"][row]).max() < 1e-4
    error = (samples[:, 1:] - found["expected"][:, :-1]) / found["deviation"][:, :-1]
    nats = (error**2 / 2 + np.log(found["deviation"][:, :-1]) + np.log(2 * np.pi) / 2).sum(axis=-1)
    assert np.abs(nats - found["surprise"][:, 1:]).max() < 1e-4


def test_faulty_samples_are_found_above_one_false_alarm_in_1000(train: ModuleType) -> None:
    scores, wrong = np.array([999.5, 998.0, 1200.0, 5.0]), np.array([True, True, False, False])
    assert train.share_found(np.arange(1001.0), scores, wrong) == 0.5


@pytest.mark.slow
def test_training_finds_faults_better_than_a_linear_prediction(tmp_path: Path) -> None:
    command = [sys.executable, SIGNAL / "train.py", tmp_path / "made"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    *_, surprise, linear = lines
    assert int(surprise.split()[-1][:-1]) > max(60, int(linear.split()[-1][:-1]))
