"""The same models in PyTorch on the GPU: eager and compiled, in fp32 and fp16, compared with the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.configs import BenchmarkConfig
from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.first_hour.steps import timed
from benchmarks.first_hour.steps.models import config_of, rule_of, run_folder
from benchmarks.measure import take_turns
from runtimes.contract.precision import Precision
from trainer.model.model import LanguageModel
from trainer.model.projected import ProjectedModel
from trainer.run.checkpoint import load_run

DEVICE = "cuda"
SIDES = ((False, False), (True, False), (False, True), (True, True))  # in halves, compiled
COMPARED = 3  # segments


def run(record: Record, *, size: str) -> None:
    """Keeps differences from the CPU and times of one token and of a segment."""
    if not torch.cuda.is_available():
        raise NotHereError("PyTorch sees no GPU; install its CUDA build.")
    config = config_of(size, quick=record.quick)
    model = load_run(run_folder(record, config)).model.eval()
    expected = Stream(model, config).answers()
    for halves, compiled in SIDES:
        side = f"PyTorch {'compiled' if compiled else 'eager'}, {'fp16' if halves else 'fp32'}"
        with record.attempt(side):
            dtype = torch.float16 if halves else torch.float32
            moved = copy.deepcopy(model).to(DEVICE, dtype)
            _one_side(record, moved, config, expected, side=side, halves=halves, compiled=compiled)
            del moved
            torch.cuda.empty_cache()


class Stream:
    """Streams whose memory of keys and values stays on the device of the model."""

    def __init__(
        self, model: LanguageModel, config: BenchmarkConfig, *, batch: int = 1, compiled: bool = False
    ) -> None:
        self.model, self.config, self.rule = model, config, rule_of(config)
        weight = next(model.parameters())
        self.device, m = weight.device, config.model
        shape = (batch, m.heads, self.rule.mem_len, m.head_dim)
        self.memory = [
            torch.zeros(shape, device=self.device, dtype=weight.dtype) for _ in range(2 * m.layers)
        ]
        self.position = torch.zeros(batch, dtype=torch.int64, device=self.device)
        projected = ProjectedModel(model, self.rule)

        def step(tokens: Tensor, memory: list[Tensor], position: Tensor) -> tuple[Tensor, list[Tensor]]:
            hidden, after = projected.step(tokens, memory, position)
            return model.vocabulary.logits(hidden[:, -1:]), after

        self._step: Callable[..., Any] = torch.compile(step, dynamic=False) if compiled else step

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, 1, V] after the last of the tokens [B, T]; the memory goes on."""
        with torch.inference_mode():
            logits, self.memory = self._step(tokens, self.memory, self.position)
            self.position = self.position + tokens.shape[1]
        answer: Tensor = logits
        return answer

    def wait(self) -> None:
        """Returns when the device has computed all steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def answers(self) -> Tensor:
        """Log-probabilities on the CPU after each of a few segments and single tokens."""
        draw, pieces = np.random.default_rng(0), []
        for length in [self.rule.segment] * COMPARED + [1, 1]:
            tokens = torch.from_numpy(draw.integers(0, self.config.model.vocab_size, (1, length)))
            pieces.append(self.step(tokens.to(self.device)).float().log_softmax(-1).cpu())
        return torch.cat(pieces, dim=1)


def _one_side(
    record: Record,
    model: LanguageModel,
    config: BenchmarkConfig,
    expected: Tensor,
    *,
    side: str,
    halves: bool,
    compiled: bool,
) -> None:
    precision: Precision = "fp16" if halves else "fp32"
    tolerance = timed.tolerance_of(precision)
    worst = float((Stream(model, config, compiled=compiled).answers() - expected).abs().max())
    right = worst <= tolerance
    said = f"differs from the CPU by at most {worst:.2e} nats (tolerance {tolerance:g})"
    record.check(side, right, said)
    if not right:
        return
    for batch in timed.BATCHES:
        for tokens, repeats in ((1, config.token_repeats), (config.segment, 4 * config.repeats)):
            stream = Stream(model, config, batch=batch, compiled=compiled)
            stream.position += 2 * stream.rule.slots  # all of the memory is visible
            segment = torch.zeros((batch, tokens), dtype=torch.int64, device=stream.device)

            def call(stream: Stream = stream, segment: Tensor = segment) -> None:
                stream.step(segment)
                stream.wait()

            timing = take_turns({"step": call}, repeats=repeats)["step"]
            timed.keep(
                record,
                timing,
                config,
                side=side,
                form="shift",
                precision=precision,
                halves=halves,
                batch=batch,
                tokens=tokens,
            )
