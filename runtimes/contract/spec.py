"""`spec.json`: everything that a runtime must know about an artefact, and the proof that it is intact.

The shape letters have one meaning everywhere in this project:
B batch rows · T tokens in this segment · M memory length (tokens remembered) · S ring slots (M + T_max) ·
L layers · H heads · K head width · D model width · V vocabulary · N persistent vectors
"""

from __future__ import annotations

import contextlib
import dataclasses
import string
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from runtimes.base.errors import ArtefactError, ConfigError, StreamError
from runtimes.base.files import Content
from runtimes.base.folders import refuse_dataset, refuse_no_folder
from runtimes.base.ranges import Range, counted
from runtimes.base.records import Word, refuse_out_of_range, to_json
from runtimes.base.sealed import (
    Count,
    FileFacts,
    read_sealed,
    read_verified,
    reading_verified,
    refuse_other_identity,
    verify_file,
    write_sealed,
)
from runtimes.contract.memory import MAX_BATCH
from runtimes.contract.memory_identity import MemoryIdentity, layout_of
from runtimes.contract.model_facts import FROM_SEGMENT_END, ModelFacts, Positive
from runtimes.contract.precision import (
    MEMORY_PRESETS,
    PRESETS,
    QUANTISED,
    Measured,
    MeasuredStep,
    Measurement,
    MemoryPrecision,
    MemoryType,
    Precision,
)
from runtimes.contract.promises import PROMISES, Promise
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import (
    FORM_FACTS,
    POSITIONS,
    AnyForm,
    Shapes,
    Signature,
    TensorSpec,
    head_groups,
    language_model_tensors,
    refuse_signature,
    row_bytes,
    state_tensors,
)
from runtimes.contract.vocabulary import VOCAB as VOCAB
from runtimes.contract.vocabulary import Vocab

