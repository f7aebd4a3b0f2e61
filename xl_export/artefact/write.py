"""Writes the folder of an artefact, from graphs that are written node by node, or traced.

The graphs are compared with PyTorch in fp32 first, and again in a lower precision. The folder appears when
all of this has succeeded.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, get_args

import numpy as np
import onnx_ir as ir
from torch import nn

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import write_json
from runtimes.base.folders import atomic_folder
from runtimes.base.machine import package_versions, refuse_beyond_memory
from runtimes.base.records import to_json
from runtimes.base.sealed import file_facts
from runtimes.contract.model_facts import ModelFacts
from runtimes.contract.precision import QUANTISED, Measured, MemoryPrecision, Precision
from runtimes.contract.reference import Reference, save_reference
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler, write_sampling
from runtimes.contract.session import Session
from runtimes.contract.spec import GRAPH, SPEC, Answers, Exporter, Spec, Storage, Target, save_spec
from runtimes.contract.tensors import AnyForm, Shapes, Signature
from runtimes.contract.vocabulary import Vocab, save_vocab
from runtimes.sessions.onnx_runtime import OrtSession
from xl_export.artefact.pack import pack
from xl_export.artefact.quality import measure
from xl_export.artefact.validate import (
    ROWS,
    answers_of,
    check_again,
    check_quantised,
    validate,
    validate_step,
)
from xl_export.graph import genai
from xl_export.graph.ops import save_model

if TYPE_CHECKING:
    from trainer.run.checkpoint import Run


class Exportable(Protocol):
    """A model from which an artefact is made. source: hashes of what it was read from."""

    @property
    def vocab(self) -> Vocab | None:
        """The vocabulary of its token ids; None of a step that is no language model."""
        ...

    def reference(self, rule: MemoryRule) -> Session:
        """The model in PyTorch, with which graphs are compared."""
        ...

    def write_graphs(self, spec: Spec, folder: Path) -> OrtSession:
        """Writes the graphs of a spec with their weights, and returns a session over the step graph."""
        ...


def spec_of(
    facts: ModelFacts,
    rule: MemoryRule,
    form: AnyForm,
    target: Target,
    precision: Precision,
    memory_precision: MemoryPrecision,
    *,
    opset: int,
    source: dict[str, str],
    exporter: Exporter = "graph",
    shapes: Shapes = (),
    signature: Signature = ((), ()),
    fixed_rows: int | None = None,
    moves_every: int | None = None,
) -> Spec:
    """Returns the contract of an artefact, without the hashes of files, which do not exist yet.

    signature: the inputs and outputs of a step that is no language model.
    """
    answers: Answers = "memory-in-bytes" if memory_precision == "int8" else "exported"
    return Spec(
        model=facts,
        rule=rule,
        form=form,
        precision=precision,
        memory_precision=memory_precision,
        opset=opset,
        target=target,
        producer=package_versions(),
        source=source,
        exporter=exporter,
        memory_shapes=shapes,
        fixed_rows=fixed_rows,
        moves_every=moves_every,
        inputs=signature[0],
        outputs=signature[1],
        answers="stored-weights" if precision in QUANTISED else answers,
    ).completed()


def precisions_for(
    target: Target, precision: Precision | None, memory_precision: MemoryPrecision | None
) -> tuple[Precision, MemoryPrecision]:
    """Returns the precisions of weights and memory.

    Raises ConfigError if the target does not support them.
    """
    for name, value, choices in (
        ("precision", precision, get_args(Precision)),
        ("memory_precision", memory_precision, get_args(MemoryPrecision)),
    ):
        if value is not None and value not in choices:
            raise ConfigError(f"{name} is {value!r:.20}; expected one of {', '.join(choices)}.")
    if target != "tensorrt":
        if precision == "fp8":
            raise ConfigError("--precision fp8 is for engines; give --target tensorrt too, or leave it out.")
        if target == "web" and memory_precision == "int8":
            raise ConfigError(
                "--memory-precision is int8, and WebGPU has no numbers of 8 bits; give fp16, or leave out "
                "--target web: browsers compute other graphs in WebAssembly."
            )
        return precision or "fp32", memory_precision or "fp32"
    if precision == "int8-stored":
        raise ConfigError(
            "--precision int8-stored is widened when ONNX Runtime loads the graph, and TensorRT keeps "
            "weights as they are stored; give --precision int8, or leave out --target tensorrt."
        )
    if memory_precision is not None:
        raise ConfigError(
            f"--memory-precision is {memory_precision}, and --target tensorrt writes memory in fp16, or in "
            "fp32 with --precision fp32: leave it out."
        )
    return precision or "fp16", "fp32"  # the target implies an fp16 memory, so no spec repeats it


def refuse_needless_text(text: Path | None, spec: Spec) -> None:
    """Raises ConfigError for a text to measure on if no precision is reduced."""
    if text is not None and not spec.lossy:
        raise ConfigError(
            "--text is the text on which a reduced precision is measured, and none was given; give "
            "--precision or --memory-precision, or leave --text out."
        )


def reference_of(run: Run, rule: MemoryRule) -> Session:
    """A run in PyTorch, with which its graphs are compared."""
    from trainer.run.session import ProjectedTorchSession  # not for a traced module; see `traced.py`

    return ProjectedTorchSession(run.model.eval(), run.vocab, rule, identity=run.sha256)


def finite_arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters and buffers of a module as float32 arrays by name.

    Raises ArtefactError if a parameter is not finite, or a buffer is not a number: masks hold infinities.
    """
    weights = {name: tensor.detach().float().numpy() for name, tensor in module.state_dict().items()}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, array in weights.items():
        if not (np.isfinite(array) if name in parameters else ~np.isnan(array)).all():
            raise ArtefactError(
                f"{name} holds values that are not finite; export a checkpoint from before the loss diverged."
            )
    return weights


