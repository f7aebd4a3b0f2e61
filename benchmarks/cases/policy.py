"""Steps of a policy at 1 kHz on one thread, as in a control loop.

- `sides`: the artefact in Python and C++, PyTorch, and a growing window. Every side has the same weights:
  layers of attention over keys and values, from 12 measurements to 4 action logits. The growing window is
  PyTorch with a cache of the whole episode. It has room for all steps from the start, so it never copies, and
  it stops once half of its steps take longer than the period.
- `real-time`: an LSTM, a GRU, a Transformer-XL and a GTrXL in Python and C++, while a process for each CPU
  computes: with ordinary scheduling, and with a priority of SCHED_FIFO, locked memory and one CPU.

A step is timed from its call to its answer, after a sleep until its tick. A step is late if its answer comes
after the next tick. A tick that has passed when its turn comes is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runtimes
import xl_export
from benchmarks.cases.overhead import computing
from benchmarks.checked_sessions import agreed
from benchmarks.harness import Column, Job, Row, megabytes, microseconds, only_option
from benchmarks.machine import checkout
from benchmarks.measure import timing
from runtimes.base.errors import ArtefactError
from runtimes.base.machine import available_cpus
from trainer.model.config import ModelConfig

PARTS = ("sides", "real-time")
HZ = 1000
TICKS = {"sides": 100_000, "real-time": 10_000}  # of each side
TURN_TICKS = 2000  # of one turn
WARMUP_STEPS = 50  # untimed steps of each side in this process before its first turn
OBSERVATION, ACTIONS = 12, 4
TOLERANCE = 1e-4  # of a logit
PYTHON, CPP, PYTORCH, GROWING = "artefact, Python", "artefact, C++", "PyTorch", "PyTorch, growing window"
ORDINARY, REAL_TIME = "ordinary", "real time"
ROOT = Path(__file__).parents[2]
CPP_SOURCES = ROOT / "cpp"
CHECKED_STEPS = 50  # steps beyond the memory's length that are compared before anything is timed
OPTIONS = (only_option(PARTS, "Measure this part only"),)


class Policy(nn.Module):
    """A Transformer-XL over observations, whose memory is the last M keys and values of each layer."""

    inputs = {"observation": xl_export.features(OBSERVATION)}  # noqa: RUF012

    def __init__(self, config: ModelConfig, mem_len: int, *, gated: bool = False) -> None:
        super().__init__()
        self.mem_len = mem_len
        self.layers = [_Layer(config, mem_len, gated=gated) for _ in range(config.layers)]
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


class _Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class _Gate(nn.Module):
    """GTrXL's gate in the place of a residual (Parisotto et al. 2020, equation 5)."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.of_y, self.of_x = nn.Linear(D, 3 * D), nn.Linear(D, 2 * D, bias=False)
        self.new_x = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        reset, update, new = self.of_y(y.relu()).chunk(3, dim=-1)
        reset_x, update_x = self.of_x(x).chunk(2, dim=-1)
        z = torch.sigmoid(update + update_x - 2.0)
        return (1 - z) * x + z * torch.tanh(new + self.new_x(torch.sigmoid(reset + reset_x) * x))


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, mem_len: int, *, gated: bool) -> None:
        super().__init__()
        D = config.d_model
        self.heads, self.mem_len = config.heads, mem_len
        self.by_distance = nn.Parameter(torch.randn(config.heads, mem_len + 1))
        self.query_key_value, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.joins = nn.ModuleList([_Gate(D) if gated else _Sum() for _ in range(2)])
        self.feed_forward = nn.Sequential(nn.Linear(D, config.d_ff), nn.ReLU(), nn.Linear(config.d_ff, D))

    def heads_of(self, x: Tensor) -> list[Tensor]:
        """Query, key and value [B, H, T, K]."""
        parts = self.query_key_value(self.norms[0](x)).chunk(3, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def after(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        answer = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = self.joins[0](x, self.out(answer.transpose(1, 2).flatten(2)))
        joined: Tensor = self.joins[1](x, self.feed_forward(self.norms[1](x)))
        return joined

    def forward(
        self, x: Tensor, key: Tensor, value: Tensor, distance: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, new_key, new_value = self.heads_of(x)
        key, value = torch.cat([key, new_key], dim=2), torch.cat([value, new_value], dim=2)
        mask = self.by_distance[:, distance.clamp(0, self.mem_len)]
        mask = mask.masked_fill(hidden[:, None], float("-inf"))
        return self.after(x, query, key, value, mask), key, value


class _Here:
    """A side in this process. step: answers one observation [12] with logits [4]."""

    def __init__(self, step: Callable[[np.ndarray], np.ndarray]) -> None:
        self.step = step
        self._draw = np.random.default_rng(0)
        for observation in self._observations(WARMUP_STEPS):
            step(observation)

    def times(self, ticks: int) -> np.ndarray:
        """Steps [N, 3] of the next ticks: tick, milliseconds of the step, and from its tick to its answer."""
        found: list[tuple[int, float, float]] = []
        start = time.perf_counter()
        for tick, observation in enumerate(self._observations(ticks)):
            due = start + tick / HZ
            wait = due - time.perf_counter()
            if found and wait <= -1 / HZ:
                continue
            time.sleep(max(0.0, wait))
            began = time.perf_counter()
            self.step(observation)
            ended = time.perf_counter()
            found.append((tick, (ended - began) * 1e3, (ended - due) * 1e3))
        times: np.ndarray = np.array(found)
        return times

    def _observations(self, count: int) -> np.ndarray:
        return self._draw.uniform(-1, 1, (count, OBSERVATION)).astype(np.float32)


class _Program:
    """A program that steps an artefact, each time in a new process: `control` in examples or cpp/examples.

    Before its first step it replays the reference, PyTorch's answers, and fails if its own differ.
    """

    def __init__(self, program: Sequence[str | Path], artefact: Path, settings: Sequence[str] = ()) -> None:
        self.log = artefact.with_suffix(".csv")
        self.command = [*program, artefact, "--hz", str(HZ), "--log", self.log, *settings]

    def times(self, ticks: int) -> np.ndarray:
        """The steps of the next ticks, as `_Here.times` returns them."""
        command = [*self.command, "--ticks", str(ticks)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            words = (ended.stderr or ended.stdout).strip().splitlines()[-1:]
            raise ArtefactError(f"the control program ended: {' '.join(words)}")
        times: np.ndarray = np.loadtxt(self.log, delimiter=",", skiprows=1, ndmin=2)
        return times


def run(job: Job) -> Iterator[Row]:
    """The rows of the chosen parts; --repeats is the number of ticks of each side."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    parts = job["only"] or (PARTS if checkout() else ("sides",))  # no package has the programs
    if "sides" in parts:
        yield from _sides(job)
    if "real-time" in parts:
        yield from _real_time(job)


def _sides(job: Job) -> Iterator[Row]:
    """A row for each side. Nothing is timed before all sides agree."""
    ticks = job.repeats(TICKS["sides"])
    M = job.rule.mem_len
    policy = Policy(job.config.model, M).eval()
    job.say("tracing the policy and comparing all sides with PyTorch")
    artefact = _traced(policy, job.folder / "policy", M)
    _compare(policy, artefact, M)
    sides: dict[str, _Here | _Program] = {PYTHON: _Here(_artefact_step(artefact))}
    if has_cpp():
        sides[CPP] = _Program([compiled("control", job.folder)], artefact)
    sides[PYTORCH] = _Here(_pytorch_step(policy))
    sides[GROWING] = _Here(_growing_step(policy, WARMUP_STEPS + ticks))
    job.say(f"timing {ticks:,} steps of each side at {HZ:,} Hz, in turns of {TURN_TICKS:,}")
    for side, times in _in_turns(sides, ticks).items():
        yield {"side": side, "mem_len": M, **_facts(times)}


def _real_time(job: Job) -> Iterator[Row]:
    """A row for each network, program and kind of scheduling."""
    ticks, others = job.repeats(TICKS["real-time"]), available_cpus()
    M, D, layers = job.rule.mem_len, job.config.model.d_model, job.config.model.layers
    networks = {
        "LSTM": nn.LSTM(OBSERVATION, D, num_layers=layers),
        "GRU": nn.GRU(OBSERVATION, D, num_layers=layers),
        "Transformer-XL": Policy(job.config.model, M),
        "GTrXL": Policy(job.config.model, M, gated=True),
    }
    programs: dict[str, list[str | Path]] = {"Python": [sys.executable, ROOT / "examples" / "control.py"]}
    if has_cpp():
        programs["C++"] = [compiled("control", job.folder)]
    settings = {ORDINARY: (), REAL_TIME: real_time_settings()}
    sides = {}
    for network, module in networks.items():
        job.say(f"{network}: tracing")
        artefact = _traced(module.eval(), job.folder / network, M)
        for language, program in programs.items():
            for name, given in settings.items():
                sides[network, language, name] = _Program(program, artefact, given)
    try:
        sides["LSTM", "Python", REAL_TIME].times(1)
    except ArtefactError as error:
        job.say(f"real-time scheduling is left out: {error}")
        sides = {key: program for key, program in sides.items() if REAL_TIME not in key}
    job.say(f"timing {ticks:,} ticks of {len(sides)} sides while {others} other processes compute")
    with computing(others):
        found = _in_turns(sides, ticks)
        load = round(os.getloadavg()[0], 1)
    for (network, language, name), times in found.items():
        weights = (job.folder / network / "weights.bin").stat().st_size
        yield {
            "network": network,
            "program": language,
            "settings": name,
            "other_processes": others,
            "load_average": load,
            "mem_len": M,
            "weight_bytes": weights,
            **_facts(times),
        }


def real_time_settings() -> tuple[str, ...]:
    """The options of both programs: a priority above all ordinary processes, locked memory, the last CPU."""
    return ("--priority", "50", "--lock", "--cpu", str(max(os.sched_getaffinity(0))))


def _traced(module: nn.Module, folder: Path, mem_len: int) -> Path:
    rule = xl_export.MemoryRule(mem_len=mem_len, segment=1)
    artefact: Path = xl_export.trace(module, folder, rule=rule, rows=1)
    return artefact


def _facts(found: tuple[np.ndarray, int]) -> Row:
    """The fields of a row. found: steps, and the number of ticks."""
    times, ticks = found
    _, step, answer = times.T
    return {
        "step_ms": timing(step.tolist()),
        "p99_ms": float(np.percentile(step, 99)),
        "answer_ms": timing(answer.tolist()),
        "answer_p99_ms": float(np.percentile(answer, 99)),
        "answer_p999_ms": float(np.percentile(answer, 99.9)),
        "late_steps": int((answer > 1e3 / HZ).sum()),
        "skipped_ticks": ticks - len(times),
        "steps": len(times),
    }


def _in_turns(sides: Mapping[Any, _Here | _Program], ticks: int) -> dict[Any, tuple[np.ndarray, int]]:
    """The steps of each side, and the number of its ticks; the sides take turns."""
    turns: dict[Any, list[np.ndarray]] = {side: [] for side in sides}
    counts = dict.fromkeys(sides, 0)
    active = dict(sides)
    for at in range(0, ticks, TURN_TICKS):
        for name, side in list(active.items()):
            count = min(TURN_TICKS, ticks - at)
            turns[name].append(side.times(count))
            counts[name] += count
            if name == GROWING and np.median(turns[name][-1][:, 1]) > 1e3 / HZ:
                del active[name]
    return {name: (np.concatenate(times), counts[name]) for name, times in turns.items()}


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
        PYTHON: _artefact_step(artefact),
        GROWING: _growing_step(policy, mem_len + CHECKED_STEPS),
    }
    observations = np.random.default_rng(1).uniform(-1, 1, (mem_len + CHECKED_STEPS, OBSERVATION))
    for at, observation in enumerate(observations.astype(np.float32)):
        expected = exact(observation)
        for side, step in others.items():
            difference = float(np.abs(step(observation) - expected).max())
            if at <= mem_len or "growing" not in side:
                agreed(difference, TOLERANCE, f"{side} differs from PyTorch", "of a logit")


def compiled(name: str, folder: Path) -> Path:
    """A program of cpp/examples, compiled into a folder; raises ArtefactError if it cannot be."""
    library = _onnxruntime_library()
    assert library is not None
    linked = folder / "libonnxruntime.so.1"  # the name that the library calls itself
    if not linked.is_symlink():
        linked.symlink_to(library)
    source = CPP_SOURCES / "examples" / f"{name}.cpp"
    program = folder / name
    includes = [f"-I{CPP_SOURCES}", f"-I{CPP_SOURCES / 'third_party' / 'onnxruntime'}"]
    sources = [str(path) for path in (source, *(CPP_SOURCES / "src").glob("*.cpp"))]
    command = ["g++", "-std=c++17", "-O2", *includes, *sources, "-o", str(program), str(linked)]
    ended = subprocess.run([*command, f"-Wl,-rpath,{folder}"], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ArtefactError(f"{source} could not be compiled: {ended.stderr.strip()[:300]}.")
    return program


def has_cpp() -> bool:
    """Whether C++ programs can be compiled against the library of the Python wheel."""
    return bool(checkout() and _onnxruntime_library() and shutil.which("g++"))


def _onnxruntime_library() -> Path | None:
    """The shared library in the Python wheel."""
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"), None)


def _microseconds(name: str) -> Column:
    """Older results do not have every field."""
    return lambda row, _: 1e3 * row[name] if name in row else None


KEYS = ("side", "network", "program", "settings", "mem_len")
COLUMNS = {
    "network": "network",
    "side": "side",
    "program": "program",
    "scheduling": "settings",
    "MB of weights": megabytes("weight_bytes"),
    "steps": "steps",
    "median, µs": microseconds("step_ms"),
    "99 % within, µs": _microseconds("p99_ms"),
    "slowest, µs": lambda row, _: 1e3 * row["step_ms"]["slowest"],
    "late steps": "late_steps",
    "skipped ticks": "skipped_ticks",
    "99.9 % answered within, µs": _microseconds("answer_p999_ms"),
    "slowest answer, µs": lambda row, _: 1e3 * row["answer_ms"]["slowest"] if "answer_ms" in row else None,
}
NOTE = (
    f"Policies make {HZ:,} steps a second on one thread, with the model's length of memory. An answer is "
    "timed from its tick. *Real time* means priority 50 of SCHED_FIFO, locked memory and one CPU. The "
    f"growing window stops when half of its steps in a turn take longer than {1e3 / HZ:g} ms."
)
