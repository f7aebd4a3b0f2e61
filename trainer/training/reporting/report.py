"""What a training reports while it runs: on the terminal and in the record of the run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from runtimes.base.terminal import printable
from runtimes.contract.tokens import ReadText, predicted_size
from trainer.data.source import Source
from trainer.model.model import count_parameters
from trainer.training.reporting.journal import Journal
from trainer.training.reporting.utilisation import multiply_adds_per_token, peak_multiply_adds
from trainer.training.state import Step, Training

BAR_SECONDS = 0.5  # seconds between two losses on the progress bar
LINE_SECONDS = 10.0  # seconds between two lines where there is no terminal to draw a bar on


class Pace:
    """Tokens per second since the last report, without the time of validations and checkpoints."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Counts tokens that a step has read."""
        self._tokens += tokens

    @property
    def tokens_per_second(self) -> float:
        """The rate since the last report."""
        return self._tokens / max(time.perf_counter() - self._since, 1e-9)

    def report(self) -> float:
        """Returns the rate since the last report, and begins to count anew."""
        rate = self.tokens_per_second
        self._since = time.perf_counter()
        self._tokens = 0
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose time does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began


class Report:
    """The report of one process. Only the first one writes the record, and only with `progress` it prints.

    On a terminal the losses are next to a progress bar. Elsewhere, as in the file of a job, every loss is a
    line of its own, at most one in 10 seconds. It is a context manager. pace: the speed of training.
    """

    def __init__(self, training: Training, run: Path, source: Source, *, progress: bool) -> None:
        self.training = training
        self.config = training.config
        self.source = source
        self.progress = progress
        on_terminal = sys.stderr.isatty()
        if progress and not training.finished:
            print(
                f"training on {source.name}: {source.tokens.size:,} tokens, vocabulary "
                f"{source.vocab.size:,}, {count_parameters(self.config.model):,} parameters, "
                f"{training.ranks.device}{_idle_gpu(training.ranks.device)}",
                flush=not on_terminal,
            )
        first = training.ranks.is_first
        self.journal = Journal(run, self.config, step=training.step) if first else None
        busy = first and not training.finished
        self.peak = peak_multiply_adds(self.config, training.ranks) if busy else None
        self.lines = progress and not on_terminal
        self.bar = tqdm(
            total=self.config.steps,
            initial=training.step,
            unit="step",
            disable=not progress or not on_terminal,
            dynamic_ncols=True,
        )
        self.pace = Pace()
        self._began = time.monotonic()
        self._shown = -math.inf
        self._first_step = training.step

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
        if self.journal:
            self.journal.close()

    def say(self, line: str) -> None:
        """Prints a line on standard output, above the progress bar."""
        if self.progress:
            self.bar.write(line)
            if self.lines:
                sys.stdout.flush()

    def step(self, result: Step, *, logs: bool) -> None:
        """Counts a step and shows it where it is time to. logs: whether it belongs to the record.

        To read a loss waits for the device, so it is read only where it is shown.
        """
        self.pace.add(result.tokens)
        steps = self.training.config.steps  # a training that became slower is shortened
        last = result.number == steps
        now = time.monotonic()
        waited = now - self._shown
        if self.bar.disable is False and (waited >= BAR_SECONDS or last):
            self._shown = now
            # Without `refresh=False` tqdm would draw the bar at every step instead of ten times a second.
            self.bar.set_postfix_str(self._facts(result, self.pace.tokens_per_second), refresh=False)
        self.bar.total = steps
        self.bar.update()
        if logs and self.journal:
            speed = self.pace.report()
            if self.lines and (waited >= LINE_SECONDS or last):
                self._shown = now
                self.say(f"step {result.number:,} of {steps:,}: {self._facts(result, speed)}")
            loss = float(result.nats)
            self.journal.write(
                result.number,
                loss_nats=loss,
                bits_per_token=loss / math.log(2),
                learning_rate=result.learning_rate,
                gradient_norm=float(result.gradient_norm),
                tokens_per_second=speed,
                mfu=self._mfu(result.number, speed),
                seconds=self._seconds(),
            )

    def validation(self, facts: dict[str, Any], line: str) -> None:
        """Records the facts of a validation; prints the line, and the text `sample` of the facts."""
        sample = facts.get("sample")
        if self.journal and (each := self.tokens_per_byte) is not None:
            facts = {**facts, "validation_bits_per_byte": facts["validation_bits_per_token"] * each}
        self.say(line if sample is None else f"{line}\n  sample: {printable(sample)}")
        if self.journal:
            self.journal.write(self.training.step, **facts, seconds=self._seconds())

    @cached_property
    def tokens_per_byte(self) -> float | None:
        """Predicted tokens for each byte of the text that is validated; None if tokens have no text."""
        _, limit = self.training.validation_extent
        tokens = np.asarray(self.source.valid[: (limit or len(self.source.valid)) + 1])
        size = predicted_size(ReadText(tokens=tokens), self.source.vocab)
        return None if size is None or not size.num_bytes else (len(tokens) - 1) / size.num_bytes

    def _facts(self, result: Step, speed: float) -> str:
        mfu = self._mfu(result.number, speed)
        left = (self.training.config.steps - result.number) * (time.monotonic() - self._began)
        left /= max(1, result.number - self._first_step)
        return (
            f"{float(result.nats) / math.log(2):.3f} bits/token, lr {result.learning_rate:.3g}, gradient "
            f"{float(result.gradient_norm):.3g}, {speed:,.0f} tokens/s"
            + ("" if mfu is None else f", MFU {mfu:.0%}")
            + (f", {_duration(left)} left" if self.lines else "")
        )

    def _mfu(self, number: int, speed: float) -> float | None:
        if self.peak is None:
            return None
        lengths = self.training.span_lengths.lengths  # of the step that is reported; empty without spans
        reached = speed * multiply_adds_per_token(self.config, number - 1, lengths)
        is_measured = self.config.peak_tflops is None and self.training.ranks.device.type == "cpu"
        # Beyond the peak, others used the processor when it was measured: it is not known.
        return None if is_measured and reached > self.peak else reached / self.peak

    def _seconds(self) -> float:
        assert self.journal
        return round(self.journal.seconds + time.monotonic() - self._began, 3)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def _idle_gpu(device: torch.device) -> str:
    """What the first line adds where the CPU trains and PyTorch sees a GPU; otherwise nothing."""
    if device.type != "cpu":
        return ""
    kinds = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return "".join(f" (there is a GPU; --device {kind} takes it)" for kind, there in kinds.items() if there)