def write_artefact(
    model: Exportable,
    spec: Spec,
    out: Path,
    *,
    tokens: np.ndarray | None,
    force: bool,
    sources: Sequence[Path] = (),
    sampler: Sampler | None = None,
) -> None:
    """Writes the artefact of a spec to the folder `out`, atomically.

    tokens: those on which a lower precision is measured; None measures nothing. sources: files and folders
    that must not be replaced. sampler: the artefact's defaults; None writes none. Raises UserError if the
    graphs do not compute what PyTorch computes.
    """
    storage = spec.storage
    spec = dataclasses.replace(spec, storage="external")
    with atomic_folder(out, force=force, marker=SPEC, sources=sources) as folder:
        vocab = model.vocab
        if vocab is None:
            exported = model.write_graphs(spec, folder)
            outputs = validate_step(exported, model.reference(spec.rule), tolerance=spec.tolerance)
            save_reference(folder, outputs)
        else:
            spec = _write_language_model(model, vocab, spec, folder, storage, tokens)
        files = {path.name: file_facts(path) for path in sorted(folder.iterdir())}
        save_spec(folder, dataclasses.replace(spec, files=files))
        if sampler:
            write_sampling(folder, sampler)


def _write_language_model(
    model: Exportable, vocab: Vocab, spec: Spec, folder: Path, storage: Storage, tokens: np.ndarray | None
) -> Spec:
    """Writes all files of a language model except `spec.json`; returns what that has to hold."""
    if spec.lossy:
        reference, measured = write_lowered(model, spec, folder, tokens)
        spec = dataclasses.replace(spec, measured=measured)
    else:
        reference = compare(model, model.write_graphs(spec, folder))
    if storage != "external":
        spec = pack(dataclasses.replace(spec, storage=storage), vocab, folder, reference)
    save_reference(folder, reference)
    save_vocab(folder, vocab)
    if genai.takes(spec):
        for name, document in genai.genai_files(spec, vocab).items():
            write_json(folder / name, document)
    return spec


