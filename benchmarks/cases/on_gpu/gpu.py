"""One token and one segment on an NVIDIA GPU in fp32: ONNX Runtime's CUDA provider against PyTorch.

The artefact has the shift form. Its memory stays on the device in two sets of buffers that change places, and
each of the two steps is captured as a CUDA graph of its own. This case was written without such a machine and
has **not been run**: where its figures look wrong, doubt this file first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from benchmarks.arithmetic import step_bytes, step_multiply_adds
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import Limits, Timing, take_turns
from benchmarks.models import random_weights, write_artefact
from runtimes import open_session
from runtimes.base.errors import ArtefactError
from runtimes.base.logits import log_sum_exp
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.spec import GRAPH, Spec, load_spec
from trainer.model.projected import ProjectedModel
from trainer.run.checkpoint import load_run

PROVIDER = "CUDAExecutionProvider"
CHECKED = 6  # steps that are compared with the CPU; a graph is captured in its first step and replayed later
TOLERANCE = 1e-3  # nats; a GPU adds in another order


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of step: its number of tokens. Times are per token. difference: from the CPU, in nats."""

    tokens: int
    mem_len: int
    onnxruntime: Timing
    pytorch: Timing
    num_bytes: int
    multiply_adds: int
    difference: float

    def to_json(self) -> dict[str, Any]:
        return {
            **to_json(self),
            "ratio": self.pytorch.median / self.onnxruntime.median,
            "device": torch.cuda.get_device_name(),
        }


def unavailable() -> str | None:
    """Why this case cannot be measured on this machine; None where it can."""
    if PROVIDER not in onnxruntime.get_available_providers():
        version = onnxruntime.__version__
        where = "on a machine with an NVIDIA GPU"
        return f"onnxruntime {version} has no {PROVIDER} here; install 'xl-export[gpu]' {where}"
    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA GPU; install its CUDA build"
    return None


def run(
    config: BenchmarkConfig,
    *,
    threads: int | None = None,
    repeats: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for one token and a row for a segment, at the memory length of the configuration."""
    threads, repeats = checked_threads(threads), checked_repeats(repeats, config.token_repeats)
    rule, rows = MemoryRule(mem_len=config.mem_len, segment=config.segment), []
    with tempfile.TemporaryDirectory() as name:
        artefact = write_artefact(Path(name), config.model, rule, random_weights(config.model), "shift")
        cpu = open_session(artefact, threads=threads, device="cpu")
        model = load_run(artefact.with_name(artefact.name.replace("artefact", "run"))).model.eval().cuda()
        for tokens in (1, rule.segment):
            progress(f"steps of {tokens} tokens: comparing with the CPU, then timing {repeats} steps")
            cuda = _CudaStream(artefact, load_spec(artefact), tokens)
            difference = _check(cuda, cpu, tokens)
            sides = {"onnxruntime": _onnxruntime(cuda, tokens), "pytorch": _pytorch(model, rule, tokens)}
            times = {side: timing.per(tokens) for side, timing in take_turns(sides, repeats=repeats).items()}
            rows.append(
                Row(
                    tokens=tokens,
                    mem_len=rule.mem_len,
                    **times,
                    difference=difference,
                    num_bytes=step_bytes(config.model, rule, "shift"),
                    multiply_adds=step_multiply_adds(config.model, rule, "shift", tokens),
                )
            )
    return rows


class _CudaStream:
    """One stream whose memory stays on the device."""

    def __init__(self, artefact: Path, spec: Spec, tokens: int) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        provider = (PROVIDER, {"enable_cuda_graph": "1", "use_tf32": "0"})
        self._session = onnxruntime.InferenceSession(
            str(artefact / GRAPH), options, providers=[provider], enable_fallback=0
        )
        self._ids, self._positions = (_on_device(np.zeros((1, tokens), np.int64)) for _ in range(2))
        self._logits = _on_device(np.zeros((1, tokens, spec.model.vocab_size), np.float32))
        sets = [{s.name: _on_device(np.zeros((1, *s.row), np.float32)) for s in spec.state} for _ in range(2)]
        self._turns = [self._bind(spec, *sets, graph="1"), self._bind(spec, *sets[::-1], graph="2")]
        self._next = np.arange(tokens)[None]

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [1, T, V] after tokens [1, T]."""
        self._ids.update_inplace(tokens)
        self._positions.update_inplace(self._next)
        io, options = self._turns[0]
        self._session.run_with_iobinding(io, options)
        io.synchronize_outputs()
        self._turns.reverse()
        self._next = self._next + tokens.shape[1]
        logits: np.ndarray = self._logits.numpy()
        return logits

    def _bind(
        self, spec: Spec, past: dict[str, Any], present: dict[str, Any], *, graph: str
    ) -> tuple[Any, Any]:
        io, options = self._session.io_binding(), onnxruntime.RunOptions()
        options.add_run_config_entry("gpu_graph_id", graph)
        io.bind_ortvalue_input("input_ids", self._ids)
        io.bind_ortvalue_input("position_ids", self._positions)
        io.bind_ortvalue_output("logits", self._logits)
        for state in spec.state:
            io.bind_ortvalue_input(state.name, past[state.name])
            io.bind_ortvalue_output(state.present, present[state.name])
        return io, options


def _on_device(array: np.ndarray) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0)


def _check(cuda: _CudaStream, cpu: Session, tokens: int) -> float:
    """The largest difference from the CPU over the first steps, in nats.

    Raises ArtefactError beyond the tolerance.
    """
    draw, memory, worst = np.random.default_rng(0), cpu.start(1), 0.0
    for _ in range(CHECKED):
        segment = draw.integers(0, cpu.vocab.size, (1, tokens))
        expected, memory = cpu.step(segment, memory)
        log_probs = [x - log_sum_exp(x)[..., None] for x in (cuda.step(segment), expected)]
        worst = max(worst, float(np.abs(log_probs[0] - log_probs[1]).max()))
    if not worst <= TOLERANCE:
        raise ArtefactError(
            f"the CUDA provider differs from the CPU by {worst:.3g} nats, more than {TOLERANCE:g}; nothing "
            "was measured, try another version of onnxruntime or report this."
        )
    return worst


def _onnxruntime(stream: _CudaStream, tokens: int) -> Callable[[], Any]:
    segment = np.zeros((1, tokens), np.int64)
    return lambda: stream.step(segment)


def _pytorch(model: Any, rule: MemoryRule, tokens: int) -> Callable[[], None]:
    projected, config = ProjectedModel(model, rule), model.config
    shape = (1, config.heads, rule.mem_len, config.head_dim)
    memory = [torch.zeros(shape, device="cuda") for _ in range(2 * config.layers)]
    ids, positions = (
        torch.zeros((1, tokens), dtype=torch.int64, device="cuda"),
        torch.tensor([rule.slots], device="cuda"),
    )

    def step() -> None:
        nonlocal memory
        hidden, memory = projected.step(ids, memory, positions)
        model.vocabulary.logits(hidden)
        torch.cuda.synchronize()

    return step


def table(rows: Sequence[Row], limits: Limits) -> list[str]:
    """The rows as text. limits: of the CPU, which say nothing about a GPU."""
    lines = ["        ms per token", "tokens  ONNX Runtime  PyTorch  PyTorch / ONNX Runtime"]
    for row in rows:
        onnxruntime_ms, pytorch_ms = row.onnxruntime.median, row.pytorch.median
        ratio = pytorch_ms / onnxruntime_ms
        lines.append(f"{row.tokens:6}  {onnxruntime_ms:<12.3g}  {pytorch_ms:<7.3g}  {ratio:.2f}")
    return lines
