"""`spec.json`: everything that a runtime must know about an artefact, and the proof that it is intact.

The shape letters have one meaning everywhere in this project:
B batch rows · T tokens in this segment · M memory length (tokens remembered) · S ring slots (M + T_max) ·
L layers · H heads · K head width · D model width · V vocabulary · N persistent vectors
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import Content, read_json
from runtimes.base.folders import refuse_dataset, refuse_no_folder
from runtimes.base.records import to_json
from runtimes.base.sealed import (
    FileFacts,
    identity_of,
    parse_sealed,
    reading_files,
    write_sealed,
)
from runtimes.contract.model_facts import ModelFacts
from runtimes.contract.precision import (
    MEAN_TOLERANCES,
    MEMORY_IN_BYTES,
    MEMORY_TYPES,
    OLDER_MEAN_TOLERANCES,
    TOLERANCES,
    Measured,
    MemoryPrecision,
    MemoryType,
    Precision,
)
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import (
    AnyForm,
    ListedTensor,
    Shapes,
    StateFacts,
    TensorFacts,
    bytes_saved,
    listed,
    row_bytes,
    state_tensors,
)
from runtimes.contract.vocabulary import VOCAB as VOCAB

SCHEMA = 1
SPEC, GRAPH, WEIGHTS = "spec.json", "step.onnx", "weights.bin"
REFERENCE, ANSWERS = "reference.json", "reference.bin"
OLD_REFERENCE = "reference.npz"  # the one file of both in artefacts without `inputs` and `outputs`
# The graph of an artefact for mobile, in ONNX Runtime's own format, and the operators that it needs there.
ORT_GRAPH, OPERATORS = "step.ort", "required_operators.config"
# The same step for the fused operator, over the same weights; absent where it does not serve the model.
FUSED = "fused.onnx"
# A plain name: no folder, no "..", nothing that a file system refuses.
FILE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
EXPORT_AGAIN = "export the artefact again"  # what mends a file of an artefact
POSITION_BYTES = 8  # of the position of one row
Target = Literal["onnxruntime", "tensorrt", "web"]
# What wrote the graph: this project node by node, or PyTorch by tracing a module.
Exporter = Literal["graph", "trace"]
# Whose answers the reference holds. `exported`: PyTorch's, and with quantised weights those of the graph on
# the machine that exported, as in older artefacts. `stored-weights`: those of the stored weights in fp32.
# `memory-in-bytes`: PyTorch's, whose memory is rounded to int8 too.
Answers = Literal["exported", "stored-weights", "memory-in-bytes"]
# Where graph and weights lie: in `step.onnx` beside `weights.bin`, in `step.onnx` alone, or in `step.ort`.
Storage = Literal["external", "single-file", "ort"]
GRAPH_FILES: dict[Storage, tuple[str, ...]] = {
    "external": (GRAPH, WEIGHTS),
    "single-file": (GRAPH,),
    "ort": (ORT_GRAPH,),
}
# Fields that were added to schema 1, with the value that means the same as their absence. A spec writes such
# a field only where it has another value, so that an artefact from before the field loads and keeps its
# identity.
ADDED_FIELDS: dict[str, Any] = {
    "target": "onnxruntime",
    "memory_precision": "fp32",
    "measured": None,
    "exporter": "graph",
    "memory_shapes": (),
    "concern": None,
    "inputs": (),
    "outputs": (),
    "answers": "exported",
    "storage": "external",
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The contract of one artefact.

    Its `identity` is recorded in everything that is derived from the artefact.

    target: the runtime that the graph is written for. With `tensorrt` the memory has the type of the
    precision. precision: that of the weights. memory_precision: that of the memory tensors. measured: what
    both cost; None for fp32, and where no text was given to measure on. exporter: what wrote the graph.
    memory_shapes: the memory tensors of a module whose form is `own`; empty for every other form. concern:
    one sentence on why the model may be of no use, as a run that was never validated; None for no concern.
    producer: the version of each package that took part. source: the hash of the trained model. inputs,
    outputs: the tensors of the graph, listed for readers in any language; empty in older artefacts, where
    they follow from the other fields all the same (`graph_inputs`, `graph_outputs`). answers: whose answers
    the reference holds. storage: in which files the graph and its weights are.
    """

    schema: int = SCHEMA
    model: ModelFacts
    rule: MemoryRule
    form: AnyForm
    precision: Precision
    opset: int
    state: tuple[StateFacts, ...]
    producer: dict[str, str]
    source: dict[str, str]
    target: Target = "onnxruntime"
    memory_precision: MemoryPrecision = "fp32"
    measured: Measured | None = None
    exporter: Exporter = "graph"
    memory_shapes: Shapes = ()
    concern: str | None = None
    inputs: tuple[ListedTensor, ...] = ()
    outputs: tuple[ListedTensor, ...] = ()
    answers: Answers = "exported"
    storage: Storage = "external"
    files: dict[str, FileFacts] = field(default_factory=dict)

    @property
    def state_dtype(self) -> MemoryType:
        """The type of the memory tensors; those of bytes have scales, which are float32."""
        if self.target == "tensorrt" and self.precision != "fp32":
            return "float16"
        return MEMORY_TYPES[self.memory_precision]

    @property
    def linear_ring(self) -> bool:
        """Whether the memory is a ring whose graph cannot write across the end of the ring.

        TensorRT's layer for memory in place writes consecutive slots. A session cuts a segment there, which
        changes no score under the mask `same-length`.
        """
        return self.form == "ring" and self.target == "tensorrt"

    @property
    def in_place(self) -> bool:
        """Whether past and present of the memory are one buffer.

        A graph for WebGPU makes a ring anew in each step: there, no operator writes into its input.
        """
        return self.form == "ring" and self.target != "web"

    @property
    def lossy(self) -> bool:
        """Whether weights or memory are stored in fewer bits than they were trained in."""
        return (self.precision, self.memory_precision) != ("fp32", "fp32")

    @property
    def tolerance(self) -> float:
        """The largest difference in log-probability from the reference, in nats, that `check` lets pass.

        It is a constant of this project. A file chooses among them by precision, memory_precision, target and
        answers, and cannot give another number.
        """
        if self.answers == "memory-in-bytes":
            return max(TOLERANCES[self.precision], MEMORY_IN_BYTES[0])
        return max(TOLERANCES[precision] for precision in self._judged_as)

    @property
    def mean_tolerance(self) -> float:
        """The largest mean difference that `check` lets pass.

        It is tighter where `tolerance` leaves room for single values.
        """
        if self.answers == "memory-in-bytes":
            return max(MEAN_TOLERANCES[self.precision], MEMORY_IN_BYTES[1])
        limits = OLDER_MEAN_TOLERANCES if self.answers == "exported" else MEAN_TOLERANCES
        return max(limits[precision] for precision in self._judged_as)

    @property
    def _judged_as(self) -> tuple[Precision, Precision]:
        """The precisions of weights and memory whose limits `check` takes.

        An engine multiplies by its stored weights in fp16 and rounds no activations to fewer bits. Where the
        reference is of the stored weights, it must be as near as one of fp16.
        """
        if self.target == "tensorrt" and self.answers == "stored-weights":
            return "fp16", self.memory_precision
        return self.precision, self.memory_precision

    @property
    def identity(self) -> str:
        """SHA-256 over the whole contract, file hashes included."""
        return identity_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The contract as it is written and hashed: without the `ADDED_FIELDS` that have their default."""
        lists = {"inputs": self.inputs, "outputs": self.outputs}
        document = to_json(self) | {n: tuple(x.to_json() for x in tensors) for n, tensors in lists.items()}
        return {
            name: value
            for name, value in document.items()
            if name not in ADDED_FIELDS or value != ADDED_FIELDS[name]
        }

    def with_tensors(self) -> Spec:
        """The same contract with the memory tensors and the lists that follow from its other fields."""
        spec = dataclasses.replace(self, state=self.state_in(self.state_dtype))
        inputs, outputs = spec._lists()
        return dataclasses.replace(spec, inputs=inputs, outputs=outputs)

    def lists(self) -> tuple[tuple[ListedTensor, ...], tuple[ListedTensor, ...]]:
        """The graph's inputs and outputs: as `spec.json` lists them, or in older artefacts as they follow."""
        return (self.inputs, self.outputs) if self.inputs else self._lists()

    def _lists(self) -> tuple[tuple[ListedTensor, ...], tuple[ListedTensor, ...]]:
        """The graph's inputs and outputs as `spec.json` lists them."""
        selective = self.model.selective
        inputs, outputs = (
            tuple(listed(facts, selective=selective) for facts in side)
            for side in (self.graph_inputs, self.graph_outputs)
        )
        return inputs, outputs

    @property
    def graph_file(self) -> str:
        """The name of the file with the graph of standard operators."""
        return GRAPH_FILES[self.storage][0]

    @property
    def reference_files(self) -> tuple[str, ...]:
        """The names of the files with the reference's tokens and answers."""
        return (OLD_REFERENCE,) if OLD_REFERENCE in self.files else (REFERENCE, ANSWERS)

    @property
    def graph_inputs(self) -> tuple[TensorFacts, ...]:
        """The inputs of the graph in order: tokens, positions, two more with a large vocabulary, then the
        memory.

        These two are `targets`, the tokens whose log-probability is wanted (-1 for none), and `logit_rows`,
        the positions whose logits are wanted, as b T + t for row b and token t.
        """
        names = ["input_ids", "position_ids", *(["targets"] if self.model.selective else [])]
        ids = [TensorFacts(name=n, dtype="int64", shape=("batch", "segment")) for n in names]
        if self.model.selective:
            ids.append(TensorFacts(name="logit_rows", dtype="int64", shape=("rows",)))
        return (*ids, *(state.tensor() for state in self.state))

    @property
    def graph_outputs(self) -> tuple[TensorFacts, ...]:
        """The outputs of the graph in order: logits, log-probabilities where `targets` is an input, then the
        memory.
        """
        where = ("rows",) if self.model.selective else ("batch", "segment")
        head = [TensorFacts(name="logits", dtype="float32", shape=(*where, str(self.model.vocab_size)))]
        if self.model.selective:
            head.append(TensorFacts(name="log_probs", dtype="float32", shape=("batch", "segment")))
        return (*head, *(TensorFacts(name=s.present, dtype=s.dtype, shape=s.shape) for s in self.state))

    @property
    def bytes_per_stream(self) -> int:
        """The bytes of one stream when it is saved or forked: its memory tensors and its position."""
        return POSITION_BYTES + row_bytes(self.state)

    @property
    def running_bytes_per_stream(self) -> int:
        """The bytes that a session holds for one stream while it runs.

        A ring is mostly written in place. Other memory is read from one set of tensors and written to a
        second one, so both count.
        """
        return self.bytes_per_stream + (0 if self.in_place else row_bytes(self.state))

    @property
    def fp32_bytes_per_stream(self) -> int:
        """`bytes_per_stream` of the same artefact with memory in float32."""
        return POSITION_BYTES + row_bytes(self.state_in("float32"))

    def state_in(self, dtype: MemoryType) -> tuple[StateFacts, ...]:
        """The memory tensors that follow from model, rule and form, in a type."""
        return state_tensors(self.model, self.rule, self.form, dtype, self.memory_shapes)

    @property
    def bytes_saved(self) -> int:
        """The bytes of memory that learned spans save each row, against heads that all remember `mem_len`
        tokens.
        """
        return bytes_saved(self.model, self.rule, self.form, self.state_dtype)


