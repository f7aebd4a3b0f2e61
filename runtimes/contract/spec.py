"""`spec.json`: everything that a runtime must know about an artefact, and the proof that it is intact.

The shape letters, one meaning everywhere in this project:
B batch rows · T tokens in this segment · M memory length (tokens remembered) · S ring slots (M + T_max) ·
L layers · H heads · K head width · D model width · V vocabulary · N persistent vectors
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import read_json, sha256, write_json
from runtimes.base.records import from_json, to_json
from runtimes.contract.precision import (
    MEAN_TOLERANCES,
    TOLERANCES,
    Float,
    Measured,
    MemoryPrecision,
    Precision,
)
from runtimes.contract.rule import MemoryRule

SCHEMA = 1
SPEC, GRAPH, WEIGHTS, VOCAB, REFERENCE = (
    "spec.json",
    "step.onnx",
    "weights.bin",
    "vocab.json",
    "reference.npz",
)
FUSED = "fused.onnx"  # the same step for the fused operator, over the same weights; absent where it does not serve
MAX_SIZE = 1 << 24  # of any one dimension; absurd sizes become a sentence instead of an allocation
FILE_NAME = re.compile(
    r"\w[\w.-]{0,99}", re.ASCII
)  # a plain name: no folder, no "..", nothing a file system refuses
MAX_LAYERS = 4096
GROUP_STEP = 64  # tokens; heads whose reach differs by less share their memory tensors
SELECTIVE_FROM = (
    8192  # tokens; larger vocabularies have a graph that computes its output layer only where asked to
)
Form = Literal["ring", "shift", "hidden"]
Target = Literal["onnxruntime", "tensorrt"]
LATER: dict[str, Any] = {
    "target": "onnxruntime",
    "memory_precision": "fp32",
    "measured": None,
}  # fields added to schema 1


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What kind of model this is: its sizes, and the number of its parameters.

    positions, sublayers: as in `trainer.model.config.ModelConfig`. persistent: vectors of each layer (N). cutoffs: first
    tokens of the tail clusters of an adaptive softmax. reaches [L][H]: the longest distance that each head gives any weight,
    where spans were learned; empty where they were not.
    """

    positions: str
    sublayers: Literal["feed-forward", "all-attention", "attn-split", "head-split", "single-head", "ff-attn"]
    layers: int
    heads: int
    head_dim: int
    d_model: int
    d_ff: int
    persistent: int
    vocab_size: int
    cutoffs: tuple[int, ...]
    reaches: tuple[tuple[int, ...], ...]
    pre_norm: bool
    parameters: int

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "d_model", "vocab_size"):
            most = MAX_LAYERS if name == "layers" else MAX_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 to {most}.")
        if self.reaches and (
            len(self.reaches) != self.layers or any(len(heads) != self.heads for heads in self.reaches)
        ):
            raise ConfigError(f"reaches does not have {self.layers} layers of {self.heads} heads.")
        if any(not 1 <= reach <= MAX_SIZE for heads in self.reaches for reach in heads):
            raise ConfigError(f"reaches has a distance outside 1 to {MAX_SIZE}.")

    @property
    def context_heads(self) -> int:
        """Heads that look at the context: all, but in `head-split` the first half."""
        return self.heads // 2 if self.sublayers == "head-split" else self.heads

    @property
    def selective(self) -> bool:
        """Whether the graph computes its output layer only where it is asked to: for large vocabularies."""
        return is_selective(self.cutoffs, self.vocab_size)


def is_selective(cutoffs: tuple[int, ...], vocab_size: int) -> bool:
    """Whether a vocabulary is large enough for `ModelFacts.selective`."""
    return bool(cutoffs) or vocab_size > SELECTIVE_FROM


@dataclass(frozen=True, kw_only=True)
class HeadGroup:
    """Heads of one layer that share memory tensors, as long as the one among them that looks furthest."""

    heads: Sequence[int]
    mem_len: int


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """One graph input or output: `shape` has sizes, and names for the axes that vary."""

    name: str
    dtype: Literal["int64", "float32", "float16"]
    shape: tuple[str, ...]  # of decimal numbers and of the names "batch", "segment" and "rows"

    def sizes(self, **axes: int) -> tuple[int, ...]:
        """The shape with its named axes given."""
        return tuple(axes[size] if size in axes else int(size) for size in self.shape)

    def num_bytes(self, **axes: int) -> int:
        """Size in bytes with the named axes given."""
        return math.prod(self.sizes(**axes)) * int(np.dtype(self.dtype).itemsize)