SCHEMA = 1
SPEC = "spec.json"
BUILD = "build.json"  # next to SPEC in the folder of an engine
GRAPH = "step.onnx"
WEIGHTS = "weights.bin"
REFERENCE = "reference.json"
ANSWERS = "reference.bin"
# The graph of an artefact for mobile, in ONNX Runtime's own format, and the operators that it needs there.
ORT_GRAPH = "step.ort"
OPERATORS = "required_operators.config"
# The same step for the fused operator, over the same weights; absent where it does not serve the model.
FUSED = "fused.onnx"
FUSED_ORT = "fused.ort"  # in ONNX Runtime's own format, instead of every other graph
# The same step for ONNX Runtime's CUDA provider, with attention as one node; absent unless asked for.
CUDA_GRAPH = "cuda.onnx"
LETTERS = string.ascii_letters + string.digits + "_"
# No folder, no "..", nothing that a file system refuses.
FILE_NAME = Word("the name of a file in its folder", LETTERS, LETTERS + ".-")
EXPORT_AGAIN = "export the artefact again"  # how to fix a file of an artefact
ROUNDINGS = 16  # of the weights of a traced module that its tolerance allows for
MAX_ROUNDING = 0.0125  # nats; beyond, a wrong graph and a right one look alike
POSITION_BYTES = 8  # of the position of one row
Target = Literal["onnxruntime", "tensorrt", "web"]
# What wrote the graph: this project node by node, or PyTorch by tracing a module.
Exporter = Literal["graph", "trace"]
# Whose answers the reference holds. `exported`: PyTorch's. `stored-weights`: of the stored weights in
# fp32, for quantised weights. `memory-in-bytes`: PyTorch's, whose memory is rounded to int8 too.
Answers = Literal["exported", "stored-weights", "memory-in-bytes"]
# Files of graph and weights: `step.onnx` with `weights.bin`, only `step.onnx`, `step.ort` or `fused.ort`.
Storage = Literal["external", "single-file", "ort", "fused-ort"]
GRAPH_FILES: dict[Storage, tuple[str, ...]] = {
    "external": (GRAPH, WEIGHTS),
    "single-file": (GRAPH,),
    "ort": (ORT_GRAPH,),
    "fused-ort": (FUSED_ORT,),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The contract of one artefact.

    The types of these fields are the only description of `spec.json`: `cpp/tools/format_tables.py` writes
    them into tables, which the readers in C++ and JavaScript follow.
    """

    schema: Annotated[int, Range(1, SCHEMA, whole=True)] = SCHEMA
    model: ModelFacts
    rule: MemoryRule
    form: AnyForm
    target: Target = "onnxruntime"  # the runtime that the graph is written for
    exporter: Exporter = "graph"
    precision: Precision  # precision of the weights
    memory_precision: MemoryPrecision = "fp32"
    answers: Answers = "exported"
    tolerance: float = 0.0
    """The largest difference in log-probability from the reference, in nats, that `check` lets pass. Like
    `answers`, it follows from the precisions, the target and `rounding`: a file cannot choose its own.
    """
    mean_tolerance: float = 0.0
    """The same for the mean difference, with `mean_rounding`."""
    measured: Measured | MeasuredStep | None = None
    """Cost of the precisions; None for fp32, and if there was nothing to measure on."""
    concern: str | None = None
    """One sentence on why the model may be useless, such as that its run was never validated."""
    trained_tokens: Count | None = None
    """Number of tokens that training read, repeated ones included; None if the run does not say."""
    opset: Annotated[int, Range(1, 1000, whole=True)]
    storage: Storage = "external"
    without: tuple[Promise, ...] = ()  # the promises that a traced module does not keep
    fixed_rows: Annotated[int, Range(1, MAX_BATCH, whole=True)] | None = None
    """Number of rows of every step, which then has exactly `rule.segment` tokens unless there is
    `fixed_tokens`; None for any number.
    """
    fixed_tokens: tuple[Positive, ...] = ()
    """Numbers of tokens that have a graph of their own, from 1 up to `rule.segment`. Empty for one graph."""
    moves_every: Positive | None = None
    """Number of complete tokens at which the graph moves the memory; None if it moves with every token."""
    drifts_from: Count | None = None
    """About the first position at which a traced module has other answers to a text than near position 0."""
    rounding: Annotated[float, Range(0, MAX_ROUNDING)] = 0.0
    """Largest change of a traced module's answers if each weight is rounded once more, in nats; 0 if it is
    far below the tolerance.
    """
    mean_rounding: Annotated[float, Range(0, MAX_ROUNDING)] = 0.0
    """The same for the mean change."""
    original_difference: Measurement | None = None
    """The largest difference of a traced module in fp32 from the original loop of its model: in nats, or of
    outputs, relative above 1. None if there was no original to compare with.
    """
    equals_up_to: Positive | None = None
    """Number of tokens of the longest text to which a traced module gives the answers of its model, whose
    memory was cut; None if it was not.
    """
    memory_shapes: Shapes = ()  # shapes of the memory tensors of a module whose form is `own`
    inputs: tuple[TensorSpec, ...] = ()
    """Inputs of the graph, in order. A language model's follow from the other fields; the spec of any other
    step is the only place that has its inputs and outputs.
    """
    outputs: tuple[TensorSpec, ...] = ()
    """The same for the outputs."""
    not_compared: tuple[Annotated[str, FILE_NAME], ...] = ()
    """The graphs that the exporting machine could not run, so they were not compared with PyTorch."""
    memory_identity: MemoryIdentity  # what decides whether the artefact continues a saved stream
    producer: dict[str, str]  # the version of each package that took part
    source: dict[str, str]  # the hash of the trained model
    files: dict[Annotated[str, FILE_NAME], FileFacts] = field(default_factory=dict)
    identity: str = ""
    """SHA-256 of the bytes of `spec.json`, which everything that is derived from the artefact records. The
    file does not hold it; it is empty until the file is written.
    """

    @cached_property
    def state(self) -> tuple[TensorSpec, ...]:
        """The memory tensors, which are the last inputs."""
        return tuple(tensor for tensor in self.inputs if tensor.present)

    @property
    def language_model(self) -> bool:
        """Whether the step reads token ids of a vocabulary and returns logits of the next token."""
        return self.model.vocab_size > 0

    @cached_property
    def signature(self) -> Signature:
        """The inputs and outputs that are not memory."""
        after = {tensor.present for tensor in self.state}
        return (
            tuple(tensor for tensor in self.inputs if tensor.present is None),
            tuple(tensor for tensor in self.outputs if tensor.name not in after),
        )

    def graph_shape(self, tensor: TensorSpec, tokens: int | None = None) -> tuple[int | str, ...]:
        """The shape of a tensor as a graph has it, with names for the sizes that vary.

        tokens: of the graph, if their number is fixed; None for a whole segment.
        """
        fixed: dict[int | str, int] = {}
        if self.fixed_rows is not None:
            fixed["batch"] = self.fixed_rows
        if fixed or self.fixed_tokens:
            fixed["tokens"] = tokens or self.rule.segment
        return tuple(fixed.get(size, size) for size in tensor.shape)

    @property
    def state_dtype(self) -> MemoryType:
        """The type of the memory tensors, except scales, which are float32."""
        return MEMORY_PRESETS[self.memory_precision].dtype

    @property
    def scaled_memory(self) -> bool:
        """Whether each vector of the memory has a scale, in a tensor of its own."""
        return MEMORY_PRESETS[self.memory_precision].scaled

    @property
    def cuda_in_halves(self) -> bool:
        """Whether the graph CUDA_GRAPH, if there is one, computes in fp16."""
        return self.precision == "fp16"

    @property
    def circular(self) -> bool:
        """Whether a token's slot in the memory follows from its position; see `FormFacts`."""
        return FORM_FACTS[self.form].circular

    @property
    def linear_ring(self) -> bool:
        """Whether the memory is a ring whose graph cannot write across the end of the ring.

        TensorRT's layer for memory in place writes consecutive slots. A session cuts a segment there, which
        changes no score under the mask `same-length`.
        """
        return self.circular and self.target == "tensorrt"

    @property
    def in_place(self) -> bool:
        """Whether past and present of the memory are one buffer.

        A graph for WebGPU makes a ring anew in each step: there, no operator writes into its input.
        """
        return self.circular and self.target != "web"

    @property
    def cuts_change_nothing(self) -> bool:
        """Whether no answer depends on how a stream is cut into steps."""
        return self.rule.cuts_change_nothing and "cuts" not in self.without

    @property
    def pads_right(self) -> bool:
        """Whether the tokens of a step change no answer to the tokens before them: see `Session`."""
        if self.model.positions == "own":
            return self.cuts_change_nothing
        return not self.model.positions.endswith(FROM_SEGMENT_END)

    @cached_property
    def lengths_fault(self) -> str | None:
        """Why the rows of one step cannot have different numbers of tokens, as a part of a sentence; None if
        they can.
        """
        if not self.circular:
            return f"in {self.form} memory, unlike a ring, all rows of a step have the same number of tokens"
        if self.fixed_rows is not None:
            rows = counted(self.fixed_rows, "row")
            return f"this artefact was exported for exactly {rows} that advance together"
        for promise in self.without:
            if promise in ("unequal", "rows"):
                return f"this artefact does not keep the promise `{promise}` ({PROMISES[promise]})"
        if self.model.positions.endswith(FROM_SEGMENT_END):
            return "the positions of this model count from the end of the segment, and padding changes them"
        return None

    @property
    def compared_outputs(self) -> tuple[str, ...]:
        """The outputs by which `check` compares a step that is no language model: all of them, but in a lower
        precision no ids, because a rounding may change an id to any other.
        """
        return tuple(x.name for x in self.signature[1] if x.dtype != "int64" or not self.lossy)

    def scale_of(self, output: np.ndarray) -> float:
        """What differences from an output of the reference are relative to: 1, and in a lower precision,
        whose limits are wide, its root mean square if that is smaller.
        """
        rms = float(np.sqrt(np.square(output, dtype=np.float64).mean())) if self.lossy else 1.0
        return min(rms, 1.0) or 1.0

    @property
    def lossy(self) -> bool:
        """Whether weights or memory are stored in fewer bits than they were trained in."""
        return (self.precision, self.memory_precision) != ("fp32", "fp32")

    def completed(self) -> Spec:
        """The same contract with the tensors, answers and tolerances that follow from its other fields."""
        refuse_out_of_range(self)
        before = state_tensors(self.model, self.rule, self.form, self.state_dtype, self.memory_shapes)
        after = [TensorSpec(name=str(past.present), dtype=past.dtype, shape=past.shape) for past in before]
        inputs, outputs = language_model_tensors(self.model) if self.language_model else self.signature
        if not self.language_model:
            refuse_signature((inputs, outputs))
        answers, most, mean = limits(self.precision, self.memory_precision, self.target)
        most, mean = max(most, ROUNDINGS * self.rounding), max(mean, ROUNDINGS * self.mean_rounding)
        return dataclasses.replace(
            self,
            inputs=(*inputs, *before),
            outputs=(*outputs, *after),
            answers=answers,
            tolerance=most,
            mean_tolerance=mean,
        )

    def with_layout(self, vocab: Vocab | None) -> Spec:
        """The same contract with the layout of its memory. vocab: None for a step that is no language
        model.
        """
        heads = []
        if self.model.reaches and FORM_FACTS[self.form].holds == "keys":
            groups = chain.from_iterable(head_groups(self.model, self.rule, self.form))
            heads = [group.heads for group in groups]
        layout = layout_of(self.state, self.rule, self.form, vocab, moves_every=self.moves_every, heads=heads)
        identity = dataclasses.replace(self.memory_identity, layout=layout)
        return dataclasses.replace(self, memory_identity=identity)

    @property
    def only_whole_segments(self) -> bool:
        """Whether every step must have `rule.segment` tokens."""
        return "cuts" in self.without or (self.fixed_rows is not None and not self.fixed_tokens)

    def to_json(self) -> dict[str, Any]:
        """The contract as JSON."""
        document = to_json(self)
        # Absent unless they say something.
        facts = "without fixed_rows fixed_tokens moves_every drifts_from rounding mean_rounding "
        facts += "original_difference equals_up_to not_compared trained_tokens"
        for name in facts.split():
            if getattr(self, name) == getattr(Spec, name):
                del document[name]
        if isinstance(self.measured, Measured) and not self.measured.drawn:
            del document["measured"]["drawn"]
        tensors = {n: [x.to_json() for x in getattr(self, n)] for n in ("inputs", "outputs")}
        return document | tensors

    @property
    def graph_file(self) -> str:
        """The name of the file with the graph: of standard operators, unless the artefact has none."""
        return GRAPH_FILES[self.storage][0]

    @property
    def fused_graph_file(self) -> str | None:
        """The name of the file with the graph for the fused operator; None if the artefact has none."""
        if self.only_fused:
            return self.graph_file
        return FUSED if FUSED in self.files else None

    @property
    def only_fused(self) -> bool:
        """Whether the only graph is for the fused operator."""
        return self.storage == "fused-ort"

    @property
    def in_ort_format(self) -> bool:
        """Whether graph and weights are one file of ONNX Runtime's own format."""
        return self.storage in ("ort", "fused-ort")

    @cached_property
    def token_graphs(self) -> dict[int, str]:
        """The files of several graphs over one file of weights, by their number of tokens, the largest first;
        empty for an artefact with one graph.

        A step runs the largest graph that fits, and again for the rest: 19 tokens are 16, 1, 1 and 1.
        """
        return {
            count: GRAPH if count == self.rule.segment else f"step.{count}.onnx"
            for count in reversed(self.fixed_tokens)
        }

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
        return POSITION_BYTES + row_bytes(
            state_tensors(self.model, self.rule, self.form, "float32", self.memory_shapes)
        )


class NoLanguageModelError(StreamError):
    """The artefact has named inputs, and was used as a language model."""

    def __init__(self, step: str) -> None:
        super().__init__(step)
        self.step = step
        """What its step reads and returns."""

    def __str__(self) -> str:
        return (
            f"{self.step}; use `session.step`, or /v1/streams/ID/step of a server, because everything else "
            "needs token ids in and logits of the next token out."
        )


def refuse_no_language_model(spec: Spec) -> None:
    """Raises NoLanguageModelError unless the step of an artefact is a language model's."""
    if not spec.language_model:
        inputs, outputs = (_names(tensors) for tensors in spec.signature)
        raise NoLanguageModelError(
            f"this artefact is no language model: its step reads {inputs} and returns {outputs}"
        )


def _names(tensors: Iterable[TensorSpec]) -> str:
    """Such as "pitch and duration"; without the positions, which a session adds."""
    *first, last = (tensor.name for tensor in tensors if tensor.name != POSITIONS)
    return f"{', '.join(first)} and {last}" if first else last


def refuse_unless_onnx(spec: Spec, folder: Path, *, what: str) -> None:
    """Raises ConfigError unless the graphs of an artefact are in ONNX files.

    what: what needs it so, in words.
    """
    if spec.in_ort_format:
        raise ConfigError(
            f"{folder} has its graph in {spec.graph_file}, and {what} needs {GRAPH}; export the run again "
            f"without --{spec.storage}."
        )


def refuse_unless_one_onnx(spec: Spec, folder: Path, *, what: str) -> None:
    """The same unless all steps of an artefact are one such graph."""
    refuse_unless_onnx(spec, folder, what=what)
    if spec.token_graphs:
        raise ConfigError(
            f"{folder} has {len(spec.token_graphs)} graphs, and {what} runs one; export it without --tokens, "
            "or, if the module has `step_tokens`, trace it with a rule whose segment is that number."
        )


def tolerances(
    precision: Precision, memory: MemoryPrecision, target: Target, answers: Answers
) -> tuple[float, float]:
    """The largest and the mean difference from the reference, in nats, that `check` lets pass.

    The second one is tighter where the first leaves room for single values.
    """
    # An engine multiplies by its stored weights in fp16 and rounds no activations to fewer bits. Where the
    # reference is of the stored weights, it must be as near as one of fp16.
    weights = PRESETS["fp16" if target == "tensorrt" and answers == "stored-weights" else precision]
    preset = MEMORY_PRESETS[memory]
    remembered = (PRESETS[preset.rounds_like].tolerance, PRESETS[preset.rounds_like].mean_tolerance)
    if answers == "memory-in-bytes":
        remembered = preset.tolerances
    return max(weights.tolerance, remembered[0]), max(weights.mean_tolerance, remembered[1])


def limits(precision: Precision, memory: MemoryPrecision, target: Target) -> tuple[Answers, float, float]:
    """Whose answers the reference holds, and the `tolerances` of `check`."""
    answers: Answers = "memory-in-bytes" if MEMORY_PRESETS[memory].rounded_tolerances else "exported"
    if precision in QUANTISED:
        answers = "stored-weights"
    return answers, *tolerances(precision, memory, target, answers)


def save_spec(folder: Path, spec: Spec) -> Spec:
    """Writes `spec.json`; returns the spec with the identity that it has now."""
    return write_sealed(folder / SPEC, spec)


def load_spec(folder: Path) -> Spec:
    """The spec of an artefact folder, after schema, digest, sizes and the hash of every file were verified.

    Raises ArtefactError that names the file at fault and says how to fix it.
    """
    with open_artefact(folder, wanted=()) as (spec, _):
        return spec


def load_language_model(folder: Path) -> Spec:
    """`load_spec` for what needs a language model; raises StreamError for any other step."""
    spec = load_spec(folder)
    refuse_no_language_model(spec)
    return spec


@contextlib.contextmanager
def open_artefact(
    folder: Path, *, wanted: Collection[str], identity: str | None = None
) -> Iterator[tuple[Spec, dict[str, Content]]]:
    """The spec of an artefact folder as `load_spec` verifies it, and the content of some of its files.

    identity: the only one that is accepted; None accepts every artefact.
    wanted: names of files. Their content is exactly what was verified, whatever happens to the folder since.
    The weights are hashed by another thread while the body of the `with` statement runs, and verified at its
    end; until then it must give nothing away that it made of them. All other files are verified before.
    Raises ArtefactError that names the file at fault and says how to fix it.
    """
    path = folder / SPEC
    if not path.is_file():
        refuse_no_folder(folder, give="an artefact")
        refuse_dataset(folder, give="an artefact")
        is_run = (folder / "config.json").is_file()
        found = "is a run and not an artefact" if is_run else f"is not an artefact: it has no {SPEC}"
        made = f"make one with `xl-export export {folder if is_run else 'RUN'} --out ARTEFACT`"
        raise ArtefactError(f"{folder} {found}; {made}.")
    spec = read_spec(path)
    refuse_other_identity(path, spec.identity, identity)
    if wanted:
        wanted = {*wanted, *spec.token_graphs.values()}
    contents: dict[str, Content] = {}
    with contextlib.ExitStack() as verified_later:
        for name, facts in spec.files.items():
            if name not in wanted:
                verify_file(folder / name, facts, record=SPEC, again=EXPORT_AGAIN)
                continue
            if name == WEIGHTS:
                content = reading_verified(folder / name, facts, record=SPEC, again=EXPORT_AGAIN)
                contents[name] = verified_later.enter_context(content)
            else:
                contents[name] = read_verified(folder / name, facts, record=SPEC, again=EXPORT_AGAIN)
        yield spec, contents


def read_spec(path: Path) -> Spec:
    """The spec in a `spec.json`, after its digest and its consistency were verified."""
    spec = read_sealed(Spec, path, schema=SCHEMA, what="artefact", again=EXPORT_AGAIN)
    try:
        expected = spec.completed()
    except ConfigError as error:
        raise ArtefactError(f"{path}: {str(error).rstrip('.')}; {EXPORT_AGAIN}.") from error
    vocab = [VOCAB] if spec.language_model else []
    needed = (*GRAPH_FILES[spec.storage], *spec.token_graphs.values(), *vocab, REFERENCE, ANSWERS)
    missing = [name for name in needed if name not in spec.files]
    rounding = spec.rounding or spec.mean_rounding
    traced = spec.form == "own" or not spec.language_model or spec.without or rounding
    # The readers in C++ and JavaScript have the same rules.
    contradictions = {
        "its inputs, outputs, answers or tolerances do not follow from its model and precision": spec
        != expected,
        "its graph was written, and has what only traced ones have": spec.exporter == "graph" and traced,
        "its steps cannot be cut into its numbers of tokens": spec.fixed_tokens and not _may_cut(spec),
        "its graph has fixed sizes and a large vocabulary": spec.fixed_rows and spec.model.selective,
        f"its weights are in {spec.graph_file}, and it lists others": spec.storage != "external"
        and {FUSED, WEIGHTS} & set(spec.files),
        f"it does not list {', '.join(missing)}": missing,
    }
    for what, holds in contradictions.items():
        if holds:
            raise ArtefactError(f"{path} contradicts itself: {what}; {EXPORT_AGAIN}.")
    return spec


def _may_cut(spec: Spec) -> bool:
    """Whether every length of a step is a sum of the numbers of tokens of its graphs, and no answer depends
    on the cuts.
    """
    counts = spec.fixed_tokens
    complete = {1, spec.rule.segment} <= set(counts) and counts == tuple(sorted(set(counts)))
    return complete and spec.cuts_change_nothing and spec.storage == "external"
