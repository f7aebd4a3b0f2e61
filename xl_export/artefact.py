"""RUN → ARTEFACT: a folder that scores and generates with NumPy and ONNX Runtime alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from runtimes.errors import ArtefactError, ConfigError
from runtimes.files import atomic_folder, refuse_existing, write_json
from runtimes.machine import memory_bytes, package_versions
from runtimes.ort_session import OrtSession
from runtimes.reference import save_reference
from runtimes.rule import MemoryRule
from runtimes.spec import GRAPH, REFERENCE, SPEC, VOCAB, Form, Spec, Target, file_facts, save_spec, state_tensors
from runtimes.torch_session import TorchSession
from trainer.checkpoint import Run, load_run
from trainer.model_config import ModelConfig
from xl_export import genai
from xl_export.layers import Weights
from xl_export.ops import save_model
from xl_export.step import OPSETS, step_graph
from xl_export.validate import ROWS, validate

Attention = Literal["plugin", "native"]


def export(
    run: Path | str, out: Path | str, *, memory: Form | None = None, rule: MemoryRule | None = None,
    target: Target = "onnxruntime", attention: Attention = "plugin", force: bool = False,
) -> Path:  # fmt: skip
    """Writes the artefact of a run to the folder `out` and returns it.

    memory: the form of the memory tensors; ring when None, or shift for TensorRT, which takes no other. rule: what the artefact
    remembers and sees; the run's own evaluation rule when None. target: `tensorrt` for a graph in float16 that TensorRT builds
    engines from, and ONNX Runtime runs too; attention: there, one node that our plugin takes, or TensorRT's own kernels.
    The graph is validated against PyTorch before the folder appears, and its
    answers become `reference.npz`. Raises UserError when `out` exists (unless it is an artefact and `force`), when the run is
    damaged, or when validation fails; `out` is then as it was.
    """
    out = Path(out)
    refuse_existing(out, force=force, marker=SPEC)
    form = form_for(target, memory)
    trained = load_run(Path(run))
    spec = make_spec(trained, rule or trained.config.evaluation, form, target)
    refuse_if_too_large(spec)
    weights = finite_weights(trained)
    with atomic_folder(out, force=force, marker=SPEC) as folder:
        save_model(write_graph(spec, trained.config.model, weights, attention), folder)
        exported = OrtSession(spec, trained.vocab, folder / GRAPH)
        torch = TorchSession(trained.model.eval(), trained.vocab, spec.rule, identity=trained.sha256)
        save_reference(folder / REFERENCE, validate(exported, torch, tolerance=spec.tolerance))
        write_json(folder / VOCAB, trained.vocab.to_json())
        if genai.takes(spec):
            write_json(folder / genai.FILE, genai.genai_config(spec))
        files = {path.name: file_facts(path) for path in sorted(folder.iterdir())}
        save_spec(folder, dataclasses.replace(spec, files=files))
    return out


def form_for(target: Target, memory: Form | None) -> Form:
    """The form of memory for a target; raises ConfigError where the two do not go together."""
    if target == "tensorrt" and memory not in (None, "shift"):
        raise ConfigError(f"--memory is {memory}, and engines have shift memory; leave it out, or leave out --target tensorrt.")
    return memory or ("shift" if target == "tensorrt" else "ring")


def write_graph(spec: Spec, config: ModelConfig, weights: Weights, attention: Attention) -> ir.Model:
    """The step graph for the spec's target."""
    if spec.target == "onnxruntime":
        return step_graph(spec, config, weights)
    from xl_export.tensorrt.graph import tensorrt_graph

    return tensorrt_graph(spec, config, weights, attention=attention)


def refuse_if_too_large(spec: Spec) -> None:
    """Raises ConfigError where validating the graph takes more memory than this machine has."""
    model, rule = spec.model, spec.rule
    scores = ROWS * model.heads * rule.segment * rule.slots
    logits = ROWS * rule.segment * model.vocab_size
    hidden = ROWS * model.layers * rule.slots * model.d_model
    table = model.layers * rule.position_rows * model.heads * model.head_dim
    needed = 8 * model.parameters + 2 * ROWS * spec.bytes_per_stream + 4 * (4 * scores + 4 * logits + 2 * hidden + table)
    if needed > memory_bytes():
        raise ConfigError(
            f"exporting with {rule} takes about {needed / 2**30:,.0f} GiB and this machine has {memory_bytes() / 2**30:.0f}; "
            "give a smaller --mem-len or --segment."
        )


def finite_weights(run: Run) -> Weights:
    """The run's parameters as float32 arrays by name; raises ArtefactError where a value is not finite."""
    weights = {name: tensor.float().numpy() for name, tensor in run.model.state_dict().items()}
    for name, array in weights.items():
        if not np.isfinite(array).all():
            raise ArtefactError(f"{name} holds values that are not finite; export a checkpoint from before the loss diverged.")
    return weights


def make_spec(run: Run, rule: MemoryRule, form: Form, target: Target) -> Spec:
    """The contract of a run's artefact, but for the hashes of files not yet written."""
    facts = run.model.facts()
    spec = Spec(
        model=facts, rule=rule, form=form, precision="fp16" if target == "tensorrt" else "fp32", opset=OPSETS[form],
        state=(), target=target, producer=package_versions(), source={"model.safetensors": run.sha256},
    )  # fmt: skip
    return dataclasses.replace(spec, state=state_tensors(facts, rule, form, spec.state_dtype))
