"""The ways to compute a model on an NVIDIA GPU, as tables, and how each is compared with the CPU.

Engines and providers are in `SIDES`, PyTorch's models in `MODELS` and training steps in `TRAININGS`. The
tests for a GPU and the case `gpu` share these tables: a test compares every side for a tiny model, and the
case compares a side for the model that it times.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.configs import BenchmarkConfig
from benchmarks.models import random_weights, write_run
from runtimes import Session, check, load_memory, open_session, save_memory
from runtimes.contract.engine import PLAN, Attention, Flavour
from runtimes.contract.precision import MEMORY_PRESETS, PRESETS, MemoryPrecision, Precision
from runtimes.contract.rule import Mask, MemoryRule
from runtimes.contract.spec import CUDA_GRAPH
from runtimes.contract.tensors import Form
from runtimes.sessions import fused_cpu
from runtimes.sessions.tensorrt.device_memory import Cuda
from trainer.model.model import LanguageModel
from trainer.model.projected import ProjectedModel
from trainer.run.checkpoint import load_run
from trainer.run.config import TrainConfig
from trainer.training.parallel import Ranks
from trainer.training.state import Training
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
    memory: MemoryPrecision = "fp32"  # precision of the memory tensors; a graph for TensorRT has its own
    mask: Mask = "same-length"
    attention: Attention | None = None  # see `export`

    @property
    def folder(self) -> str:
        attention = self.attention or "default"
        return f"{self.target}-{self.form}-{self.precision}-{self.memory}-{self.mask}-{attention}"

    @property
    def computes_in_halves(self) -> bool:
        """Whether steps use fp16; other graphs for ONNX Runtime only store their weights in fewer bits."""
        node = self.attention == "plugin" and self.precision == "fp16"
        return node if self.target == "onnxruntime" else self.precision != "fp32"

    @property
    def tolerance(self) -> float:
        """Nats by which a log-probability may differ from the CPU's.

        A coarse memory may round a key or value that lies between two numbers to either of them.
        """
        memory = MEMORY_PRESETS[self.memory].tolerances[0]
        return max(PRESETS[self.precision].tolerance, memory, LEAST_TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to compute a model: a graph on a device."""

    name: str
    graph: Graph
    device: str = "auto"  # argument of `open_session`
    flavour: Flavour | None = None  # kind of the engine to build first; None opens the graph itself
    attention: Attention = "native"  # attention of the engine


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
    name += f"-memory-{graph.memory}" * (graph.memory != "fp32") + "-node" * (graph.attention == "plugin")
    return Side(name=name + "-mask-full" * (graph.mask == "full"), graph=graph, device=device)