def write_lowered(
    model: Exportable, spec: Spec, folder: Path, tokens: np.ndarray | None
) -> tuple[Reference, Measured | None]:
    """Writes graphs in a lower precision; returns their reference, and what the precision costs.

    The same artefact is first written in fp32 to a temporary folder. That one is compared with PyTorch, and
    the lower precision is measured against it. Nothing is measured without tokens.
    """
    target = "onnxruntime" if spec.target == "tensorrt" else spec.target
    exact_spec = dataclasses.replace(
        spec, target=target, precision="fp32", memory_precision="fp32", answers="exported"
    ).completed()
    with tempfile.TemporaryDirectory() as name:
        exact = model.write_graphs(exact_spec, Path(name))
        reference = compare(model, exact)
        low = model.write_graphs(spec, folder)
        if spec.answers == "stored-weights":
            reference = check_quantised(low, over_stored_weights(exact, Path(name), folder), reference)
        else:
            if spec.answers == "memory-in-bytes":
                reference = with_memory_in_bytes(model, reference, spec.rule)
            check_again(low, reference)
        if tokens is None:
            return reference, None
        return reference, measure(low, exact, tokens, folders=(folder, Path(name)))


def with_memory_in_bytes(model: Exportable, reference: Reference, rule: MemoryRule) -> Reference:
    """Returns the answers of PyTorch, to the same tokens, with memory that is rounded to int8."""
    from trainer.model.projected import append_in_bytes
    from trainer.run.session import ProjectedTorchSession

    exact = model.reference(rule)
    assert isinstance(exact, ProjectedTorchSession), "traced modules have no memory in int8"
    naive = ProjectedTorchSession(
        exact.model, exact.vocab, rule, identity=f"{exact.identity} in bytes", write=append_in_bytes
    )
    return answers_of(naive, reference, "PyTorch's answers with int8 memory")


def over_stored_weights(exact: OrtSession, folder: Path, lowered: Path) -> OrtSession:
    """Returns a session in fp32 over the weights that the graph in the folder `lowered` stores.

    exact: the session of the same model in fp32, whose graph is in `folder`.
    """
    from xl_export.artefact.stored_weights import put_at_stored_values  # imports `trainer`

    graph = ir.load(folder / GRAPH)
    below = folder / "stored"
    put_at_stored_values(graph, ir.load(lowered / GRAPH))
    below.mkdir()
    save_model(graph, below)
    return OrtSession(exact.spec, exact.vocab, below / GRAPH)


def compare(model: Exportable, exported: OrtSession) -> Reference:
    """Returns PyTorch's answers over chained segments; raises ArtefactError if the graph's differ."""
    return validate(exported, model.reference(exported.spec.rule), tolerance=exported.spec.tolerance)


def refuse_if_too_large(spec: Spec) -> None:
    """Raises ConfigError if the validation of the graph needs more memory than this machine has."""
    model = spec.model
    rule = spec.rule
    width = model.heads * model.head_dim
    scores = ROWS * model.heads * rule.segment * rule.slots
    logits = ROWS * rule.segment * model.vocab_size
    # PyTorch holds the keys and values of one segment and of the one before it.
    keys_and_values = 2 * ROWS * model.layers * rule.slots * width
    tables = model.layers * (rule.position_rows + rule.slots) * width
    # The weights exist twice, as tensors and in the graph. Scores and logits exist in several copies at once.
    num_bytes = (
        8 * model.parameters
        + 2 * ROWS * spec.bytes_per_stream
        + 4 * (4 * scores + 4 * logits + 2 * keys_and_values + tables)
    )
    refuse_beyond_memory(
        num_bytes,
        what=f"exporting with {rule}",
        mend="give a smaller --mem-len or --segment",
        error=ConfigError,
    )


def stamp(graph: ir.Model, spec: Spec, vocab: Vocab | None) -> ir.Model:
    """The graph itself, which has the facts of its spec now, for readers who have only the `.onnx` file.

    Call it right before the graph is written. The identity is not among the facts: it has the graphs' hashes.
    """
    facts = {
        "schema": str(spec.schema),
        "form": spec.form,
        "precision": spec.precision,
        "memory_precision": spec.memory_precision,
        "target": spec.target,
        "exporter": spec.exporter,
    }
    if vocab is not None:
        facts["vocabulary"] = vocab.kind
    for name, record in (("model", spec.model), ("rule", spec.rule)):
        facts[name] = json.dumps(to_json(record), sort_keys=True)
    graph.metadata_props.update({f"xl_export.{name}": text for name, text in facts.items()})
    return graph
