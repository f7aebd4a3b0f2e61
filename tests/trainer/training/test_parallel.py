"""Training in real processes: several that train one run, one that is killed, and a second writer."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import xl_export
from runtimes.base.errors import ConfigError, UserError
from runtimes.base.files import write_json
from runtimes.base.lock import LOCK
from runtimes.base.machine import available_cpus
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from tests.commands import refused, xl
from tests.trainer.training.ranks import in_ranks, started
from tests.trainer.training.runs import assert_same_run, lines_of, longer, train_until
from trainer.model.config import SpanConfig, VocabularyConfig
from trainer.run.config import Averaging, TrainConfig
from trainer.training import launch, loop
from trainer.training.loop import resume, train
from trainer.training.parallel import Ranks
from trainer.training.state import Training

Make = Callable[..., TrainConfig]
RECIPE: dict[str, Any] = {
    "batch": 8,
    "accumulate": 2,
    "schedule": "constant",
    "validate_every": 3,
    "checkpoint_every": 3,
    "steps": 9,
    "threads": 0,
}
UNSEEN = MemoryRule(mem_len=16, segment=8, include_self=False)
SHARDED: dict[str, Any] = RECIPE | {
    "parallel": "fsdp",
    "positions": "learned",
    "context": 17,
    "span": SpanConfig(maximum=16, ramp=4, initial=0.9, penalty=0.1),
    "vocabulary": VocabularyConfig(cutoffs=(7, 15), div_val=2),
    "training": UNSEEN,
    "evaluation": UNSEEN,
    "averaging": Averaging(start_step=1),
    "validate_tokens": 90,
    "sample_tokens": 3,
    "clip": 0.05,
}


def assert_trains_as_alone(
    config: TrainConfig, run: Path, in_two_processes: Callable[[], object], *, noise: float = 1
) -> None:
    """One process, then two, then one again, against one from beginning to end.

    noise: two processes add gradients in another order, so rounding differs.
    """
    train_until(config, run, 3)
    longer(run, 7)
    in_two_processes()
    assert len(load_file(run / "training.safetensors")["random"]) == 2
    longer(run, 9)
    resume(run, progress=False)
    alone = train(config, run.with_name("alone"), progress=False)
    for name in ("loss_nats", "gradient_norm", "validation_bits_per_token"):
        found, expected = (
            {line["step"]: line[name] for line in lines_of(each) if name in line} for each in (run, alone)
        )
        found = {step: found[step] for step in expected}  # a run that ends validates once more
        assert found == pytest.approx(expected, rel=1e-4 * noise, abs=1e-5 * noise), name
    saved, other = (load_file(each / "training.safetensors") for each in (run, alone))
    for name in sorted(set(other) - {"random"}):
        torch.testing.assert_close(
            saved[name],
            other[name],
            rtol=1e-2 * noise,
            atol=1e-3 * noise,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_two_processes_continue_the_run_of_one(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is split, and lengths change. The launched command ignores files in the working folder that
    have the names of our packages.
    """
    calls: list[tuple[list[str], int]] = []
    monkeypatch.setattr(launch, "launch", lambda *arguments: calls.append(arguments))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("trainer.py", "runtimes.py", "xl_export.py"):
        (folder / name).write_text("raise SystemExit('this file of the user was imported')\n")
    run = tmp_path / "run"

    def in_two_processes() -> None:
        assert xl("train", "--resume", run, "--processes", 2).exit_code == 0
        ((command, count),) = calls
        python, words = command[:4], command[4:]
        listed = subprocess.run([*python, "train", "--list"], cwd=folder, capture_output=True, text=True)
        assert "enwik8-base" in listed.stdout, listed.stderr
        assert count == 2
        first, second = in_ranks(tmp_path, words)
        assert (first.code, second.code) == (0, 0), first.errors + second.errors
        assert (
            first.output.splitlines()[-1] == f"{run} is trained; next: xl-export export {run} --out artefact"
        )
        assert first.output.count("step 7 of 7: validation") == 1
        assert second.output == ""
        memory = load_file(run / "training.safetensors")["memory.0"]
        assert memory.shape == (8, 11, 16), "the memory of all lanes"

    config = make_config(**RECIPE, mem_len_schedule=((2, 5), (5, 11)))
    assert_trains_as_alone(config, run, in_two_processes)


