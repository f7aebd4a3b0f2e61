"""The ways to compute a model on an NVIDIA GPU, as one table, and how each is compared with the CPU.

The tests for a GPU and the case `gpu` share this table: a test compares every side for a tiny model, and the
case compares a side for the model that it times. Written without a GPU, and not run on one yet.
"""

from __future__ import annotations

import fnmatch
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.configs import BenchmarkConfig
from benchmarks.models import random_weights, write_run
from runtimes import Session, check, load_memory, open_session, save_memory
from runtimes.base.errors import ConfigError
from runtimes.contract.engine import PLAN, Attention, Flavour
from runtimes.contract.precision import MEMORY_IN_BYTES, PRESETS, MemoryPrecision, Precision
from runtimes.contract.rule import Mask, MemoryRule
from runtimes.contract.tensors import Form
from runtimes.sessions.tensorrt.device_memory import Cuda
from xl_export import export
from xl_export.tensorrt.build import LAYERS, build
from xl_export.tensorrt.options import BuildOptions

BATCHES = (1, 8)  # streams of a step
SEGMENTS = 4  # that both sides score
LEAST_TOLERANCE = 1e-3  # nats of a log-probability: the two sides add in different orders


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One export of a model."""

    target: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    form: Form = "ring"
    precision: Precision = "fp32"
    memory: MemoryPrecision = "fp32"  # of the memory tensors; a graph for TensorRT has its own
    mask: Mask = "same-length"
    attention: Attention = "plugin"  # in a graph for TensorRT: one node, or ONNX Attention (`native`)

    @property
    def folder(self) -> str:
        return f"{self.target}-{self.form}-{self.precision}-{self.memory}-{self.mask}-{self.attention}"

    @property
    def computes_in_halves(self) -> bool:
        """Whether steps use fp16; graphs for ONNX Runtime only store their weights in fewer bits."""
        return self.target == "tensorrt" and self.precision != "fp32"

    @property
    def tolerance(self) -> float:
        """Nats by which a log-probability may differ from the CPU's.

        A coarse memory may round a key or value that lies between two numbers to either of them.
        """
        memory = {"fp32": 0.0, "fp16": PRESETS["fp16"].tolerance, "int8": MEMORY_IN_BYTES[0]}[self.memory]
        return max(PRESETS[self.precision].tolerance, memory, LEAST_TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to compute a model: a graph on a device."""

    name: str
    graph: Graph
    device: str = "auto"  # of `open_session`
    flavour: Flavour | None = None  # of the engine to build first; None opens the graph itself
    attention: Attention = "native"  # of the engine


def _engines(flavour: Flavour, attention: Attention, *kinds: tuple[Form, Precision]) -> Iterator[Side]:
    for form, precision in kinds:
        yield Side(
            name=f"{flavour}-{attention}-{form}-{precision}",
            graph=Graph(target="tensorrt", form=form, precision=precision),
            flavour=flavour,
            attention=attention,
        )


def _onnx_attention(flavour: Flavour) -> Side:
    """An engine whose graph has ONNX Attention, for TensorRT's fused kernels."""
    graph = Graph(target="tensorrt", precision="fp16", attention="native")
    return Side(name=f"{flavour}-onnx-attention", graph=graph, flavour=flavour)


def _provider(device: str, graph: Graph) -> Side:
    name = f"{device}-{graph.form}-{graph.precision}"
    name += f"-memory-{graph.memory}" * (graph.memory != "fp32")
    return Side(name=name + "-mask-full" * (graph.mask == "full"), graph=graph, device=device)


