"""RUN → ARTEFACT: a folder that scores and generates with NumPy and ONNX Runtime alone."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import get_args

import numpy as np

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import write_json
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.base.machine import package_versions, refuse_beyond_memory
from runtimes.base.sealed import file_facts
from runtimes.contract.engine import Attention
from runtimes.contract.precision import MemoryPrecision, Precision
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import FUSED, GRAPH, REFERENCE, SPEC, VOCAB, Spec, Target, save_spec
from runtimes.contract.tensors import Form, state_tensors
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.check import save_reference
from trainer.run.checkpoint import Run, load_run
from trainer.run.session import ProjectedTorchSession
from xl_export.artefact.quality import held_out, measure
from xl_export.artefact.validate import ROWS, check_again, validate
from xl_export.graph import fused_cpu, genai
from xl_export.graph.layers import Weights
from xl_export.graph.ops import save_graph, save_model
from xl_export.graph.quantise import lowered
from xl_export.graph.step import OPSETS, step_graph


def export(
    run: Path | str, out: Path | str, *, memory: Form | None = None, rule: MemoryRule | None = None,
    target: Target = "onnxruntime", attention: Attention = "plugin", precision: Precision | None = None,
    memory_precision: MemoryPrecision | None = None, text: Path | None = None, force: bool = False,
) -> Path:  # fmt: skip
    """Writes the artefact of a run to the folder `out` and returns it.

    memory: the form of the memory tensors; ring when None, or shift for TensorRT, which takes no other. rule: what the artefact
    remembers and sees; the run's own evaluation rule when None. target: `tensorrt` for a graph in float16 that TensorRT builds
    engines from, and ONNX Runtime runs too; attention: there, one node that our plugin takes, or TensorRT's own kernels.
    precision: of the weights (`xl_export/graph/quantise.py`); fp32 when None, or fp16 for TensorRT, which takes no other.
    memory_precision: of the memory tensors; fp32 when None, and for TensorRT not given.
    text: held out, to measure a precision below fp32 on; the run's own when None.

    The graph is validated against PyTorch before the folder appears, and PyTorch's answers become `reference.npz`; quantised
    weights are validated before they are, and the artefact's own answers are its reference. Raises UserError when `out` exists
    (unless it is an artefact and `force`), when the run is damaged, or when validation fails; `out` is then as it was.
    """
    out = Path(out)
    sources = [Path(run), *([text] if text else [])]
    refuse_existing(out, force=force, marker=SPEC, sources=sources)
    form, (precision, memory_precision) = (
        form_for(target, memory),
        precisions_for(target, precision, memory_precision),
    )
    trained = load_run(Path(run))
    spec = make_spec(trained, rule or trained.config.evaluation, form, target, precision, memory_precision)
    refuse_if_too_large(spec)
    if text is not None and not spec.lossy:
        raise ConfigError(
            "--text is what a precision is measured on; give --precision or --memory-precision, or leave it out."
        )
    tokens = held_out(Path(run), trained.vocab, text) if spec.lossy else None
    torch = ProjectedTorchSession(trained.model.eval(), trained.vocab, spec.rule, identity=trained.sha256)
    with (
        atomic_folder(out, force=force, marker=SPEC, sources=sources) as folder,
        tempfile.TemporaryDirectory() as beside,
    ):
        exact = spec
        if (
            spec.lossy
        ):  # the same artefact in fp32: what is validated, and what the precision is measured against
            exact = make_spec(trained, spec.rule, form, "onnxruntime", "fp32", "fp32")
        whole = write_graphs(exact, trained, Path(beside) if spec.lossy else folder, attention)
        reference = validate(whole, torch, tolerance=exact.tolerance)
        if spec.lossy:
            lowered_session = write_graphs(spec, trained, folder, attention)
            reference = check_again(lowered_session, reference)
            if tokens is not None:
                measured = measure(lowered_session, whole, tokens, folders=(folder, Path(beside)))
                spec = dataclasses.replace(spec, measured=measured)
        save_reference(folder / REFERENCE, reference)
        write_json(folder / VOCAB, trained.vocab.to_json())
        if genai.takes(spec):
            write_json(folder / genai.FILE, genai.genai_config(spec))
        files = {path.name: file_facts(path) for path in sorted(folder.iterdir())}
        save_spec(folder, dataclasses.replace(spec, files=files))
    return out


def precisions_for(
    target: Target, precision: Precision | None, memory_precision: MemoryPrecision | None
) -> tuple[Precision, MemoryPrecision]:
    """Those of weights and memory for a target, as a spec has them; raises ConfigError where they do not go together."""
    for name, given, known in (
        ("precision", precision, Precision),
        ("memory_precision", memory_precision, MemoryPrecision),
    ):
        if given is not None and given not in get_args(known):
            raise ConfigError(f"{name} is {given!r:.20}; expected one of {', '.join(get_args(known))}.")
    if target == "tensorrt" and (precision not in (None, "fp16") or memory_precision is not None):
        chosen = (
            f"--memory-precision is {memory_precision}"
            if precision in (None, "fp16")
            else f"--precision is {precision}"
        )
        other = (
            "; for an engine in fp32 give --memory shift in place of --target tensorrt"
            if precision == "fp32"
            else ""
        )
        raise ConfigError(
            f"{chosen}, and --target tensorrt writes weights and memory in fp16: leave it out{other}."
        )
    return precision or ("fp16" if target == "tensorrt" else "fp32"), memory_precision or "fp32"


def form_for(target: Target, memory: Form | None) -> Form:
    """The form of memory for a target; raises ConfigError where the two do not go together."""
    if target == "tensorrt" and memory not in (None, "shift"):
        raise ConfigError(
            f"--memory is {memory}, and engines have shift memory; leave it out, or leave out --target tensorrt."
        )
    return memory or ("shift" if target == "tensorrt" else "ring")


def write_graphs(spec: Spec, run: Run, folder: Path, attention: Attention) -> OrtSession:
    """Writes the step graph for the spec's target and precision into a folder, and the fused one; opens the first."""
    weights = finite_weights(run)
    if spec.target == "tensorrt":
        from xl_export.tensorrt.graph import tensorrt_graph

        graph = tensorrt_graph(spec, run.config.model, weights, attention=attention)
    else:
        graph = lowered(step_graph(spec, run.config.model, weights), spec.precision)
    save_model(graph, folder)
    if fused_cpu.takes(spec, run.config.model, weights):
        graph = lowered(fused_cpu.fused_step_graph(spec, run.config.model, weights), spec.precision)
        save_graph(graph, folder / FUSED, weights_of=folder / GRAPH)
    return OrtSession(spec, run.vocab, folder / GRAPH)