LOOKING = """
import trainer.training.loop as loop
from xl_export.cli.main import main

train_on = loop._continue

def looking(training, *arguments, **options):
    train_on(training, *arguments, **options)
    every = [*training.model.parameters(), *training.average.module.parameters()]
    for state in training.optimizer.state.values():
        every.append(state["exp_avg" if "exp_avg" in state else "sum"])
    assert all(len(tensor.to_local()) <= (len(tensor) + 1) // 2 for tensor in every)
    print("half of every weight\\n", end="", flush=True)

loop._continue = looking
main()
"""


@pytest.mark.parametrize(
    ("changes", "noise"),
    [
        ({"checkpoint_activations": True, "autocast": "bf16"}, 20),
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"optimizer": "adagrad"}, 1, marks=pytest.mark.slow),  # which clips each tensor
    ],
)
def test_sharded_weights_train_as_whole_ones(
    make_config: Make, tmp_path: Path, changes: dict[str, Any], noise: float
) -> None:
    script = tmp_path / "looking.py"
    script.write_text(LOOKING)

    def in_two_processes() -> None:
        for ended in in_ranks(tmp_path, ["train", "--resume", tmp_path / "run"], script=script):
            assert ended.code == 0, ended.errors
            assert "half of every weight" in ended.output

    config = make_config(**SHARDED | changes)
    assert_trains_as_alone(config, tmp_path / "run", in_two_processes, noise=noise)


def test_a_gpu_that_is_not_there_is_one_sentence(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"PyTorch sees no GPU; give --device cpu, or"):
        train(make_config(device="cuda"), tmp_path / "run", progress=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"is process 3 .* sees: 2; start one process for each"):
        train(make_config(device="cuda"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_processes_with_different_configurations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two machines of which one has an older file. The first process says so, and all end."""

    def gathered(values: list[str], own: str) -> None:
        values[:] = [own, "another"]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    with pytest.raises(ConfigError, match="the processes of this run have different configurations or texts"):
        Ranks(rank=0, count=2).agree("configurations or texts", "one")
    with pytest.raises(SystemExit) as caught:
        Ranks(rank=1, count=2).agree("configurations or texts", "one")
    assert caught.value.code == 2


def test_processes_are_refused_under_torchrun(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "config.json", to_json(make_config()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = ("train", tmp_path / "config.json", "--out", tmp_path / "run", "--processes", 2)
    refused(xl(*command), "torchrun had started", "leave out --processes")


def launched(program: str) -> None:
    """Two processes with a small program, under PyTorch's launcher."""
    launch.launch([sys.executable, "-c", "import os, pathlib\n" + program], 2)


def test_every_process_has_its_share_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(os.environ['OMP_NUM_THREADS'])"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    launched(program)
    assert dict(os.environ) == before
    share = str(max(1, available_cpus() // 2))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": share, "1": share}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    launched(program)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"7"}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "pathlib.Path(os.environ['XL_EXPORT_REPORTS'], '0').write_text('It is so.'); exit(2)",
            "^It is so.$",
        ),
        ("os.kill(os.getpid(), 9)", "of 2 was ended by SIGKILL; the last checkpoint is kept"),
    ],
)
def test_one_sentence_names_what_ended_the_processes(program: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        launched(program)


# As the installed command starts: the working folder is not on the module path.
COMMAND = (
    f"import sys; sys.path[0] = {str(Path(xl_export.__file__).parents[1])!r}; "
    "from xl_export.cli.main import main; main(prog_name='xl-export')"
)


def training_command(config: TrainConfig, folder: Path) -> subprocess.Popen[str]:
    """`xl-export train config.json --out run --processes 2` in a folder."""
    write_json(folder / "config.json", to_json(config))
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "train", "config.json", "--out", "run", "--processes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )


KEPT = "the last checkpoint is kept: continue with `xl-export train --resume"


@pytest.mark.slow  # processes that import PyTorch one after the other
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGINT, 130, f"stopped; {KEPT}"),
        (signal.SIGTERM, 143, f"stopped; {KEPT}"),
        (signal.SIGKILL, 2, f" of 2 was ended by SIGKILL; {KEPT}"),  # to one of them
    ],
)
def test_a_signal_ends_all_processes_and_says_how_to_resume(
    number: signal.Signals, code: int, words: str, make_config: Make, tmp_path: Path
) -> None:
    config = make_config(steps=10**6, checkpoint_every=3, threads=0)
    process = training_command(config, tmp_path)
    lines = tmp_path / "run/metrics.jsonl"
    while process.poll() is None and not (lines.is_file() and lines.read_bytes().count(b"\n") > 10):
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[1]) if number == signal.SIGKILL else process.pid, number)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == code, errors
    assert words in errors
    assert errors.strip().count("\n") == 0, errors
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()], "no process is left behind"
    result = xl("info", tmp_path / "run", "--all")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 1e30, "warmup_steps": 0}, "became nan at step 2"),  # found by the first process
        ({"text": "none.txt"}, "none.txt could not be read"),  # found by every process
    ],
)
def test_a_mistake_that_the_processes_find_is_one_sentence(
    change: dict[str, object], words: str, make_config: Make, tmp_path: Path
) -> None:
    process = training_command(make_config(threads=0, **change), tmp_path)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 2
    assert errors.startswith("Error: ")
    assert errors.count("\n") == 1, errors
    assert words in errors
    assert "is trained" not in output