@dataclass(frozen=True, kw_only=True)
class StateFacts:
    """One memory tensor: the graph reads it as `past` and returns it as `present`, of the same shape."""

    past: str
    present: str
    dtype: Float
    shape: tuple[str, ...]

    def tensor(self) -> TensorFacts:
        return TensorFacts(name=self.past, dtype=self.dtype, shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The contract of one artefact; `identity` names it in everything derived from it.

    target: whose rules the graph is written for; with `tensorrt` the memory has the type of the precision. precision: of
    the weights. memory_precision: of the memory tensors. measured: what these cost; None for fp32, and where no text was
    at hand.
    """

    schema: int = SCHEMA
    model: ModelFacts
    rule: MemoryRule
    form: Form
    precision: Precision
    opset: int
    state: tuple[StateFacts, ...]
    producer: dict[str, str]  # package: version
    source: dict[str, str]  # of the trained model: checkpoint hash
    target: Target = "onnxruntime"
    memory_precision: MemoryPrecision = "fp32"
    measured: Measured | None = None
    files: dict[str, FileFacts] = field(default_factory=dict)

    @property
    def state_dtype(self) -> Float:
        """The type of the memory tensors."""
        half = self.memory_precision == "fp16" or (self.target == "tensorrt" and self.precision == "fp16")
        return "float16" if half else "float32"

    @property
    def lossy(self) -> bool:
        """Whether weights or memory are stored in fewer bits than they were trained in."""
        return (self.precision, self.memory_precision) != ("fp32", "fp32")

    @property
    def tolerance(self) -> float:
        """The largest difference in log-probability from the reference, in nats, that `check` lets pass: ours, not the file's."""
        return max(TOLERANCES[precision] for precision in (self.precision, self.memory_precision))

    @property
    def mean_tolerance(self) -> float:
        """The same of the mean difference; tighter where `tolerance` must leave room for single values."""
        return max(MEAN_TOLERANCES[precision] for precision in (self.precision, self.memory_precision))

    @property
    def identity(self) -> str:
        """SHA-256 over the whole contract, file hashes included."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The contract as it is written and hashed.

        A field of `LATER` is there only where it says something, so that artefacts from before it load and keep their identity.
        """
        return {
            name: value for name, value in to_json(self).items() if name not in LATER or value != LATER[name]
        }

    @property
    def inputs(self) -> tuple[TensorFacts, ...]:
        """Graph inputs in order: tokens, positions, what is wanted of a large vocabulary, then memory.

        targets: tokens whose log-probability is wanted, -1 for none. logit_rows: positions whose whole distribution is
        wanted, b T + t for row b and token t.
        """
        names = ["input_ids", "position_ids", *(["targets"] if self.model.selective else [])]
        ids = [TensorFacts(name=n, dtype="int64", shape=("batch", "segment")) for n in names]
        if self.model.selective:
            ids.append(TensorFacts(name="logit_rows", dtype="int64", shape=("rows",)))
        return (*ids, *(state.tensor() for state in self.state))

    @property
    def outputs(self) -> tuple[TensorFacts, ...]:
        """Graph outputs in order: logits, the targets' log-probabilities where these are an input, then memory."""
        where = ("rows",) if self.model.selective else ("batch", "segment")
        head = [TensorFacts(name="logits", dtype="float32", shape=(*where, str(self.model.vocab_size)))]
        if self.model.selective:
            head.append(TensorFacts(name="log_probs", dtype="float32", shape=("batch", "segment")))
        return (*head, *(TensorFacts(name=s.present, dtype=s.dtype, shape=s.shape) for s in self.state))

    @property
    def bytes_per_stream(self) -> int:
        """Bytes of memory that one row needs, its position included.

        What a stream is when it is saved or forked; while it steps, see `running_bytes_per_stream`.
        """
        return 8 + sum(state.tensor().num_bytes(batch=1) for state in self.state)

    @property
    def running_bytes_per_stream(self) -> int:
        """Bytes that a session holds for one row: the tensors twice where it reads one set and writes another.

        Only the ring is written in place.
        """
        return self.bytes_per_stream + (0 if self.form == "ring" else self.bytes_per_stream - 8)

    @property
    def fp32_bytes_per_stream(self) -> int:
        """`bytes_per_stream` of the same artefact with memory in float32."""
        whole = state_tensors(self.model, self.rule, self.form)
        return 8 + sum(state.tensor().num_bytes(batch=1) for state in whole)

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory that learned spans save each row, against every head remembering mem_len tokens."""
        return bytes_saved(self.model, self.rule, self.form, self.state_dtype)


def head_groups(model: ModelFacts, rule: MemoryRule, form: Form) -> tuple[tuple[HeadGroup, ...], ...]:
    """The heads of each layer that look at the context, in groups of similar reach, the furthest first.

    Without learned spans there is one group, with the whole memory. A group ends where a head needs less than half of its memory
    and at least `GROUP_STEP` tokens less. Hidden states are not split into heads: one group.
    """
    if not model.reaches:
        return ((HeadGroup(heads=range(model.context_heads), mem_len=rule.mem_len),),) * model.layers
    layers = []
    for reaches in model.reaches:
        groups: list[list[int]] = []
        for head in sorted(range(model.context_heads), key=lambda head: -reaches[head]):
            mine, longest = (min(reaches[h], rule.mem_len) for h in (head, groups[-1][0] if groups else head))
            if not groups or (form != "hidden" and 2 * mine < longest and longest - mine >= GROUP_STEP):
                groups.append([])
            groups[-1].append(head)
        layers.append(tuple(HeadGroup(heads=g, mem_len=min(reaches[g[0]], rule.mem_len)) for g in groups))
    return tuple(layers)


def state_tensors(
    model: ModelFacts, rule: MemoryRule, form: Form, dtype: Float = "float32"
) -> tuple[StateFacts, ...]:
    """The memory tensors of a form, layer by layer; M and S are those of the layer's or the head group's own reach.

    ring: keys and values [B, H, S, K]; shift: keys and values [B, H, M, K]; hidden: layer inputs [B, M, D].
    The names of keys and values are those that onnxruntime-genai expects; where a layer has several groups of
    heads, theirs have the group's number in them.
    """
    states = []
    for layer, groups in enumerate(head_groups(model, rule, form)):
        for number, group in enumerate(groups):
            if form == "hidden":
                names = [(f"past_hidden.{layer}", f"present_hidden.{layer}")]
                shape: tuple[str, ...] = ("batch", str(group.mem_len), str(model.d_model))
            else:
                slots = group.mem_len + (rule.segment if form == "ring" else 0)
                where = f"{layer}" if len(groups) == 1 else f"{layer}.{number}"
                names = [
                    (f"past_key_values.{where}.{kind}", f"present.{where}.{kind}")
                    for kind in ("key", "value")
                ]
                shape = ("batch", str(len(group.heads)), str(slots), str(model.head_dim))
            states += [
                StateFacts(past=past, present=present, dtype=dtype, shape=shape) for past, present in names
            ]
    return tuple(states)


def bytes_saved(model: ModelFacts, rule: MemoryRule, form: Form, dtype: Float = "float32") -> int:
    """`Spec.bytes_saved` of an artefact in this form."""
    whole, own = (
        state_tensors(facts, rule, form, dtype) for facts in (dataclasses.replace(model, reaches=()), model)
    )
    return sum(state.tensor().num_bytes(batch=1) for state in whole) - sum(
        s.tensor().num_bytes(batch=1) for s in own
    )


def file_facts(path: Path) -> FileFacts:
    """Hash and size of a file as it is now."""
    return FileFacts(sha256=sha256(path), num_bytes=path.stat().st_size)


def save_spec(folder: Path, spec: Spec) -> None:
    """Writes `spec.json` with its own digest."""
    write_json(folder / SPEC, {**spec.to_json(), "digest": spec.identity})


def load_spec(folder: Path) -> Spec:
    """The verified spec of an artefact folder.

    Schema, digest, sizes and the hash of every file are checked before anything else is read. Raises
    ArtefactError that names the file and says how to mend it.
    """
    path = folder / SPEC
    if not path.is_file():
        raise ArtefactError(
            f"{folder} is not an artefact: it has no {SPEC}; make one with `xl-export export RUN --out ARTEFACT`."
        )
    data = read_json(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise ArtefactError(
            f"{path} has schema {schema}, and this version reads up to {SCHEMA}; update with `pip install -U xl-export`."
        )
    spec = parse_spec(data, where=str(path))
    for name, facts in spec.files.items():
        verify_file(folder / name, facts, record=SPEC, again="export the artefact again")
    return spec


def parse_spec(data: Any, *, where: str) -> Spec:
    """A Spec from parsed JSON, its digest and its inner consistency checked."""
    try:
        digest = data.pop("digest", None) if isinstance(data, dict) else None
        spec = from_json(Spec, data, where=where)
    except ConfigError as error:
        raise ArtefactError(
            f"{str(error).rstrip('.')}; the artefact is damaged or of another version: export it again."
        ) from error
    if digest != spec.identity:
        raise ArtefactError(
            f"{where} was altered: its digest does not match its content; export the artefact again."
        )
    if spec.schema != SCHEMA or spec.state != state_tensors(
        spec.model, spec.rule, spec.form, spec.state_dtype
    ):
        raise ArtefactError(
            f"{where} contradicts itself: schema or memory tensors do not follow from its model; export again."
        )
    for name in (GRAPH, WEIGHTS, VOCAB, REFERENCE):
        if name not in spec.files:
            raise ArtefactError(f"{where} does not list {name}; export the artefact again.")
    if not all(FILE_NAME.fullmatch(name) for name in spec.files):
        raise ArtefactError(f"{where} lists a file outside its folder; export the artefact again.")
    return spec


def verify_file(path: Path, facts: FileFacts, *, record: str, again: str) -> None:
    """Raises ArtefactError where a file is not the one that `record` lists; `again`: how to make it again."""
    if not path.is_file():
        raise ArtefactError(f"{path} is missing; copy the whole folder, or {again}.")
    size = path.stat().st_size
    if size != facts.num_bytes:
        raise ArtefactError(
            f"{path} has {size} bytes, expected {facts.num_bytes}; copy it again, or {again}."
        )
    if sha256(path) != facts.sha256:
        raise ArtefactError(
            f"{path} was altered: its SHA-256 is not the one in {record}; copy it again, or {again}."
        )
