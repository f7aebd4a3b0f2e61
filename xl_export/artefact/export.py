"""RUN → ARTEFACT: `export(run, out)` writes a folder that only needs NumPy and ONNX Runtime to run.

The steps, in this order: choose form and precisions, load the run, write the graphs, compare them with
PyTorch, in fp32 first and then in a lower precision, and write the other files. The folder appears when all
of this has succeeded.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Collection
from pathlib import Path

from runtimes.base.errors import ArtefactError, ConfigError, MissingPackageError
from runtimes.base.files import read_bytes
from runtimes.base.folders import refuse_existing
from runtimes.base.kinds import ARTEFACT
from runtimes.base.machine import package_versions
from runtimes.contract.device import Device
from runtimes.contract.engine import Attention
from runtimes.contract.memory_identity import MemoryIdentity
from runtimes.contract.precision import MemoryPrecision, Precision
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import read_sampling
from runtimes.contract.spec import (
    CUDA_GRAPH,
    FUSED,
    GRAPH,
    WEIGHTS,
    Exporter,
    Spec,
    Storage,
    Target,
)
from runtimes.contract.tensors import Form
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.fused_cpu import built
from runtimes.sessions.graph import GraphSession
from runtimes.sessions.onnx_runtime import OrtSession
from trainer.model.config import ModelConfig
from trainer.run.checkpoint import Run, load_run
from trainer.run.history import history_of
from trainer.run.session import ProjectedTorchSession
from xl_export.artefact.options import ExportOptions, fixed_tokens
from xl_export.artefact.pack import refuse_too_many
from xl_export.artefact.quality import held_out
from xl_export.artefact.write import (
    STEP_IN_HALVES,
    WriteGraphs,
    finite_arrays,
    refuse_if_too_large,
    refuse_needless_text,
    stamp,
    write_artefact,
)
from xl_export.graph import cuda, fixed, fused_cpu, web
from xl_export.graph.layers import Weights
from xl_export.graph.ops import OPSETS, save_graph, save_model
from xl_export.graph.quantise import lowered
from xl_export.graph.step import StepGraph


def export(
    run: Path | str,
    out: Path | str,
    *,
    exporter: Exporter = "graph",
    memory: Form | None = None,
    rule: MemoryRule | None = None,
    target: Target = "onnxruntime",
    attention: Attention | None = None,
    precision: Precision | None = None,
    memory_precision: MemoryPrecision | None = None,
    text: Path | None = None,
    storage: Storage = "external",
    rows: int | None = None,
    tokens: Collection[int] | None = None,
    force: bool = False,
) -> Path:
    """Writes the artefact of a run to the folder `out`, and returns that folder.

    - exporter: `graph` writes the graph node by node; `trace` lets PyTorch trace the step.
    - memory: the form of the memory; None is `ring` if the model and the target can have it.
    - rule: how much the artefact remembers, and which keys are visible. None is the run's own evaluation
      rule.
    - target: the runtime of the graph: `onnxruntime`, `tensorrt` or `web`.
    - precision, memory_precision: of the weights and of the memory. None is fp32, or fp16 for TensorRT. With
      `cuda.onnx` and weights in fp16, it is fp16 for memory too.
    - text: held-out text on which the loss of a lower precision is measured; None is the test text of the
      run, or one that the model draws.
    - rows, tokens: fix the sizes, as in `xl_export.trace`. The graph has plain operators that converters for
      other runtimes know (`xl_export/graph/fixed.py`).
    - attention: `plugin` is what `--attention-as` calls node, and `native` what it calls operators.
    - storage: `external` writes the weights next to the graph, `single-file` into it, and `ort` writes both
      in ONNX Runtime's own format, for mobile; `fused-ort` does so with the graph for the fused operator only
      (`xl_export/artefact/pack.py`).

    `ExportOptions` has the range of each, and what does not fit together.

    Every graph is compared with PyTorch before the folder appears, and PyTorch's answers become the
    reference. A graph that this machine cannot run, because the fused operator is not built or there is no
    GPU, is not compared, and the spec names it (`not_compared`).
    Quantised weights are compared before they are quantised; then the answers of the stored weights, computed
    in fp32, are its reference. If the rounding of activations on this machine exceeds the tolerances of the
    artefact's check, the artefact is written with a FailingCheckWarning.

    Raises UserError when `out` exists (unless it holds an artefact and `force` is set), when the run is
    damaged, and when the comparison fails. `out` is not changed then.
    """
    run = Path(run)
    out = Path(out)
    sources = [run, *([text] if text else [])]
    refuse_existing(out, ARTEFACT, force=force, sources=sources)
    precision, memory_precision = ExportOptions(
        exporter=exporter,
        memory=memory,
        target=target,
        attention=attention,
        precision=precision,
        memory_precision=memory_precision,
        text=text,
        storage=storage,
        rows=rows,
        tokens=tokens,
    ).precisions
    if exporter == "trace" and (rows is not None or tokens is not None):
        raise ConfigError("--rows and --tokens write the graph node by node; leave out --exporter trace.")
    trained = load_run(run)
    refuse_too_many(trained.model.facts().parameters, storage, precision)
    chosen = rule or trained.config.evaluation
    form = "shift" if rows else form_for(target, memory, chosen, trained.config.model, exporter)
    spec = make_spec(trained, chosen, form, target, precision, memory_precision)
    history = history_of(run, trained.config)
    spec = dataclasses.replace(
        spec,
        concern=history.concern if history else None,
        trained_tokens=history.trained_tokens if history else None,
        storage=storage,
    )
    if storage == "fused-ort" and not (fused_cpu.takes(spec) and built()):
        fault = "is not built on this machine; build it with `xl-export fused-kernel`, or give --ort"
        if not fused_cpu.takes(spec):
            fault = f"has no {spec.form} memory; give --memory ring, or --ort"
        raise ConfigError(f"--fused-ort writes a graph for the fused operator, which {fault}.")
    others = [FUSED] if fused_cpu.takes(spec) and storage in ("external", "fused-ort") else []
    if attention == "plugin" and target == "onnxruntime":
        cuda.refuse_unfit(spec, trained.config.model)
        others.append(CUDA_GRAPH)
    if rows is not None:
        spec = dataclasses.replace(spec, opset=fixed.OPSET, fixed_rows=rows)
        spec = dataclasses.replace(spec, fixed_tokens=fixed_tokens(spec, rows, tokens)).completed()
    if exporter == "trace":
        # Every head has the whole memory, even if it learned a shorter span.
        facts = dataclasses.replace(spec.model, reaches=())
        spec = dataclasses.replace(spec, model=facts, opset=OPSETS[spec.form], exporter="trace").completed()
    refuse_needless_text(text, spec)
    refuse_if_too_large(spec)
    measured_on = held_out(run, trained.vocab, text) if spec.lossy else None
    model = trained.model.eval()
    if exporter == "trace":
        # torch.export is slow to import.
        from xl_export.artefact.traced import TracedGraphs
        from xl_export.tracing.module import ModuleStep
        from xl_export.tracing.steps import OwnStep
        from xl_export.tracing.verify import drift_of

        finite_arrays(model)
        step = ModuleStep(OwnStep(model, chosen, form).eval())
        if drift := drift_of(step, chosen, form, period=trained.config.model.context or 1):
            raise ArtefactError(f"{drift.sentence.partition(';')[0]}; report this: our own steps must not.")
        writer: WriteGraphs = TracedGraphs(step, trained.vocab).write
    else:
        writer = functools.partial(write_graphs, run=trained, attention=attention, others=others)
    original = ProjectedTorchSession(model, trained.vocab, chosen, weights=trained.sha256)
    try:
        write_artefact(
            spec,
            out,
            writer,
            original,
            trained.vocab,
            tokens=measured_on,
            force=force,
            sources=sources,
            sampler=read_sampling(run),
        )
    except ArtefactError as error:
        span = trained.config.model.span
        if target == "tensorrt" and exporter == "graph" and span is not None and span.epsilon:
            raise ArtefactError(
                f"{str(error).partition(';')[0]}; graphs for engines leave out span.epsilon, which is "
                f"{span.epsilon:g} here: give --exporter trace, which keeps it, or leave out --target "
                "tensorrt."
            ) from error
        raise
    return out


def form_for(
    target: Target, memory: Form | None, rule: MemoryRule, model: ModelConfig, exporter: Exporter
) -> Form:
    """Returns the form of memory for a target; raises ConfigError if the two do not fit."""
    reason = needs_shift(rule, model, exporter) if target == "tensorrt" else None
    if target == "tensorrt" and memory == "hidden":
        raise ConfigError(
            "--memory is hidden, and engines have ring or shift memory; leave out --memory or --target "
            "tensorrt."
        )
    if reason and memory == "ring":
        raise ConfigError(
            f"--memory is ring, and an engine cuts a segment at the end of the ring, but {reason}; "
            "leave out --memory, which is then shift."
        )
    return memory or ("shift" if reason else "ring")


def needs_shift(rule: MemoryRule, model: ModelConfig, exporter: Exporter) -> str | None:
    """Returns why an engine of a model cannot have its memory in a ring; None if it can.

    TensorRT writes no segment across the end of a ring, so sessions cut segments there.
    """
    if not rule.cuts_change_nothing:
        return f"with --mask {rule.mask} the scores depend on where segments are cut"
    if model.from_segment_end:
        return "the positions of this model count from the end of the segment"
    if exporter == "trace":
        return "--exporter trace writes across the end"
    return "the model has no memory" if rule.mem_len == 0 else None


def make_spec(
    run: Run,
    rule: MemoryRule,
    form: Form,
    target: Target,
    precision: Precision,
    memory_precision: MemoryPrecision,
) -> Spec:
    """Returns the contract of a run's artefact, without the hashes of files, which do not exist yet."""
    return Spec(
        model=run.model.facts(),
        rule=rule,
        form=form,
        target=target,
        precision=precision,
        memory_precision=memory_precision,
        opset=web.OPSET if target == "web" else OPSETS[form],
        memory_identity=MemoryIdentity(layout="", weights=run.sha256),  # `write_artefact` adds the layout
        producer=package_versions(),
        source={"model.safetensors": run.sha256},
    ).completed()