HELD = """
import os
import time
from trainer.training.state import Training
from xl_export.cli.main import main

advance = Training.advance

def held(training, tokens):
    while training.step >= int(os.environ["LAST_STEP"]):
        time.sleep(0.01)
    return advance(training, tokens)

Training.advance = held
main()
"""


def kill_and_resume(config: TrainConfig, folder: Path, *, kills: int) -> int:
    """Trains `folder`/killed in processes that SIGKILL ends at random moments, and then to its end; returns
    how many were killed. Each waits for its end after some steps more, so that none ends before.
    """
    write_json(folder / "config.json", to_json(config))
    (folder / "held.py").write_text(HELD)
    killed = folder / "killed"
    words: list[object] = [folder / "config.json", "--out", killed]
    done = 0
    chance = random.Random(0)
    for number in range(kills):
        lines = (number + 0.5) * config.steps / kills
        process = started(
            folder / f"output{number}",
            *("train", *words),
            environment={"LAST_STEP": str(int((number + 1) * config.steps / kills) - 1)},
            script=folder / "held.py",
        )
        while process.is_alive() and not (
            killed.is_dir() and (killed / "metrics.jsonl").read_bytes().count(b"\n") > lines
        ):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)
        process.kill()
        process.join()
        done += process.exitcode == -signal.SIGKILL
        words = ["--resume", killed]
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


HOLD = """
import sys, time
from pathlib import Path
from runtimes.base.lock import only_writer
with only_writer(Path(sys.argv[1]), doing="trained"):
    time.sleep(100)
"""


def test_a_run_in_training_is_neither_resumed_nor_replaced(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(steps=6, checkpoint_every=3)
    run = tmp_path / "run"
    train_until(config, run, step=4)
    metrics = (run / "metrics.jsonl").read_bytes()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)]) as other:
        while not (run / LOCK).is_file() or not (run / LOCK).read_bytes():
            assert other.poll() is None
            time.sleep(0.01)
        refusal = f"is being written by another process (trained by process {other.pid} on "
        refused(xl("train", "--resume", run), refusal)
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