def refuse_ort_format(spec: Spec, folder: Path, *, what: str) -> None:
    """Raises ConfigError for an artefact whose graph is only in ONNX Runtime's own format.

    what: what needs the graph as an ONNX file, in words.
    """
    if spec.storage == "ort":
        raise ConfigError(
            f"{folder} has its graph in {ORT_GRAPH}, and {what} needs {GRAPH}; export the run again without "
            "--ort."
        )


def save_spec(folder: Path, spec: Spec) -> None:
    """Writes `spec.json` with its own digest."""
    write_sealed(folder / SPEC, spec.to_json())


def load_spec(folder: Path) -> Spec:
    """The spec of an artefact folder, after schema, digest, sizes and the hash of every file were verified.

    Raises ArtefactError that names the file at fault and says how to mend it.
    """
    with open_artefact(folder, wanted=()) as (spec, _):
        return spec


@contextlib.contextmanager
def open_artefact(folder: Path, *, wanted: Collection[str]) -> Iterator[tuple[Spec, dict[str, Content]]]:
    """The spec of an artefact folder as `load_spec` verifies it, and the content of some of its files.

    wanted: names of files. Their content is exactly what was verified, whatever happens to the folder since.
    The weights are hashed by another thread while the body of the `with` statement runs, and verified at its
    end; until then it must give nothing away that it made of them. All other files are verified before.
    Raises ArtefactError that names the file at fault and says how to mend it.
    """
    path = folder / SPEC
    if not path.is_file():
        refuse_no_folder(folder, give="an artefact")
        refuse_dataset(folder, give="an artefact")
        is_run = (folder / "config.json").is_file()
        found = "is a run and not an artefact" if is_run else f"is not an artefact: it has no {SPEC}"
        made = f"make one with `xl-export export {folder if is_run else 'RUN'} --out ARTEFACT`"
        raise ArtefactError(f"{folder} {found}; {made}.")
    spec = parse_spec(read_json(path), where=str(path))
    files = reading_files(folder, spec.files, wanted=wanted, large=[WEIGHTS], record=SPEC, again=EXPORT_AGAIN)
    with files as contents:
        yield spec, contents