ALL: tuple[tuple[Form, Precision], ...] = (
    ("ring", "fp16"),
    ("shift", "fp16"),
    ("ring", "fp32"),
    ("shift", "fp32"),
    ("ring", "int8"),
    ("ring", "int4"),
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
    _provider("cuda", Graph(attention="plugin")),
    _provider("cuda", Graph(attention="plugin", memory="fp16")),
    _provider("cuda", Graph(attention="plugin", memory="fp16", precision="fp16")),
)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A session on the GPU, and the same graph on the CPU to compare it with."""

    folder: Path  # folder of the engine or of the artefact
    session: Session
    reference: Session
    tolerance: float
    device: str
    built: str = ""  # what the build reported


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
    if (artefact / CUDA_GRAPH).exists():
        fused_cpu.build()  # without its library the graph is not used
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


TORCH_SEGMENTS = 3  # that the model on the GPU and on the CPU compute
MODELS = {  # whether a side computes in fp16, and whether it is compiled
    "pytorch-fp32": (False, False),
    "pytorch-fp16": (True, False),
    "pytorch-compiled-fp32": (False, True),
    "pytorch-compiled-fp16": (True, True),
}
TRAININGS: dict[str, dict[str, Any]] = {  # changes to a recipe
    "training-fp32": {},
    "training-bf16": {"autocast": "bf16"},
    "training-fp16": {"autocast": "fp16"},
    "training-compiled-bf16": {"autocast": "bf16", "compile": True},
    "training-checkpointed-bf16": {"autocast": "bf16", "checkpoint_activations": True},
}
TRAINING_STEPS = 5  # that are compared
LOSS_TOLERANCES = {"none": 2e-3, "bf16": 5e-2, "fp16": 5e-2}  # nats


class Stream:
    """Streams whose keys and values stay on the device of the model."""

    def __init__(
        self, model: LanguageModel, config: BenchmarkConfig, *, batch: int = 1, compiled: bool = False
    ) -> None:
        self.config = config
        self.rule = rule_of(config)
        weight = next(model.parameters())
        m = config.model
        self.device = weight.device
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
        """Logits [B, 1, V] after the last of the tokens [B, T], when the device has computed them."""
        with torch.no_grad():
            logits, self.memory = self._step(tokens, self.memory, self.position)
            self.position = self.position + tokens.shape[1]
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        answer: Tensor = logits
        return answer

    def answers(self) -> Tensor:
        """Log-probabilities on the CPU after each of a few segments and single tokens."""
        draw = np.random.default_rng(0)
        pieces = []
        for length in [self.rule.segment] * TORCH_SEGMENTS + [1, 1]:
            tokens = torch.from_numpy(draw.integers(0, self.config.model.vocab_size, (1, length)))
            pieces.append(self.step(tokens.to(self.device)).float().log_softmax(-1).cpu())
        return torch.cat(pieces, dim=1)


def model_on(
    name: str, config: BenchmarkConfig, work: Path, device: str
) -> tuple[LanguageModel, float, float]:
    """The model of a side on the device, how many nats it differs from the CPU by, and the tolerance."""
    halves, compiled = MODELS[name]
    model = load_run(run_folder(work, config)).model.eval()
    expected = Stream(model, config).answers()
    moved = copy.deepcopy(model).to(device, torch.float16 if halves else torch.float32)
    worst = float((Stream(moved, config, compiled=compiled).answers() - expected).abs().max())
    return moved, worst, max(PRESETS["fp16" if halves else "fp32"].tolerance, LEAST_TOLERANCE)


def timed_step(
    model: LanguageModel, config: BenchmarkConfig, batch: int, tokens: int, *, compiled: bool
) -> Callable[[], Any]:
    """A step with full memory, to be timed."""
    stream = Stream(model, config, batch=batch, compiled=compiled)
    stream.position += 2 * stream.rule.slots  # all of the memory is visible
    segment = torch.zeros((batch, tokens), dtype=torch.int64, device=stream.device)
    return lambda: stream.step(segment)


def training_difference(name: str, device: str) -> tuple[float, float]:
    """Nats between the first losses of a tiny model on the device and on the CPU in fp32; the tolerance."""
    plain = TrainConfig.load("tiny")
    model = replace(plain.model, vocab_size=256, dropout=0.0, attention_dropout=0.0)  # nothing random
    plain = replace(plain, model=model, vocab="byte")
    losses = []
    for config, where in ((plain, "cpu"), (replace(plain, **TRAININGS[name]), device)):
        step = training_step(config, where)
        losses.append(np.array([step() for _ in range(TRAINING_STEPS)]))
    tolerance = LOSS_TOLERANCES[TRAININGS[name].get("autocast", "none")]
    return float(np.abs(losses[0] - losses[1]).max()), tolerance


def recipe_of(name: str, config: BenchmarkConfig) -> TrainConfig:
    """The recipe of a training side, with the sizes of the configuration."""
    rule = MemoryRule(mem_len=config.segment, segment=config.segment, mask="full")
    plain = TrainConfig(
        model=config.model, training=rule, evaluation=rule, vocab="byte", batch=config.training_batch
    )
    return replace(plain, **TRAININGS[name])


def training_step(config: TrainConfig, device: str) -> Callable[[], float]:
    """A call that trains one step and returns its loss."""
    config = replace(config, device=device, steps=1 << 20)  # type: ignore[arg-type]
    training = Training.start(config, Ranks(device=torch.device(device)))
    shape = (config.batch, 64 * config.training.segment + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape)
    return lambda: float(training.advance(tokens).nats)  # reading the loss waits for the device
