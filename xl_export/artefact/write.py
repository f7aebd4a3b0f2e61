"""Writes the folder of an artefact, from graphs that are written node by node, or traced.

The graphs are compared with PyTorch in fp32 first, and again in a lower precision. The folder appears when
all of this has succeeded.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from torch import nn

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import write_json
from runtimes.base.folders import atomic_folder
from runtimes.base.kinds import ARTEFACT
from runtimes.base.machine import refuse_beyond_memory
from runtimes.base.progress import working
from runtimes.base.records import json_text, to_json
from runtimes.base.sealed import file_facts
from runtimes.contract.precision import Measured, MeasuredStep
from runtimes.contract.reference import Reference, StepReference, save_reference
from runtimes.contract.sampling import GENAI, Sampler, write_sampling
from runtimes.contract.session import Session
from runtimes.contract.spec import GRAPH, Spec, save_spec
from runtimes.contract.vocabulary import Vocab, save_vocab
from runtimes.sessions.graph import GraphSession
from runtimes.sessions.onnx_runtime import OrtSession
from xl_export.artefact.pack import pack
from xl_export.artefact.quality import measure, measure_step
from xl_export.artefact.validate import (
    MAX_ROWS,
    AnyReference,
    Graphs,
    answers_of,
    check_lowered,
    validate,
)
from xl_export.graph import genai
from xl_export.graph.ops import save_graph, save_model
from xl_export.tracing.progress import stage

# Writes the graphs of a spec with their weights to a folder. Returns a session over each graph by its file
# name, or None for a graph that this machine cannot run.
WriteGraphs = Callable[[Spec, Path], Mapping[str, GraphSession | None]]
# The name among these of the step that a GPU computes in fp16, if this machine's CPU computes it to measure
# its loss. It is no file.
STEP_IN_HALVES = "the step in halves"
# The difference of a session from answers that are known; raises ArtefactError if it is too large.
Apart = Callable[[Session], float]


def refuse_needless_text(text: Path | None, spec: Spec) -> None:
    """Raises ConfigError for a text to measure on if no precision is reduced."""
    if text is not None and not spec.lossy:
        raise ConfigError(
            "a text was given to measure a reduced precision on, and no precision is reduced; give one of "
            "the weights or of the memory, or leave the text out."
        )


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
    spec: Spec,
    out: Path,
    write_graphs: WriteGraphs,
    original: Session,
    vocab: Vocab | None,
    *,
    apart: Apart | None = None,
    tokens: np.ndarray | None,
    force: bool,
    sources: Sequence[Path] = (),
    sampler: Sampler | None = None,
) -> None:
    """Writes the artefact of a spec to the folder `out`, atomically.

    original: the model in PyTorch; every graph that runs on this machine is compared with it. vocab: None of
    a step that is no language model. apart: compares the graph in fp32 with the loop from which a traced
    module was made. tokens: those on which a lower precision is measured; None measures it on tokens that the
    model draws. sources: files and folders that must not be replaced. sampler: the artefact's defaults; None
    writes none. Raises UserError if the graphs do not compute what PyTorch computes.
    """
    spec = spec.with_layout(vocab)
    with atomic_folder(out, ARTEFACT, force=force, sources=sources) as folder:
        unpacked = dataclasses.replace(spec, storage="external")  # weights move into the graph afterwards
        graphs = _written(write_graphs, unpacked, folder)
        measured = None
        if spec.lossy:
            reference, measured, difference = _compare_lowered(
                _here(graphs), folder, write_graphs, original, tokens, apart
            )
        else:
            reference, difference = _validated(_here(graphs), original, apart)
        not_compared = tuple(file for file, session in graphs.items() if session is None)
        spec = dataclasses.replace(
            spec, measured=measured, original_difference=difference, not_compared=not_compared
        )
        if vocab is not None and isinstance(reference, Reference):
            if spec.storage != "external":
                spec = pack(spec, vocab, folder, reference)
            save_vocab(folder, vocab)
            if genai.takes(spec):
                for name, document in genai.genai_files(spec, vocab).items():
                    write_json(folder / name, document)
        save_reference(folder, reference)
        # `xl-export set` changes the settings in that file, as in `sampling.json`.
        sealed = [path for path in sorted(folder.iterdir()) if path.name != GENAI]
        files = {path.name: file_facts(path) for path in sealed}
        save_spec(folder, dataclasses.replace(spec, files=files))
        if sampler:
            write_sampling(folder, sampler)


def _written(write_graphs: WriteGraphs, spec: Spec, folder: Path) -> Mapping[str, GraphSession | None]:
    with working("writing the graphs"):
        return write_graphs(spec, folder)


def _here(graphs: Mapping[str, GraphSession | None]) -> Graphs:
    """The sessions over the graphs that run on this machine."""
    return {file: session for file, session in graphs.items() if session}


def _validated(graphs: Graphs, original: Session, apart: Apart | None) -> tuple[AnyReference, float | None]:
    """The reference, and the difference from the loop from which a traced module was made."""
    traced = graphs[GRAPH].spec.exporter == "trace"
    with stage("comparing the graph with the module") if traced else working("comparing with PyTorch"):
        return validate(graphs, original), apart(graphs[GRAPH]) if apart else None


def _in_fp32(spec: Spec) -> Spec:
    """The spec of the same artefact in fp32, for ONNX Runtime."""
    target = "onnxruntime" if spec.target == "tensorrt" else spec.target
    return dataclasses.replace(spec, target=target, precision="fp32", memory_precision="fp32").completed()


def _compare_lowered(
    graphs: Graphs,
    folder: Path,
    write_graphs: WriteGraphs,
    original: Session,
    tokens: np.ndarray | None,
    apart: Apart | None,
) -> tuple[AnyReference, Measured | MeasuredStep | None, float | None]:
    """Compares the graphs of a lower precision in a folder; returns their reference, what the precision
    costs, and the difference in fp32 of `_validated`.

    The same graphs are first written in fp32 to a temporary folder. Those are compared with PyTorch, and the
    lower precision of `step.onnx` is measured against them: of a language model on tokens, and of any other
    step on the inputs of the reference. If there is a graph that computes in fp16, its loss is measured.
    """
    low = graphs[GRAPH]
    spec = low.spec
    with tempfile.TemporaryDirectory() as name:
        folders = folder, Path(name)
        in_fp32 = _here(_written(write_graphs, _in_fp32(spec), Path(name)))
        reference, difference = _validated(in_fp32, original, apart)
        exact = in_fp32[GRAPH]
        stored = None
        if spec.answers == "stored-weights":
            stored = _over_stored_weights(exact, Path(name), folder)
        elif isinstance(reference, Reference) and spec.answers == "memory-in-bytes":
            reference = _with_memory_in_bytes(original, reference)
        right, answers = check_lowered(graphs, stored, reference)
        if isinstance(answers, StepReference) and isinstance(reference, StepReference):
            measured = measure_step(low, exact, answers, reference, folders=folders)
            return right, measured, difference
        with working(f"measuring what {spec.precision} loses"):
            in_halves = graphs.get(STEP_IN_HALVES, low)
            return right, measure(low, exact, tokens, folders=folders, answers=in_halves), difference


def _with_memory_in_bytes(original: Session, reference: Reference) -> AnyReference:
    """Returns the answers of PyTorch, to the same tokens, with memory that is rounded to int8."""
    from trainer.model.projected import append_in_bytes  # not for a traced module; see `traced.py`
    from trainer.run.session import ProjectedTorchSession

    assert isinstance(original, ProjectedTorchSession), "traced modules have no memory in int8"
    naive = ProjectedTorchSession(
        original.model,
        original.vocab,
        original.rule,
        weights=f"{original.weights} in bytes",
        write=append_in_bytes,
    )
    return answers_of(naive, reference, "PyTorch's answers with int8 memory")


def _over_stored_weights(exact: GraphSession, folder: Path, lowered: Path) -> OrtSession:
    """Returns a session in fp32 over the weights that the graph in the folder `lowered` stores.

    exact: the session of the same model in fp32, whose graph is in `folder`.
    """
    from xl_export.artefact.stored_weights import put_at_stored_values  # imports `trainer`

    below = folder / "stored"
    below.mkdir()
    for name in [*exact.spec.token_graphs.values()] or [GRAPH]:
        graph = ir.load(folder / name)
        put_at_stored_values(graph, ir.load(lowered / name))
        if name == GRAPH:
            save_model(graph, below)
        else:
            save_graph(graph, below / name, weights_of=below / GRAPH)
    vocab = exact.vocab if exact.spec.language_model else None
    return OrtSession(exact.spec, vocab, below / GRAPH)


def refuse_if_too_large(spec: Spec) -> None:
    """Raises ConfigError if the validation of the graph needs more memory than this machine has."""
    model = spec.model
    rule = spec.rule
    width = model.heads * model.head_dim
    scores = MAX_ROWS * model.heads * rule.segment * rule.slots
    logits = MAX_ROWS * rule.segment * model.vocab_size
    # PyTorch holds the keys and values of one segment and of the one before it.
    keys_and_values = 2 * MAX_ROWS * model.layers * rule.slots * width
    tables = model.layers * (rule.position_rows + rule.slots) * width
    # The weights exist three times: as tensors, in the step graph and in the fused graph. Scores and logits
    # exist in several copies at once.
    num_bytes = (
        12 * model.parameters
        + 2 * MAX_ROWS * spec.bytes_per_stream
        + 4 * (4 * scores + 4 * logits + 2 * keys_and_values + tables)
    )
    refuse_beyond_memory(
        num_bytes,
        what=f"exporting with {rule}",
        fix="give a shorter memory or segment",
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
        facts[name] = json_text(to_json(record), sort_keys=True)
    graph.metadata_props.update({f"xl_export.{name}": text for name, text in facts.items()})
    return graph