def refuse_if_too_large(spec: Spec) -> None:
    """Raises ConfigError where validating the graph takes more memory than this machine has."""
    model, rule = spec.model, spec.rule
    width = model.heads * model.head_dim
    scores = ROWS * model.heads * rule.segment * rule.slots
    logits = ROWS * rule.segment * model.vocab_size
    kept = (
        2 * ROWS * model.layers * rule.slots * width
    )  # keys and values in PyTorch, of one segment and of the one before
    tables = model.layers * (rule.position_rows + rule.slots) * width
    needed = (
        8 * model.parameters
        + 2 * ROWS * spec.bytes_per_stream
        + 4 * (4 * scores + 4 * logits + 2 * kept + tables)
    )
    refuse_beyond_memory(
        needed, what=f"exporting with {rule}", mend="give a smaller --mem-len or --segment", error=ConfigError
    )


def finite_weights(run: Run) -> Weights:
    """The run's parameters as float32 arrays by name; raises ArtefactError where a value is not finite."""
    weights = {name: tensor.float().numpy() for name, tensor in run.model.state_dict().items()}
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise ArtefactError(
                f"{name} holds values that are not finite; export a checkpoint from before the loss diverged."
            )
    return weights


def make_spec(
    run: Run,
    rule: MemoryRule,
    form: Form,
    target: Target,
    precision: Precision,
    memory_precision: MemoryPrecision,
) -> Spec:
    """The contract of a run's artefact, but for the hashes of files not yet written."""
    facts = run.model.facts()
    spec = Spec(
        model=facts, rule=rule, form=form, precision=precision, memory_precision=memory_precision, opset=OPSETS[form],
        target=target, state=(), producer=package_versions(), source={"model.safetensors": run.sha256},
    )  # fmt: skip
    return dataclasses.replace(spec, state=state_tensors(facts, rule, form, spec.state_dtype))