ALL: tuple[tuple[Form, Precision], ...] = (
    ("ring", "fp16"),
    ("shift", "fp16"),
    ("ring", "fp32"),
    ("shift", "fp32"),
    ("ring", "int8"),
    ("ring", "int4"),
    ("ring", "fp8"),
)
SIDES = (
    *_engines("tensorrt", "native", *ALL),
    _onnx_attention("tensorrt"),
    *_engines("tensorrt", "plugin", ("ring", "fp16"), ("shift", "fp16"), ("ring", "fp32")),
    *_engines("rtx", "native", *ALL),
    _onnx_attention("rtx"),
    _provider("cuda", Graph()),
    _provider("cuda", Graph(form="shift")),
    _provider("cuda", Graph(form="hidden")),
    _provider("cuda", Graph(precision="fp16")),
    _provider("cuda", Graph(form="shift", precision="fp16")),
    _provider("cuda", Graph(precision="int8")),
    _provider("cuda", Graph(precision="int8-stored")),
    _provider("cuda", Graph(precision="int4")),
    _provider("cuda", Graph(memory="fp16")),
    _provider("cuda", Graph(memory="int8")),
    _provider("cuda", Graph(form="shift", mask="full")),
    # TensorRT has no circular ring, so its providers get the form `shift`. The graph for fp16 computes in
    # fp16 throughout, which the CUDA provider refuses.
    _provider("ort-tensorrt", Graph(target="tensorrt", form="shift", precision="fp16")),
    _provider("ort-tensorrt", Graph(form="shift")),
    _provider("ort-tensorrt-rtx", Graph(target="tensorrt", form="shift", precision="fp16")),
    _provider("ort-tensorrt-rtx", Graph(form="shift")),
)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A session on the GPU, and the same graph on the CPU to compare it with."""

    folder: Path  # of the engine, or of the artefact
    session: Session
    reference: Session
    tolerance: float
    device: str
    built: str = ""  # what the build reported


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that match one of the patterns; `*` matches any text. Raises ConfigError for no match."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"{pattern!r:.60} is not a side; give one of {', '.join(names)}.")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def rule_of(config: BenchmarkConfig, mask: Mask = "same-length") -> MemoryRule:
    """The memory rule of a model."""
    return MemoryRule(mem_len=config.mem_len, segment=config.segment, mask=mask)


def run_folder(work: Path, config: BenchmarkConfig, *, seed: int = 0) -> Path:
    """The run of a model with random weights; written on first use, whole or not at all."""
    run = work / f"{config.name}-{seed}" / "run"
    if not run.exists():
        run.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=work) as temporary:
            weights = random_weights(config.model, seed=seed)
            write_run(Path(temporary) / "run", config.model, rule_of(config), weights).rename(run)
    return run


def artefact_of(work: Path, config: BenchmarkConfig, graph: Graph, *, seed: int = 0) -> Path:
    """The artefact of a model; exported, and so compared with PyTorch, on first use."""
    run = run_folder(work, config, seed=seed)
    out = run.with_name(graph.folder)
    if not out.exists():
        export(
            run,
            out,
            memory=graph.form,
            rule=rule_of(config, graph.mask),
            target=graph.target,
            attention=graph.attention,
            precision=graph.precision,
            memory_precision=graph.memory if graph.target == "onnxruntime" else None,
        )
    return out


def options_of(flavour: Flavour, attention: Attention = "native") -> BuildOptions:
    """The options of an engine for this GPU, for one stream and for several."""
    most = max(BATCHES)
    return BuildOptions(
        flavour=flavour,
        attention=attention,
        compute_capabilities=(Cuda().gpu.compute_capability,) if flavour == "rtx" else (),
        batch=(1, 1, most),
        # The plugin's token profile has one size, which is the step that is timed first.
        token_batch=(1, 1, 1) if attention == "plugin" else (1, 1, most),
    )


def open_side(side: Side, config: BenchmarkConfig, work: Path) -> Opened:
    """Exports and builds what the side needs in `work`, and opens it on the GPU and on the CPU."""
    artefact = artefact_of(work, config, side.graph)
    folder = None
    built = ""
    if side.flavour:
        folder = Path(tempfile.mkdtemp(dir=work)) / "engine"
        facts = build(artefact, folder, options_of(side.flavour, side.attention))
        built = (
            f"{facts.seconds:.1f} s by {facts.flavour} {facts.version}, "
            f"{facts.files[PLAN].num_bytes / 2**20:.1f} MiB, {sum(facts.layers.values())} layers, "
            f"{facts.plugin_layers} of the plugin"
        )
    return Opened(
        folder=folder or artefact,
        session=open_session(folder or artefact, device=side.device),
        reference=open_session(artefact, device="cpu"),
        tolerance=side.graph.tolerance,
        device=side.device,
        built=built,
    )


def problems(opened: Opened) -> list[str]:
    """What is wrong with a session on the GPU, one sentence each; empty if every comparison passes."""
    found = []
    report = check(opened.folder, device=opened.device)
    if not report.passed:
        found.append(f"check: {report.sentence}")
    T = opened.session.rule.segment
    lengths = [T] * SEGMENTS + [1, 1, 1, max(1, T // 2)]
    worst = _difference(*(scores(side, lengths) for side in (opened.session, opened.reference)))
    if not worst <= opened.tolerance:  # true for NaN as well
        found.append(f"scores differ from the CPU's by {worst:.3g} nats, more than {opened.tolerance:g}")
    worst = _continued(opened.session)
    if not worst <= LEAST_TOLERANCE:
        found.append(f"a stream that was saved and loaded continues {worst:.3g} nats apart")
    if opened.built and not layers_of_plan(opened.folder):
        found.append(f"{LAYERS}, which a build on a GPU writes, is missing or has no layers")
    return found


def scores(session: Session, lengths: Sequence[int]) -> np.ndarray:
    """Log-probabilities [2, N] of random tokens in two streams, fed in segments of these lengths."""
    tokens = np.random.default_rng(0).integers(0, session.vocab.size, (2, sum(lengths) + 1))
    memory = session.start(2)
    pieces = []
    at = 0
    for length in lengths:
        piece = tokens[:, at : at + length], tokens[:, at + 1 : at + length + 1]
        log_probs, memory = session.score(*piece, memory)
        pieces.append(log_probs)
        at += length
    return np.concatenate(pieces, axis=1)


def layers_of_plan(engine: Path) -> int:
    """How many layers the plan has according to TensorRT's inspector; 0 without its file."""
    path = engine / LAYERS
    return len(json.loads(path.read_text("utf-8")).get("Layers", ())) if path.is_file() else 0


def _continued(session: Session) -> float:
    """Nats between a stream and the same stream saved and loaded."""
    T = session.rule.segment
    tokens = np.random.default_rng(1).integers(0, session.vocab.size, (2, 2 * T + 1))
    _, memory = session.score(tokens[:, :T], tokens[:, 1 : T + 1], session.start(2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream"
        save_memory(memory, path)
        again = load_memory(path, session)
    return _difference(
        *(session.score(tokens[:, T:-1], tokens[:, T + 1 :], each)[0] for each in (memory, again))
    )


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())