def parse_spec(data: Any, *, where: str) -> Spec:
    """The spec in parsed JSON, after its digest and its consistency were verified."""
    spec = parse_sealed(
        Spec,
        data,
        where=where,
        schema=SCHEMA,
        what="artefact",
        again="export it again",
        document=Spec.to_json,
    )
    try:
        expected = spec.state_in(spec.state_dtype)
    except ConfigError as error:
        raise ArtefactError(f"{where}: {str(error).rstrip('.')}; export the artefact again.") from error
    if spec.schema != SCHEMA or spec.state != expected:
        raise ArtefactError(
            f"{where} contradicts itself: schema or memory tensors do not follow from its model; export "
            "again."
        )
    lists = spec.inputs, spec.outputs
    if lists != ((), ()) and _facts_of(lists) != _facts_of(spec._lists()):
        raise ArtefactError(
            f"{where} contradicts itself: its lists of inputs and outputs are not those of its graph; export "
            "the artefact again."
        )
    if spec.form == "own" and spec.exporter == "graph":
        raise ArtefactError(
            f"{where} has memory of the form own, and the written graphs have none; export the "
            "artefact again."
        )
    if OLD_REFERENCE in spec.files and (spec.inputs or {REFERENCE, ANSWERS} & set(spec.files)):
        raise ArtefactError(
            f"{where} contradicts itself: {OLD_REFERENCE} is the reference of older artefacts, and this one "
            f"lists its tensors or {REFERENCE} too; export the artefact again."
        )
    for name in (*GRAPH_FILES[spec.storage], VOCAB, *spec.reference_files):
        if name not in spec.files:
            raise ArtefactError(f"{where} does not list {name}; export the artefact again.")
    if spec.storage != "external" and {FUSED, WEIGHTS} & set(spec.files):
        raise ArtefactError(
            f"{where} contradicts itself: its weights are in {spec.graph_file}, and it lists others; export "
            "the artefact again."
        )
    if not all(FILE_NAME.fullmatch(name) for name in spec.files):
        raise ArtefactError(f"{where} lists a file outside its folder; export the artefact again.")
    return spec


def _facts_of(lists: tuple[tuple[ListedTensor, ...], ...]) -> list[list[tuple[Any, ...]]]:
    """What must be right in lists of tensors: all but the sentences for people, which may be reworded."""
    return [[(x.name, x.dtype, x.shape, x.optional) for x in side] for side in lists]
