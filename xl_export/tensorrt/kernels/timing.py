"""Which kernels an engine gets for its attention: the fastest ones on realistic positions.

TensorRT times the tactics of a plugin on inputs of its own (NVIDIA/TensorRT#2552). If all positions are 0,
nearly every key is masked, the kernels skip it, and the times say nothing about the middle of a stream. So
each attention is timed here, before the build, as the engine launches it: the embedded PTX through the CUDA
driver, at each profile's usual shape, with a full memory. Answers are compared with the naive operator.
TensorRT is then offered only the fastest kernels whose answer is correct.

Tests run it with a fake driver.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from statistics import median
from typing import Literal

import numpy as np
import onnx

from runtimes.base.errors import ArtefactError
from runtimes.base.progress import say_once
from runtimes.contract.engine import Profile, TacticFacts
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import head_groups
from xl_export.tensorrt.kernels.compile import JOINS, Sizes, Tactic, Type, tactics
from xl_export.tensorrt.kernels.driver import TOLERANCES, Driver, run_embedded
from xl_export.tensorrt.naive import naive_relative_attention
from xl_export.tensorrt.operator import DOMAIN, INPUTS, RING_INPUTS, SIGNATURES, Attributes

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
    milliseconds: float

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
    offered = tactics(shape.sizes.head_dim, driver.gpu.capability, shape.dtype)
    # A tile of queries that is larger than the segment is never the fastest.
    fitting = [tactic for tactic in offered if tactic.block_t <= shape.tokens]
    for tactic, join in itertools.product(fitting, JOINS):
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
