"""Training processes that SIGKILL ends at any moment, also in the middle of a file, and that resume to the
same bits.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.base.files import write_json
from runtimes.base.records import to_json
from tests.trainer.training.runs import assert_same_run
from trainer.run.config import Averaging, TrainConfig
from trainer.training.loop import resume, train

Make = Callable[..., TrainConfig]


def kill_and_resume(config: TrainConfig, folder: Path, *, kills: int) -> int:
    """Trains `folder`/killed in processes that SIGKILL ends at random moments, and then to its end; returns
    how many were killed.
    """
    write_json(folder / "config.json", to_json(config))
    command = [sys.executable, "-c", "from xl_export.cli.main import main; main()", "train"]
    arguments = [str(folder / "config.json"), "--out", str(folder / "killed")]
    killed, done = folder / "killed", 0
    chance = random.Random(0)
    for number in range(kills):
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        lines = (number + 0.5) * config.steps / kills
        while process.poll() is None and not (
            killed.is_dir() and len((killed / "metrics.jsonl").read_bytes()) > lines * 130
        ):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)
        process.kill()
        done += process.wait() == -signal.SIGKILL
        arguments = ["--resume", str(killed)]
    resume(killed, progress=False)
    return done


def test_a_killed_run_resumes_to_the_same_bits(make_config: Make, tmp_path: Path) -> None:
    """SIGKILL to a real process: no clean-up code runs, and files may be half written."""
    config = make_config(steps=45, checkpoint_every=3, validate_every=20, dropout=0.1)
    whole = train(config, tmp_path / "whole", progress=False)
    assert kill_and_resume(config, tmp_path, kills=1) == 1, "it had to be killed while training"
    assert_same_run(tmp_path / "killed", whole)


@pytest.mark.slow
def test_a_run_of_many_parts_survives_twenty_kills(make_config: Make, tmp_path: Path) -> None:
    config = make_config(
        steps=2000,
        checkpoint_every=7,
        validate_every=50,
        dropout=0.1,
        accumulate=2,
        optimizer="adagrad",
        autocast="fp16",
        averaging=Averaging(start_step=900),
        mem_len_schedule=((500, 12), (1500, 6)),
        segment_schedule=((1000, 5),),
    )
    whole = train(config, tmp_path / "whole", progress=False)
    assert kill_and_resume(config, tmp_path, kills=20) == 20
    assert_same_run(tmp_path / "killed", whole)