def write_graphs(
    spec: Spec, folder: Path, run: Run, attention: Attention | None, others: Collection[str] = ()
) -> dict[str, GraphSession | None]:
    """Writes the step graph of a spec with its weights, and over the same weights the `others`: some of
    `fused.onnx` and `cuda.onnx`. Returns sessions as `WriteGraphs` does.
    """
    weights = finite_arrays(run.model)
    if spec.target == "tensorrt":
        from xl_export.tensorrt.graph import tensorrt_graph

        graph = tensorrt_graph(spec, run.config.model, weights, attention=attention or "plugin")
    else:
        kind = web.WebStep if spec.target == "web" else fixed.FixedStep if spec.fixed_rows else StepGraph
        graph = lowered(kind(spec, run.config.model, weights).build(), spec.precision)
    save_model(stamp(graph, spec, run.vocab), folder)
    for tokens, name in spec.token_graphs.items():
        if name != GRAPH:
            graph = lowered(fixed.FixedStep(spec, run.config.model, weights, tokens).build(), spec.precision)
            save_graph(stamp(graph, spec, run.vocab), folder / name, weights_of=folder / GRAPH)
    graphs: dict[str, GraphSession | None] = {GRAPH: OrtSession(spec, run.vocab, folder / GRAPH)}
    library = built()
    if FUSED in others:
        graph = lowered(fused_cpu.FusedStepGraph(spec, run.config.model, weights).build(), spec.precision)
        save_graph(stamp(graph, spec, run.vocab), folder / FUSED, weights_of=folder / GRAPH)
        graphs[FUSED] = OrtSession(spec, run.vocab, folder / FUSED, library=library) if library else None
    if CUDA_GRAPH in others:
        graph = cuda.cuda_graph(spec, run.config.model, weights)
        save_graph(stamp(graph, spec, run.vocab), folder / CUDA_GRAPH, weights_of=folder / GRAPH)
        graphs[CUDA_GRAPH] = on_cuda(spec, run.vocab, folder, library) if library else None
        if spec.cuda_in_halves:
            graphs[STEP_IN_HALVES] = in_halves_here(spec, run, weights)
    return graphs


