"""Several processes under `torchrun`: the losses of one, its checkpoints on any number, and one sentence when
one is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtimes.base.errors import ConfigError, UserError
from runtimes.contract.rule import MemoryRule
from tests.nightly import every
from tests.trainer.training.ranks import in_ranks
from tests.trainer.training.runs import longer
from trainer.model.config import SpanConfig, VocabularyConfig
from trainer.run.config import Averaging, TrainConfig
from trainer.training.loop import resume, train
from trainer.training.parallel import Ranks

Make = Callable[..., TrainConfig]


def test_a_gpu_that_is_not_there_is_one_sentence(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"PyTorch sees 0 GPUs for process 1 .* give --device cpu, or"):
        train(make_config(device="cuda"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_processes_with_different_configurations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two machines of which one has an older file."""

    def gathered(values: list[str], own: str) -> None:
        values[:] = [own, "another"]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    with pytest.raises(ConfigError, match="the processes of this run have different configurations or texts"):
        Ranks(count=2).agree("configurations or texts", "one")


def test_what_all_processes_find_is_said_by_the_first() -> None:
    with pytest.raises(UserError, match="no"):
        Ranks(rank=0, count=2).refuse(UserError("no"))
    with pytest.raises(SystemExit) as caught:
        Ranks(rank=1, count=2).refuse(UserError("no"))
    assert caught.value.code == 2


SHARDED = """
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


def sharded_run(make_config: Make, folder: Path, **recipe: Any) -> None:
    """Alone, then two processes that share the weights, then alone again, against alone all the time."""
    # Two processes add gradients in another order, which bf16 rounds at other places.
    noise = 20 if recipe.get("autocast") == "bf16" else 1
    sizes = {
        "positions": "learned",
        "context": 17,
        "span": SpanConfig(maximum=16, ramp=4, initial=0.9, penalty=0.1),
        "vocabulary": VocabularyConfig(cutoffs=(7, 15), div_val=2),
        "training": MemoryRule(mem_len=16, segment=8, include_self=False),
        "evaluation": MemoryRule(mem_len=16, segment=8, include_self=False),
    }
    recipe |= {"accumulate": 2, "schedule": "constant", "validate_every": 3, "checkpoint_every": 3}
    recipe |= {"averaging": Averaging(start_step=1), "validate_tokens": 90, "clip": 0.05}
    configs = [
        make_config(steps=steps, batch=8, parallel="fsdp", sample_tokens=3, **recipe, **sizes)
        for steps in (3, 9)
    ]
    train(configs[0], folder / "shared", progress=False)
    longer(folder / "shared", 7)
    script = folder / "sharded.py"
    script.write_text(SHARDED)
    command: list[object] = ["train", "--resume", folder / "shared"]
    for ended in in_ranks(folder, [command, command], script=script):
        assert ended.code == 0, ended.errors
        assert "half of every weight" in ended.output
    tensors = load_file(folder / "shared/training.safetensors")
    assert len(tensors["random"]) == 2
    longer(folder / "shared", 9)
    resume(folder / "shared", progress=False)
    train(configs[1], folder / "alone", progress=False)
    lines = [
        [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("shared", "alone")
    ]
    for name, count in {"loss_nats": 9, "gradient_norm": 9}.items():
        shared, alone = ([line[name] for line in each if name in line] for each in lines)
        assert len(alone) == count
        assert shared == pytest.approx(alone, rel=1e-4 * noise), name
    shared, alone = (
        {line["step"]: line["validation_bits_per_token"] for line in each if "best_step" in line}
        for each in lines
    )
    assert {step: shared[step] for step in alone} == pytest.approx(alone, abs=1e-5 * noise)
    saved, other = (load_file(folder / name / "training.safetensors") for name in ("shared", "alone"))
    for name in sorted(set(other) - {"random"}):
        torch.testing.assert_close(
            saved[name],
            other[name],
            rtol=1e-2 * noise,
            atol=1e-3 * noise,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(
    "change",
    every(2, [{"checkpoint_activations": True, "autocast": "bf16"}, {}]),
    ids=["computed again in bf16", "plain"],
)
def test_sharded_weights_train_as_whole_ones(
    make_config: Make, tmp_path: Path, change: dict[str, Any]
) -> None:
    sharded_run(make_config, tmp_path, **change)


@pytest.mark.slow
def test_sharded_weights_train_with_adagrad_whose_clipping_is_by_tensor(
    make_config: Make, tmp_path: Path
) -> None:
    sharded_run(make_config, tmp_path, optimizer="adagrad")
