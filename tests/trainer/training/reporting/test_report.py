"""What training says: lines where there is no terminal, the record, samples, and the share of the peak."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtimes.contract.sampling import Sampler
from runtimes.contract.vocabulary import CharVocab, IdsVocab, load_vocab
from runtimes.tasks.generate import generate
from tests.trainer.training.runs import lines_of, values
from trainer.model.arithmetic import training_multiply_adds
from trainer.model.config import ModelConfig, SpanConfig
from trainer.model.model import LanguageModel
from trainer.run.config import TrainConfig
from trainer.run.session import TorchSession
from trainer.training.loop import train
from trainer.training.parallel import Ranks
from trainer.training.reporting import report as report_module
from trainer.training.reporting import utilisation
from trainer.training.reporting.sample import sample_text
from trainer.training.reporting.utilisation import multiply_adds_per_token, peak_multiply_adds, peak_of
from trainer.training.schedule import training_rule

Make = Callable[..., TrainConfig]


def test_losses_are_plain_lines_where_there_is_no_terminal(
    make_config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "LINE_SECONDS", 0.0)
    run = train(make_config(steps=4, log_every=2, validate_every=4, sample_tokens=9), tmp_path / "run")
    output, errors = capsys.readouterr()
    assert errors == ""
    assert "\r" not in output
    steps = [line for line in output.splitlines() if line.startswith("step")]
    losses = values(run, "bits_per_token")
    pattern = r"step %s of 4: %s bits/token, lr \S+, gradient \S+, [\d,]+ tokens/s, MFU \d+%%, \d+m\d\ds left"
    for step, loss, line in zip((2, 4), losses, steps[:2], strict=True):
        assert re.fullmatch(pattern % (step, f"{loss:.3f}"), line), line
    assert steps[2].startswith("step 4 of 4: validation ")
    sample = lines_of(run)[-1]["sample"]
    assert len(sample) == 9
    assert output.splitlines()[-1].startswith("  sample: ")
    assert train(make_config(steps=1), tmp_path / "quiet", progress=False).is_dir()
    assert capsys.readouterr().out == ""


def test_the_record_holds_speed_norm_rate_and_time(make_config: Make, tmp_path: Path) -> None:
    config = make_config(steps=6, segment_schedule=((4, 3),), peak_tflops=0.5)
    lines = [line for line in lines_of(train(config, tmp_path / "run", progress=False)) if "mfu" in line]
    assert len(lines) == 6
    model = dataclasses.replace(
        config.model, vocab_size=CharVocab.build(Path(config.text or "").read_text()).size
    )
    for line in lines:
        rule = training_rule(config, line["step"] - 1)
        each = training_multiply_adds(model, rule, 4) / (4 * rule.segment)
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * each * 2 / 0.5e12)
        assert line["gradient_norm"] > 0
    assert {line["learning_rate"] > 0 for line in lines} == {True}
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


def test_validations_are_recorded_for_each_byte_of_the_text(make_config: Make, tmp_path: Path) -> None:
    run = train(make_config(steps=2, vocab="word", validate_tokens=40), tmp_path / "run", progress=False)
    (facts,) = [line for line in lines_of(run) if "validation_bits_per_byte" in line]
    held_out = (run / "valid.txt").read_bytes().decode()
    vocabulary = load_vocab(run / "vocab.json")
    tokens = vocabulary.encode(held_out)[:41]
    num_bytes = len("".join(map(vocabulary.decoder(), tokens.tolist())).encode())
    first = len("".join(map(vocabulary.decoder(), tokens[:1].tolist())).encode())
    ratio = facts["validation_bits_per_byte"] / facts["validation_bits_per_token"]
    assert ratio == pytest.approx((len(tokens) - 1) / (num_bytes - first))


@pytest.mark.parametrize("sizes", [{}, {"positions": "learned", "context": 9, "span": SpanConfig(maximum=8)}])
def test_a_sample_is_what_generate_writes(make_config: Make, sizes: dict[str, Any]) -> None:
    config = make_config(vocab_size=20, sample_tokens=12, **sizes)
    torch.manual_seed(0)
    model = LanguageModel(config.model)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.4)
    model.constrain()
    tokens = np.random.default_rng(0).integers(0, 20, 300)
    before = torch.get_rng_state()
    text = sample_text(model.train(), config, IdsVocab(20), tokens)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    session = TorchSession(model.eval(), IdsVocab(20), config.evaluation, weights="x")
    pieces = generate(
        session, tokens[:64], max_tokens=12, sampler=Sampler(top_k=40), seed=config.seed, text=False
    )
    drawn = [piece.token for piece in pieces]
    assert len(drawn) == len(text.split()) == 12
    assert [int(word) for word in text.split()] == drawn


def test_the_peak_of_a_gpu_follows_from_its_name() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3", halves=True) == 989.4
    assert peak_of("NVIDIA H100 80GB HBM3", halves=False) == 66.9
    assert peak_of("NVIDIA H100 PCIe", halves=True) == 756.5
    assert peak_of("NVIDIA A100-SXM4-40GB", halves=True) == 312.0
    assert peak_of("NVIDIA L40S", halves=True) == 362.1
    assert peak_of("NVIDIA L4", halves=True) == 121.0
    assert peak_of("NVIDIA A1000 Laptop GPU", halves=True) is None
    assert peak_of("Tesla T40", halves=True) is None


def test_the_peak_of_a_cpu_is_measured_or_given(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Ranks()
    assert peak_multiply_adds(make_config(peak_tflops=3.0), Ranks(count=2)) == 3e12
    before = torch.get_rng_state()
    measured = peak_multiply_adds(make_config(peak_tflops=None), alone)
    assert measured is not None
    assert 1e8 < measured < 1e15
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(utilisation, "_measured_tflops", {torch.float32: 1.0, torch.bfloat16: 3.0}.get)
    assert peak_multiply_adds(make_config(peak_tflops=None, autocast="bf16"), alone) == 1.5e12


def test_a_share_beyond_a_measured_peak_is_not_recorded(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others used the processor when the peak was measured."""
    monkeypatch.setattr(report_module, "peak_multiply_adds", lambda config, ranks: 1.0)
    run = train(make_config(steps=3, peak_tflops=None), tmp_path / "run", progress=False)
    assert values(run, "mfu") == [None] * 3


@pytest.mark.parametrize("lengths", [None, (8, 40)], ids=["every key", "spans"])
def test_multiply_adds_are_those_of_the_matrix_products(
    lengths: tuple[int, int] | None, make_config: Make
) -> None:
    """Counted by PyTorch over a forward pass: the two differ in the products of distances alone."""
    from torch.utils.flop_counter import FlopCounterMode

    from runtimes.contract.rule import MemoryRule

    rule = MemoryRule(mem_len=24, segment=8)
    config = ModelConfig(layers=2, d_model=32, heads=2, head_dim=16, d_ff=64, vocab_size=50)
    model, start = LanguageModel(config), torch.zeros(3, dtype=torch.int64)
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        _, outputs = model.inputs_and_outputs(tokens, model.start(3, rule), start, rule, longest=lengths)
        model.vocabulary.logits(model.last(outputs))
    counted = 3 * counter.get_total_flops() / 2
    assert training_multiply_adds(config, rule, 3, lengths) == pytest.approx(counted, rel=0.1)
    recipe = make_config(training=rule)
    recipe = dataclasses.replace(recipe, model=config)
    assert multiply_adds_per_token(recipe, 0, lengths) == pytest.approx(counted / (3 * 8), rel=0.1)
