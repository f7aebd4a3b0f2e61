"""Which kernels an engine gets for its attention: the fastest ones on realistic positions.

TensorRT times the tactics of a plugin on inputs of its own (NVIDIA/TensorRT#2552). If all positions are 0,
nearly every key is masked, the kernels skip it, and the times say nothing about the middle of a stream. So
each attention is timed here, before the build, as the engine launches it: the embedded PTX through the CUDA
driver, at each profile's usual shape, with a full memory. Answers are compared with the naive operator.
TensorRT is then offered only the fastest kernels whose answer is correct.

It was not run on a GPU; tests run it with a fake driver.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import onnx

from runtimes.base.errors import ArtefactError, ConfigError, UserError
from runtimes.base.files import read_json, write_json
from runtimes.base.machine import driver_version
from runtimes.base.progress import say_once
from runtimes.base.records import from_json, to_json
from runtimes.contract.engine import Gpu, Profile, TacticFacts
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import head_groups
from xl_export.tensorrt.kernels.compile import JOINS, Sizes, Tactic, Type, tactics
from xl_export.tensorrt.kernels.driver import TOLERANCES, Driver, run_embedded
from xl_export.tensorrt.naive import naive_relative_attention
from xl_export.tensorrt.operator import DOMAIN, INPUTS, RING_INPUTS, SIGNATURES, Attributes

SCHEMA = 1
REPEATS = 23
UNTIMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """An attention at the usual shape of a profile: all that its time depends on, besides the GPU."""

    profile: Literal["segment", "token"]
    batch: int
    tokens: int
    keys: int  # J: of memory and segment, or the slots of the ring
    mem_len: int  # M
    ring: bool
    sizes: Sizes
    attributes: Attributes
    dtype: Type

    def inputs(self) -> dict[str, np.ndarray]:
        """The operator's inputs in the middle of a stream: the memory is full."""
        B = self.batch
        T = self.tokens
        J = self.keys
        sizes = self.sizes
        H = sizes.heads
        K = sizes.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "query": (B, H, T, K),
            "key": (B, H, J, K),
            "value": (B, H, J, K),
            "u": (H, 1, K),
            "v": (H, 1, K),
            "position_table": (sizes.table_heads, sizes.table_rows, K),
            "bias_table": (sizes.bias_heads, sizes.bias_rows),
            "persistent_key": (H, sizes.persistent_rows, K),
            "persistent_value": (H, sizes.persistent_rows, K),
        }
        draw = np.random.default_rng(0)
        arrays = {
            name: (draw.standard_normal(shape, np.float32) / K**0.25).astype(self.dtype)
            for name, shape in shapes.items()
        }
        arrays["first"] = np.full(B, 4 * (self.mem_len + J), np.int32)
        if self.ring:  # no step writes across the end; with several rows the memory of some crosses it
            arrays["slot"] = ((np.arange(B) + 1) * J // (B + 1) % (J - T + 1)).astype(np.int32)
        return {name: arrays[name] for name in (RING_INPUTS if self.ring else INPUTS)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The kernels of one attention at one shape, and the median of their time."""

    shape: Shape
    tactic: Tactic
    join: Tactic
    milliseconds: float | None  # None for a default that was not timed

    @property
    def facts(self) -> TacticFacts:
        """Its entry in `build.json`."""
        shape = self.shape
        return TacticFacts(
            profile=shape.profile,
            batch=shape.batch,
            tokens=shape.tokens,
            keys=shape.keys,
            heads=shape.sizes.heads,
            kernel=self.tactic.kernel,
            tile=(self.tactic.block_t, self.tactic.block_j),
            join_queries=self.join.block_t,
            milliseconds=self.milliseconds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A choice in a file, with what else it depends on."""

    gpu: Gpu
    # As in `EngineFacts`. If the version is unknown (None), drivers that support the same CUDA count as one.
    driver_version: str | None = None
    driver_cuda: str | None = None
    code: str  # the hash of the kernels and of their compiler
    choice: Choice

    @property
    def holds_for(self) -> tuple[object, ...]:
        """What the choice depends on besides the shape."""
        return self.gpu, self.driver_version, self.driver_cuda, self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """A file of choices that were timed."""

    schema: int
    timed: tuple[Record, ...]


def attention_shapes(model: onnx.ModelProto, spec: Spec, profiles: Iterable[Profile]) -> tuple[Shape, ...]:
    """The attentions of an artefact's graph at the usual shapes of the profiles, each kind once."""
    dims = {item.name: tuple(item.dims) for item in model.graph.initializer}
    signatures = {(DOMAIN, signature.name): signature for signature in SIGNATURES}
    nodes = [node for node in model.graph.node if (node.domain, node.op_type) in signatures]
    groups = [group for layer in head_groups(spec.model, spec.rule, spec.form) for group in layer]
    shapes = []
    for profile in profiles:
        batch = profile.batch[1]
        tokens = profile.tokens[1]
        for node, group in zip(nodes, groups, strict=True):
            signature = signatures[node.domain, node.op_type]
            ring = spec.circular
            values = {item.name: item.i for item in node.attribute}
            # Queries, keys and positions are computed; a kernel's sizes do not include theirs.
            of = [dims.get(name, ()) for name in node.input[: len(signature.inputs)]]
            shapes.append(
                Shape(
                    profile=profile.name,
                    batch=batch,
                    tokens=tokens,
                    keys=group.mem_len + (spec.rule.segment if ring else tokens),
                    mem_len=group.mem_len,
                    ring=ring,
                    sizes=Sizes.of(of),
                    attributes=Attributes(
                        **{name: values[name] for name in signature.attributes if name != "mem_len"}
                    ),
                    dtype="float32" if spec.precision == "fp32" else "float16",
                )
            )
    return tuple(dict.fromkeys(shapes))


def default(shape: Shape, compute_capability: int) -> Choice:
    """The kernels for a shape that is not timed: for segments the largest tile of queries that they fill."""
    possible = _fitting(shape, compute_capability)
    segment = [tactic for tactic in possible if tactic.kernel == "segment_attention"]
    tactic = segment[-1] if segment and shape.tokens > 1 else possible[0]
    return Choice(shape=shape, tactic=tactic, join=JOINS[shape.tokens > 1], milliseconds=None)


def time_shape(driver: Driver, shape: Shape) -> Choice:
    """The fastest kernels for a shape on the driver's GPU, of those whose answer is right.

    One line on standard error names the others. Raises ArtefactError if no answer is right.
    """
    inputs = shape.inputs()
    mem_len = shape.mem_len if shape.ring else None
    expected = naive_relative_attention(*inputs.values(), attributes=shape.attributes, mem_len=mem_len)
    # Answers are means of many values, so they are small.
    tolerance = TOLERANCES[shape.dtype] * np.abs(expected).max()
    timed: dict[tuple[Tactic, Tactic], float] = {}
    wrong = []
    for tactic, join in itertools.product(_fitting(shape, driver.gpu.capability), JOINS):
        got = run_embedded(
            driver, inputs, shape.attributes, mem_len=mem_len, tactic=tactic, join=join, repeats=REPEATS
        )
        if np.abs(got.answer - expected).max() <= tolerance:  # not if it is NaN
            timed[tactic, join] = median(got.milliseconds[UNTIMED:])
        else:
            tile = f"{tactic.block_t} x {tactic.block_j}"
            wrong.append(f"{tactic.kernel} in tiles of {tile}, joined by {join.block_t}")
    gpu = f"{driver.gpu.name} (compute capability {driver.gpu.compute_capability})"
    where = f"on {gpu}, for {shape.tokens} tokens and {shape.keys} keys"
    if not timed:
        raise ArtefactError(
            f"every kernel of the plugin gives wrong answers {where}; build with --attention native, and "
            "please report this."
        )
    if wrong:
        say_once(
            f"kernels that give wrong answers {where} are not used: {'; '.join(wrong)}; please report this"
        )
    tactic, join = min(timed, key=timed.__getitem__)
    return Choice(shape=shape, tactic=tactic, join=join, milliseconds=timed[tactic, join])


def choose(shapes: Sequence[Shape], gpu: Gpu, *, file: Path | None = None) -> tuple[Choice, ...]:
    """The kernels of each shape on this machine's GPU: from the file if they were timed before.

    What is timed now is added to the file. If the driver launches nothing, the defaults are used, with a
    warning. Raises UserError for a file that is not one of these.
    """
    records = read_records(file) if file and file.exists() else ()
    try:
        driver = Driver()
    except UserError as error:
        say_once(f"the plugin's kernels were not timed, and its defaults are built in: {error}")
        return tuple(default(shape, gpu.capability) for shape in shapes)
    version = driver_version()
    here = gpu, version, driver.cuda, code()
    known = {record.choice.shape: record.choice for record in records if record.holds_for == here}
    fresh = {shape: time_shape(driver, shape) for shape in shapes if shape not in known}
    if fresh and file:
        made = [
            Record(gpu=gpu, driver_version=version, driver_cuda=driver.cuda, code=code(), choice=one)
            for one in fresh.values()
        ]
        write_json(file, to_json(Records(schema=SCHEMA, timed=(*records, *made))))
    return tuple((known | fresh)[shape] for shape in shapes)


def read_records(file: Path) -> tuple[Record, ...]:
    """What a file of choices holds; raises UserError for another file."""
    again = "remove it, or give another --tactics"
    try:
        records = from_json(Records, read_json(file), where=str(file))
    except UserError as error:
        raise ConfigError(
            f"{file} is not a file of timed kernels ({str(error).rstrip('.')}); {again}."
        ) from error
    if records.schema != SCHEMA:
        raise ConfigError(f"{file} has the schema {records.schema}, expected {SCHEMA}; {again}.")
    return records.timed


@functools.cache
def code() -> str:
    """SHA-256 of the kernels' sources and of the name of their compiler: times are valid only for these."""
    digest = hashlib.sha256(version_of("triton").encode())
    for name in ("common", "compile", "join", "segment", "skew", "token"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _fitting(shape: Shape, compute_capability: int) -> list[Tactic]:
    """The tactics whose tile of queries is not larger than the segment."""
    offered = tactics(shape.sizes.head_dim, compute_capability, shape.dtype)
    return [tactic for tactic in offered if tactic.block_t <= shape.tokens]
