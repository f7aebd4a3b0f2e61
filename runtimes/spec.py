"""`spec.json`: everything that a runtime must know about an artefact, and the proof that it is intact.

The shape letters, one meaning everywhere in this project:
B batch rows · T tokens in this segment · M memory length (tokens remembered) · S ring slots (M + T_max) ·
L layers · H heads · K head width · D model width · V vocabulary · N persistent vectors
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtimes.errors import ArtefactError, ConfigError
from runtimes.files import read_json, sha256, write_json
from runtimes.records import from_json, to_json
from runtimes.rule import MemoryRule

SCHEMA = 1
SPEC, GRAPH, WEIGHTS, VOCAB, REFERENCE = "spec.json", "step.onnx", "weights.bin", "vocab.json", "reference.npz"
MAX_SIZE = 1 << 24  # of any one dimension; absurd sizes become a sentence instead of an allocation
FILE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)  # a plain name: no folder, no "..", nothing a file system refuses
MAX_LAYERS = 4096
TOLERANCES = {"fp32": 1e-4}  # nats, by precision
Form = Literal["ring", "shift", "hidden"]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What kind of model this is: its sizes, and the number of its parameters."""

    architecture: Literal["transformer-xl"]
    layers: int
    heads: int
    head_dim: int
    d_model: int
    d_ff: int
    vocab_size: int
    pre_norm: bool
    tie_biases: bool
    parameters: int

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "d_model", "d_ff", "vocab_size"):
            most = MAX_LAYERS if name == "layers" else MAX_SIZE
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 to {most}.")


@dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """One graph input or output: `shape` has sizes, and names for the axes that vary."""

    name: str
    dtype: Literal["int64", "float32"]
    shape: tuple[str, ...]  # of decimal numbers and of the names "batch" and "segment"

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
    dtype: Literal["float32"]
    shape: tuple[str, ...]

    def tensor(self) -> TensorFacts:
        return TensorFacts(name=self.past, dtype=self.dtype, shape=self.shape)


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    sha256: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The contract of one artefact; `identity` names it in everything derived from it."""

    schema: int = SCHEMA
    model: ModelFacts
    rule: MemoryRule
    form: Form
    precision: Literal["fp32"]
    opset: int
    state: tuple[StateFacts, ...]
    producer: dict[str, str]  # package: version
    source: dict[str, str]  # of the trained model: checkpoint hash
    files: dict[str, FileFacts] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """The largest difference in log-probability from PyTorch, in nats, that `check` lets pass: ours, not the file's."""
        return TOLERANCES[self.precision]

    @property
    def identity(self) -> str:
        """SHA-256 over the whole contract, file hashes included."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()

    @property
    def inputs(self) -> tuple[TensorFacts, ...]:
        """Graph inputs in order: tokens, positions, then memory."""
        ids = [TensorFacts(name=n, dtype="int64", shape=("batch", "segment")) for n in ("input_ids", "position_ids")]
        return (*ids, *(state.tensor() for state in self.state))

    @property
    def outputs(self) -> tuple[TensorFacts, ...]:
        """Graph outputs in order: logits, then memory."""
        logits = TensorFacts(name="logits", dtype="float32", shape=("batch", "segment", str(self.model.vocab_size)))
        present = (TensorFacts(name=s.present, dtype=s.dtype, shape=s.shape) for s in self.state)
        return (logits, *present)

    @property
    def bytes_per_stream(self) -> int:
        """Bytes of memory that one row needs, its position included."""
        return 8 + sum(state.tensor().num_bytes(batch=1) for state in self.state)


def state_tensors(model: ModelFacts, rule: MemoryRule, form: Form) -> tuple[StateFacts, ...]:
    """The memory tensors of a form, layer by layer.

    ring: keys and values [B, H, S, K]; shift: keys and values [B, H, M, K]; hidden: layer inputs [B, M, D].
    The names of keys and values are those that onnxruntime-genai expects.
    """
    if form == "hidden":
        shape: tuple[str, ...] = ("batch", str(rule.mem_len), str(model.d_model))
        names = [(f"past_hidden.{layer}", f"present_hidden.{layer}") for layer in range(model.layers)]
    else:
        slots = rule.slots if form == "ring" else rule.mem_len
        shape = ("batch", str(model.heads), str(slots), str(model.head_dim))
        names = [
            (f"past_key_values.{layer}.{kind}", f"present.{layer}.{kind}")
            for layer in range(model.layers)
            for kind in ("key", "value")
        ]
    return tuple(StateFacts(past=past, present=present, dtype="float32", shape=shape) for past, present in names)


def file_facts(path: Path) -> FileFacts:
    """Hash and size of a file as it is now."""
    return FileFacts(sha256=sha256(path), num_bytes=path.stat().st_size)


def save_spec(folder: Path, spec: Spec) -> None:
    """Writes `spec.json` with its own digest."""
    write_json(folder / SPEC, {**to_json(spec), "digest": spec.identity})


def load_spec(folder: Path) -> Spec:
    """The verified spec of an artefact folder.

    Schema, digest, sizes and the hash of every file are checked before anything else is read. Raises
    ArtefactError that names the file and says how to mend it.
    """
    path = folder / SPEC
    if not path.is_file():
        raise ArtefactError(f"{folder} is not an artefact: it has no {SPEC}; make one with `xl-export onnx RUN --out ARTEFACT`.")
    data = read_json(path)
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise ArtefactError(
            f"{path} has schema {schema}, and this version reads up to {SCHEMA}; update with `pip install -U xl-export`."
        )
    spec = parse_spec(data, where=str(path))
    for name, facts in spec.files.items():
        _verify_file(folder / name, facts)
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
        raise ArtefactError(f"{where} was altered: its digest does not match its content; export the artefact again.")
    count = spec.model.layers * (1 if spec.form == "hidden" else 2)  # compared first: absurd layers are not worth building
    if spec.schema != SCHEMA or len(spec.state) != count or spec.state != state_tensors(spec.model, spec.rule, spec.form):
        raise ArtefactError(f"{where} contradicts itself: schema or memory tensors do not follow from its model; export again.")
    for name in (GRAPH, WEIGHTS, VOCAB, REFERENCE):
        if name not in spec.files:
            raise ArtefactError(f"{where} does not list {name}; export the artefact again.")
    if not all(FILE_NAME.fullmatch(name) for name in spec.files):
        raise ArtefactError(f"{where} lists a file outside its folder; export the artefact again.")
    return spec


def _verify_file(path: Path, facts: FileFacts) -> None:
    if not path.is_file():
        raise ArtefactError(f"{path} is missing; copy the whole folder, or export the artefact again.")
    size = path.stat().st_size
    if size != facts.num_bytes:
        raise ArtefactError(f"{path} has {size} bytes, expected {facts.num_bytes}; copy it again, or export the artefact again.")
    if sha256(path) != facts.sha256:
        raise ArtefactError(
            f"{path} was altered: its SHA-256 is not the one in {SPEC}; copy it again, or export the artefact again."
        )
