"""One run, one writer: a second process that would train the same run is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtimes.base.errors import UserError
from runtimes.base.lock import LOCK
from tests.commands import refused, xl
from tests.trainer.training.runs import train_until
from trainer.run.config import TrainConfig
from trainer.training import loop
from trainer.training.loop import resume, train
from trainer.training.state import Training

HOLD = """
import sys, time
from pathlib import Path
from runtimes.base.lock import only_writer
with only_writer(Path(sys.argv[1]), doing="trained"):
    time.sleep(100)
"""


def test_a_run_in_training_is_neither_resumed_nor_replaced(
    make_config: Callable[..., TrainConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = make_config(steps=20, checkpoint_every=5), tmp_path / "run"
    train_until(config, run, step=10)
    metrics = (run / "metrics.jsonl").read_bytes()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)]) as other:
        while not (run / LOCK).is_file() or not (run / LOCK).read_bytes():
            time.sleep(0.01)
        told = f"is being written by another process (trained by process {other.pid} on "
        refused(xl("train", "--resume", run), told)
        with pytest.raises(UserError, match="is being written by another process"):
            train(config, run, force=True, progress=False)
        assert (run / "metrics.jsonl").read_bytes() == metrics
        other.kill()
    held = []
    go_on = loop._continue

    def noted(training: Training, out: Path, *rest: Any, **options: Any) -> None:
        held.append((out / LOCK).is_file())
        go_on(training, out, *rest, **options)

    monkeypatch.setattr(loop, "_continue", noted)
    resume(run, progress=False)
    assert not (run / LOCK).exists()
    train(config, run, force=True, progress=False)
    assert not (run / LOCK).exists()
    assert held == [True, True]
