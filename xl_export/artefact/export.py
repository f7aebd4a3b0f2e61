"""RUN → ARTEFACT: `export(run, out)` writes a folder that runs with NumPy and ONNX Runtime alone.

It takes these steps, in this order: choose form and precisions, load the run, write the graph in fp32,
compare it with PyTorch, lower its precision and compare again, and write the other files. The folder appears
when all of this has succeeded.
"""

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
from runtimes.contract.precision import Measured, MemoryPrecision, Precision
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import FUSED, GRAPH, REFERENCE, SPEC, Spec, Target, save_spec
from runtimes.contract.tensors import Form, state_tensors
from runtimes.contract.vocabulary import save_vocab
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.check import Reference, save_reference
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
    run: Path | str,
    out: Path | str,
    *,
    memory: Form | None = None,
    rule: MemoryRule | None = None,
    target: Target = "onnxruntime",
    attention: Attention = "plugin",
    precision: Precision | None = None,
    memory_precision: MemoryPrecision | None = None,
    text: Path | None = None,
    force: bool = False,
) -> Path:
    """Writes the artefact of a run to the folder `out`, and returns that folder.

    - memory: the form of the memory tensors. None is ring, or shift with target `tensorrt`, which takes no
      other.
    - rule: how much the artefact remembers, and which keys are visible. None is the run's own evaluation
      rule.
    - target: `tensorrt` writes a graph in float16, from which TensorRT builds engines. ONNX Runtime runs it
      too.
    - attention: in a graph for TensorRT, `native` uses standard operators, and `plugin` one node that a
      plugin computes.
    - precision: of the weights (`xl_export/graph/quantise.py`). None is fp32, or fp16 with target `tensorrt`.
    - memory_precision: of the memory tensors. None is fp32. It must be None with target `tensorrt`.
    - text: a held-out text on which a lower precision is measured. None is the test text that the run kept.

    The graph is compared with PyTorch before the folder appears, and PyTorch's answers become
    `reference.npz`. Quantised weights are compared before they are quantised; then the artefact's own answers
    are its reference.

    Raises UserError when `out` exists (unless it holds an artefact and `force` is set), when the run is
    damaged, and when the comparison fails. `out` is not changed then.
    """
    run, out = Path(run), Path(out)
    sources = [run, *([text] if text else [])]
    refuse_existing(out, force=force, marker=SPEC, sources=sources)
    form = form_for(target, memory)
    precision, memory_precision = precisions_for(target, precision, memory_precision)
    trained = load_run(run)
    spec = make_spec(trained, rule or trained.config.evaluation, form, target, precision, memory_precision)
    refuse_if_too_large(spec)
    if text is not None and not spec.lossy:
        raise ConfigError(
            "--text is the text on which a reduced precision is measured, and none was given; give "
            "--precision or --memory-precision, or leave --text out."
        )
    tokens = held_out(run, trained.vocab, text) if spec.lossy else None
    with atomic_folder(out, force=force, marker=SPEC, sources=sources) as folder:
        if spec.lossy:
            reference, measured = write_lowered(spec, trained, folder, attention, tokens)
            spec = dataclasses.replace(spec, measured=measured)
        else:
            reference = compare(write_graphs(spec, trained, folder, attention), trained)
        save_reference(folder / REFERENCE, reference)
        save_vocab(folder, trained.vocab)
        if genai.takes(spec):
            for name, document in genai.genai_files(spec, trained.vocab).items():
                write_json(folder / name, document)
        files = {path.name: file_facts(path) for path in sorted(folder.iterdir())}
        save_spec(folder, dataclasses.replace(spec, files=files))
    return out


def form_for(target: Target, memory: Form | None) -> Form:
    """Returns the form of memory for a target; raises ConfigError where the two do not fit."""
    if target == "tensorrt" and memory not in (None, "shift"):
        raise ConfigError(
            f"--memory is {memory}, and engines have shift memory; leave out --memory or --target tensorrt."
        )
    return memory or ("shift" if target == "tensorrt" else "ring")


