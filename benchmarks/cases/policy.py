"""Steps of a policy at 1 kHz on one thread: the artefact in Python and C++, PyTorch, and a growing window.

Every side has the same weights: layers of attention over keys and values, from 12 measurements to 4 action
logits. The growing window is PyTorch with a cache of the whole episode. It has room for all steps from the
start, so it never copies, and it stops once half of its steps take longer than the period.

A step is timed from its call to its answer, after a sleep until it is due, as in a control loop. A step is
late if its answer comes after the next step is due.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runtimes
import xl_export
from benchmarks.case import Case, Column, Job, Line, microseconds
from benchmarks.cases.web import compiled, has_cpp
from benchmarks.checked_sessions import agreed
from benchmarks.measure import Timing
from runtimes.base.errors import ArtefactError
from trainer.model.config import ModelConfig

HZ = 1000
STEPS = 100_000  # of each side
PART = 1000  # steps of one turn
WARM = 50  # untimed steps of each side before its first turn
OBSERVATION, ACTIONS = 12, 4
TOLERANCE = 1e-4
CHECKED = 50  # steps beyond the memory's length that are compared before anything is timed


class Policy(nn.Module):
    """A Transformer-XL over observations, whose memory is the last M keys and values of each layer."""

    inputs = {"observation": xl_export.features(OBSERVATION)}  # noqa: RUF012

    def __init__(self, config: ModelConfig, mem_len: int) -> None:
        super().__init__()
        self.mem_len = mem_len
        self.layers = [_Layer(config, mem_len) for _ in range(config.layers)]
        self.registered = nn.ModuleList(self.layers)  # for their parameters
        self.encoder = nn.Linear(OBSERVATION, config.d_model)
        self.action = nn.Linear(config.d_model, ACTIONS)
        self.row = (config.heads, mem_len, config.d_model // config.heads)  # of one tensor of the memory

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, *self.row) for _ in range(2 * len(self.layers))]

    def step(
        self, inputs: dict[str, Tensor], positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The memory may also be longer than M: then more is visible, and the oldest of it is M steps old."""
        x = self.encoder(inputs["observation"])
        T, M = x.shape[1], memory[0].shape[2]
        distance = torch.arange(T)[:, None] + M - torch.arange(M + T)
        hidden = (distance < 0) | (distance > M) | (distance > positions[:, :, None].clamp(min=0))
        after = []
        for index, layer in enumerate(self.layers):
            x, key, value = layer(x, *memory[2 * index : 2 * index + 2], distance, hidden)
            after += [key[:, :, T:], value[:, :, T:]]
        return {"action": self.action(x)}, after


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, mem_len: int) -> None:
        super().__init__()
        D = config.d_model
        self.heads, self.mem_len = config.heads, mem_len
        self.by_distance = nn.Parameter(torch.randn(config.heads, mem_len + 1))
        self.query_key_value, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.feed_forward = nn.Sequential(nn.Linear(D, config.d_ff), nn.ReLU(), nn.Linear(config.d_ff, D))

    def heads_of(self, x: Tensor) -> list[Tensor]:
        """Query, key and value [B, H, T, K]."""
        parts = self.query_key_value(self.norms[0](x)).chunk(3, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def after(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        answer = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(answer.transpose(1, 2).flatten(2))
        x = x + self.feed_forward(self.norms[1](x))
        return x

    def forward(
        self, x: Tensor, key: Tensor, value: Tensor, distance: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, new_key, new_value = self.heads_of(x)
        key, value = torch.cat([key, new_key], dim=2), torch.cat([value, new_value], dim=2)
        mask = self.by_distance[:, distance.clamp(0, self.mem_len)]
        mask = mask.masked_fill(hidden[:, None], float("-inf"))
        return self.after(x, query, key, value, mask), key, value


class _Here:
    """A side in this process. step: answers one observation [12] with logits [4].

    times: milliseconds of each of the next steps at `HZ`, and how many were late; so for `_Cpp`.
    """

    def __init__(self, step: Callable[[np.ndarray], np.ndarray]) -> None:
        self.step = step
        self._draw = np.random.default_rng(0)

    def times(self, steps: int) -> tuple[list[float], int]:
        found = []
        late = 0
        due = time.perf_counter()
        for observation in self._draw.uniform(-1, 1, (steps, OBSERVATION)).astype(np.float32):
            due = max(due + 1 / HZ, time.perf_counter())  # one late step does not make the next ones late
            time.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            self.step(observation)
            ended = time.perf_counter()
            found.append((ended - began) * 1e3)
            late += ended > due + 1 / HZ
        return found, late


class _Cpp:
    """The program cpp/examples/control.cpp, which checks the artefact by its reference when it starts."""

    def __init__(self, artefact: Path, folder: Path) -> None:
        command = [str(compiled("control", folder)), str(artefact), str(HZ)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        difference, _, verdict = self._line().partition(" ")
        if verdict != "passed":
            raise ArtefactError(
                f"the C++ library differs from the reference by {difference}; nothing was timed."
            )

    def times(self, steps: int) -> tuple[list[float], int]:
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        *found, late = map(float, self._line().split())
        return found, int(late)

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line.strip()
        _, sentence = self._process.communicate()
        raise ArtefactError(f"the C++ program ended ({sentence.strip()}); please report this.")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side."""

    side: str
    mem_len: int
    step: Timing
    p99: float  # milliseconds within which 99 % of the steps answered
    late: int  # steps whose answer came after the next step was due
    steps: int  # timed; fewer than asked for if a growing window became too slow


def run(job: Job) -> list[Row]:
    """A row for each side; repeats are timed steps. Nothing is timed before all sides agree."""
    steps = job.repeats(STEPS)
    M = job.rule.mem_len
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = Policy(job.config.model, M).eval()
    with contextlib.ExitStack() as stack:
        job.progress("tracing the policy and comparing all sides with PyTorch")
        rule = xl_export.MemoryRule(mem_len=M, segment=1)
        artefact = xl_export.trace(policy, job.folder / "artefact", rule=rule, rows=1)
        sides: dict[str, _Here | _Cpp] = {}
        _compare(policy, artefact, M)
        sides["artefact, Python"] = _Here(_artefact_step(artefact))
        if has_cpp():
            cpp = _Cpp(artefact, job.folder)
            stack.callback(cpp.close)
            sides["artefact, C++"] = cpp
        sides["PyTorch"] = _Here(_pytorch_step(policy))
        sides["PyTorch, growing window"] = _Here(_growing_step(policy, WARM + steps))
        job.progress(f"timing {steps:,} steps of each side at {HZ:,} Hz, in turns of {PART:,}")
        found = _in_turns(sides, steps)
    return [
        Row(
            side=side,
            mem_len=M,
            step=Timing.of(ms),
            p99=float(np.percentile(ms, 99)),
            late=late,
            steps=len(ms),
        )
        for side, (ms, late) in found.items()
    ]


def _in_turns(sides: dict[str, _Here | _Cpp], steps: int) -> dict[str, tuple[list[float], int]]:
    """The milliseconds of each side's steps, and how many were late; the sides take turns."""
    found: dict[str, tuple[list[float], int]] = {side: ([], 0) for side in sides}
    active = dict(sides)
    for side in sides.values():
        side.times(WARM)
    for at in range(0, steps, PART):
        for name, side in list(active.items()):
            times, late = side.times(min(PART, steps - at))
            found[name] = (found[name][0] + times, found[name][1] + late)
            if name == "PyTorch, growing window" and median(times) > 1e3 / HZ:
                del active[name]
    return found


def _artefact_step(artefact: Path) -> Callable[[np.ndarray], np.ndarray]:
    session = runtimes.open_session(artefact, threads=1, device="cpu")
    memory = session.start(1)

    def step(observation: np.ndarray) -> np.ndarray:
        outputs, _ = session.step({"observation": observation[None, None]}, memory)
        logits: np.ndarray = outputs["action"][0, 0]
        return logits

    return step


def _pytorch_step(policy: Policy) -> Callable[[np.ndarray], np.ndarray]:
    memory = policy.start(1)
    position = torch.zeros(1, 1, dtype=torch.long)

    @torch.inference_mode()
    def step(observation: np.ndarray) -> np.ndarray:
        nonlocal memory
        outputs, memory = policy.step(
            {"observation": torch.from_numpy(observation)[None, None]}, position, memory
        )
        position.add_(1)
        return outputs["action"][0, 0].numpy()

    return step


def _growing_step(policy: Policy, most: int) -> Callable[[np.ndarray], np.ndarray]:
    """Attention over the whole episode of at most `most` steps."""
    heads, _, width = policy.row
    caches = [(torch.zeros(1, heads, most, width), torch.zeros(1, heads, most, width)) for _ in policy.layers]
    at = 0

    @torch.inference_mode()
    def step(observation: np.ndarray) -> np.ndarray:
        nonlocal at
        x = policy.encoder(torch.from_numpy(observation)[None, None])
        distance = torch.arange(at, -1, -1).clamp(max=policy.mem_len)
        for layer, (keys, values) in zip(policy.layers, caches, strict=True):
            query, keys[:, :, at : at + 1], values[:, :, at : at + 1] = layer.heads_of(x)
            mask = layer.by_distance[:, None, distance]
            x = layer.after(x, query, keys[:, :, : at + 1], values[:, :, : at + 1], mask)
        at += 1
        return policy.action(x)[0, 0].numpy()

    return step


def _compare(policy: Policy, artefact: Path, mem_len: int) -> None:
    """Raises ArtefactError if the artefact differs from PyTorch, or the growing window until it is full."""
    exact = _pytorch_step(policy)
    others = {
        "artefact, Python": _artefact_step(artefact),
        "PyTorch, growing window": _growing_step(policy, mem_len + CHECKED),
    }
    observations = np.random.default_rng(1).uniform(-1, 1, (mem_len + CHECKED, OBSERVATION))
    for at, observation in enumerate(observations.astype(np.float32)):
        expected = exact(observation)
        for side, step in others.items():
            difference = float(np.abs(step(observation) - expected).max())
            if at <= mem_len or "growing" not in side:
                agreed(difference, TOLERANCE, f"{side} differs from PyTorch", "of a logit")


def _notes(lines: Sequence[Line]) -> list[str]:
    row, run = lines[0]
    model = run.document["model"]
    return [
        f"{HZ:,} steps a second on one thread. {model['layers']} layers, D {model['d_model']}, fp32, memory "
        f"of {row['mem_len']:,} steps. The growing window stops when half of {PART:,} steps take longer than "
        f"{1e3 / HZ:g} ms."
    ]


CASE = Case(
    name="policy",
    run=run,
    keys=("side", "mem_len"),
    columns=(
        Column("side", "side"),
        Column("steps", "steps"),
        Column("median, µs", "step", microseconds),
        Column("99 % within, µs", "p99", microseconds),
        Column("slowest, µs", "step.slowest", microseconds),
        Column("late steps", "late"),
    ),
    notes=_notes,
    options=("config", "repeats", "mem-len"),
    published=lambda history: history.of("policy")[-1:],
)
