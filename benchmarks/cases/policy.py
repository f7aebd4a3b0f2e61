"""Steps of a policy at 1 kHz on one thread: the artefact in Python and C++, PyTorch, and a growing window.

Every side has the same weights: layers of attention over keys and values, from 12 measurements to 4 action
logits. The growing window is PyTorch with a cache of the whole episode. It has room for all steps from the
start, so it never copies, and it stops once half of its steps take longer than the period.

A step is timed from its call to its answer, after a sleep until it is due, as in a control loop. A step is
late if its answer comes after the next step is due.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runtimes
import xl_export
from benchmarks.checked_sessions import agreed
from benchmarks.harness import Job, Row, microseconds
from benchmarks.measure import timing
from runtimes.base.errors import ArtefactError
from trainer.model.config import ModelConfig

HZ = 1000
STEPS = 100_000  # of each side
TURN_STEPS = 1000  # steps of one turn
WARMUP_STEPS = 50  # untimed steps of each side before its first turn
OBSERVATION, ACTIONS = 12, 4
TOLERANCE = 1e-4  # of a logit
GROWING = "PyTorch, growing window"
CPP_SOURCES = Path(__file__).parents[2] / "cpp"
CHECKED_STEPS = 50  # steps beyond the memory's length that are compared before anything is timed


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


def run(job: Job) -> Iterator[Row]:
    """A row for each side; repeats are timed steps. Nothing is timed before all sides agree."""
    steps = job.repeats(STEPS)
    M = job.rule.mem_len
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = Policy(job.config.model, M).eval()
    with contextlib.ExitStack() as stack:
        job.say("tracing the policy and comparing all sides with PyTorch")
        rule = xl_export.MemoryRule(mem_len=M, segment=1)
        artefact = xl_export.trace(policy, job.folder / "artefact", rule=rule, rows=1)
        _compare(policy, artefact, M)
        sides: dict[str, _Here | _Cpp] = {"artefact, Python": _Here(_artefact_step(artefact))}
        if has_cpp():
            cpp = _Cpp(artefact, job.folder)
            stack.callback(cpp.close)
            sides["artefact, C++"] = cpp
        sides["PyTorch"] = _Here(_pytorch_step(policy))
        sides[GROWING] = _Here(_growing_step(policy, WARMUP_STEPS + steps))
        job.say(f"timing {steps:,} steps of each side at {HZ:,} Hz, in turns of {TURN_STEPS:,}")
        found = _in_turns(sides, steps)
    for side, (ms, late) in found.items():
        yield {
            "side": side,
            "mem_len": M,
            "step_ms": timing(ms),
            "p99_ms": float(np.percentile(ms, 99)),
            "late_steps": late,
            "steps": len(ms),
        }


def _in_turns(sides: dict[str, _Here | _Cpp], steps: int) -> dict[str, tuple[list[float], int]]:
    """The milliseconds of each side's steps, and how many were late; the sides take turns."""
    found: dict[str, tuple[list[float], int]] = {side: ([], 0) for side in sides}
    active = dict(sides)
    for side in sides.values():
        side.times(WARMUP_STEPS)
    for at in range(0, steps, TURN_STEPS):
        for name, side in list(active.items()):
            times, late = side.times(min(TURN_STEPS, steps - at))
            found[name] = (found[name][0] + times, found[name][1] + late)
            if name == GROWING and median(times) > 1e3 / HZ:
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
    return _onnxruntime_library() is not None and shutil.which("g++") is not None


def _onnxruntime_library() -> Path | None:
    """The shared library in the Python wheel."""
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"), None)


KEYS = ("side", "mem_len")
COLUMNS = {
    "side": "side",
    "steps": "steps",
    "median, µs": microseconds("step_ms"),
    "99 % within, µs": lambda row, _: 1e3 * row["p99_ms"],
    "slowest, µs": lambda row, _: 1e3 * row["step_ms"]["slowest"],
    "late steps": "late_steps",
}
NOTE = (
    f"{HZ:,} steps a second on one thread, with the model's length of memory. The growing window "
    f"stops when half of {TURN_STEPS:,} steps take longer than {1e3 / HZ:g} ms."
)