def precisions_for(
    target: Target, precision: Precision | None, memory_precision: MemoryPrecision | None
) -> tuple[Precision, MemoryPrecision]:
    """Returns the precisions of weights and memory.

    Raises ConfigError where the target does not take them.
    """
    for name, value, choices in (
        ("precision", precision, get_args(Precision)),
        ("memory_precision", memory_precision, get_args(MemoryPrecision)),
    ):
        if value is not None and value not in choices:
            raise ConfigError(f"{name} is {value!r:.20}; expected one of {', '.join(choices)}.")
    if target != "tensorrt":
        return precision or "fp32", memory_precision or "fp32"
    if precision in (None, "fp16") and memory_precision is None:
        return "fp16", "fp32"  # the target itself makes the memory fp16, so the spec does not say it again
    if precision in (None, "fp16"):
        option = f"--memory-precision is {memory_precision}"
    else:
        option = f"--precision is {precision}"
    mend = "leave it out"
    if precision == "fp32":
        mend += "; for an engine in fp32 give --memory shift in place of --target tensorrt"
    raise ConfigError(f"{option}, and --target tensorrt writes weights and memory in fp16: {mend}.")


def make_spec(
    run: Run,
    rule: MemoryRule,
    form: Form,
    target: Target,
    precision: Precision,
    memory_precision: MemoryPrecision,
) -> Spec:
    """Returns the contract of a run's artefact, without the hashes of files, which do not exist yet."""
    facts = run.model.facts()
    spec = Spec(
        model=facts,
        rule=rule,
        form=form,
        precision=precision,
        memory_precision=memory_precision,
        opset=OPSETS[form],
        target=target,
        state=(),
        producer=package_versions(),
        source={"model.safetensors": run.sha256},
    )
    return dataclasses.replace(spec, state=state_tensors(facts, rule, form, spec.state_dtype))


def refuse_if_too_large(spec: Spec) -> None:
    """Raises ConfigError where the validation of the graph needs more memory than this machine has."""
    model, rule = spec.model, spec.rule
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


def write_lowered(
    spec: Spec, run: Run, folder: Path, attention: Attention, tokens: np.ndarray | None
) -> tuple[Reference, Measured | None]:
    """Writes a graph in a lower precision; returns its reference, and what the precision costs.

    The same artefact is first written in fp32 to a temporary folder. That one is compared with PyTorch, and
    the lower precision is measured against it. Nothing is measured where there are no tokens.
    """
    exact_spec = make_spec(run, spec.rule, spec.form, "onnxruntime", "fp32", "fp32")
    with tempfile.TemporaryDirectory() as name:
        exact = write_graphs(exact_spec, run, Path(name), attention)
        reference = compare(exact, run)
        low = write_graphs(spec, run, folder, attention)
        reference = check_again(low, reference)
        if tokens is None:
            return reference, None
        return reference, measure(low, exact, tokens, folders=(folder, Path(name)))


def compare(exported: OrtSession, run: Run) -> Reference:
    """Returns PyTorch's answers over chained segments; raises ArtefactError where the graph's differ."""
    torch = ProjectedTorchSession(run.model.eval(), run.vocab, exported.spec.rule, identity=run.sha256)
    return validate(exported, torch, tolerance=exported.spec.tolerance)


def write_graphs(spec: Spec, run: Run, folder: Path, attention: Attention) -> OrtSession:
    """Writes the step graph of a spec, and the one for the fused CPU operator where the spec allows it.

    Returns a session over the step graph.
    """
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


def finite_weights(run: Run) -> Weights:
    """Returns the run's parameters as float32 arrays by name.

    Raises ArtefactError where one is not finite.
    """
    weights = {name: tensor.float().numpy() for name, tensor in run.model.state_dict().items()}
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise ArtefactError(
                f"{name} holds values that are not finite; export a checkpoint from before the loss diverged."
            )
    return weights