def in_halves_here(spec: Spec, run: Run, weights: Weights) -> OrtSession:
    """A session on this machine's CPU over the step that `cuda.onnx` computes in fp16.

    The result of each operator is rounded to fp16. Nodes of `cuda.onnx` that do the work of several operators
    round less often.

    The operator for engines is in the place of its node, since a model holds that operator's body. Its memory
    is shift, because over a ring the operator cannot compute a segment that passes the ring's end.
    """
    from xl_export.graph.half import rounded
    from xl_export.tensorrt.graph import tensorrt_graph

    spec = dataclasses.replace(spec, form="shift").completed()
    graph = rounded(tensorrt_graph(spec, run.config.model, weights, attention="plugin"))
    spec = dataclasses.replace(spec, precision="fp32", memory_precision="fp32").completed()
    with tempfile.TemporaryDirectory() as folder:
        save_model(graph, Path(folder))
        return OrtSession(spec, run.vocab, Path(folder) / GRAPH)


def on_cuda(spec: Spec, vocab: Vocab, folder: Path, library: Path) -> GraphSession | None:
    """A session over the graph for `cuda`; None if this machine has no GPU for it."""
    from runtimes.sessions.ort_gpu.session import OrtGpuSession

    graph = folder / CUDA_GRAPH
    contents = {path.name: read_bytes(path) for path in (graph, folder / WEIGHTS)}
    try:
        return OrtGpuSession(spec, vocab, graph, contents, device=Device("cuda"), library=library)
    except MissingPackageError:
        return None
