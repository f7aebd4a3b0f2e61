"""What a folder holds, in facts that a person or a script can read before running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtimes.base.records import to_json
from runtimes.contract.engine import BUILD, NAMES, load_engine
from runtimes.contract.precision import QUANTISED, Measured, per_stream, sentence, unmeasured
from runtimes.contract.spec import FUSED, SPEC, Spec, TensorFacts, load_spec
from runtimes.sessions import fused_cpu
from runtimes.sessions.open import open_session
from trainer.run.session import TorchSession


def describe(folder: Path) -> dict[str, Any]:
    """Model, rule, memory, precision, hashes and tensors of an artefact or engine; model and rule of a run.

    Of an artefact also whether it has a graph for the fused kernel, and whether that is built on this machine.
    Artefacts and engines are described from their verified files alone, so this needs none of ONNX Runtime, TensorRT, PyTorch.
    """
    if (folder / BUILD).is_file():
        engine, spec = load_engine(folder)
        files = {name: to_json(facts) for name, facts in engine.files.items()}
        about = _describe_artefact(spec) | {"kind": "engine", "identity": engine.identity, "files": files}
        return about | {"engine": to_json(engine), "producer": spec.producer | engine.producer}
    if (folder / SPEC).is_file():
        spec = load_spec(folder)
        return _describe_artefact(spec) | {
            "fused_graph": FUSED in spec.files,
            "fused_kernel_built": fused_cpu.built() is not None,
        }
    session = open_session(folder)
    assert isinstance(session, TorchSession), type(session)
    return {
        "kind": "run",
        "identity": session.identity,
        "model": to_json(session.model.facts()),
        "rule": to_json(session.rule),
        "vocabulary": session.vocab.kind,
    }


def _describe_artefact(spec: Spec) -> dict[str, Any]:
    return {
        "kind": "artefact",
        "identity": spec.identity,
        "model": to_json(spec.model),
        "rule": to_json(spec.rule),
        "memory_form": spec.form,
        "bytes_per_stream": spec.bytes_per_stream,
        "fp32_bytes_per_stream": spec.fp32_bytes_per_stream,
        "running_bytes_per_stream": spec.running_bytes_per_stream,
        "bytes_saved_by_spans": spec.bytes_saved,
        "precision": spec.precision,
        "memory_precision": spec.memory_precision,
        "measured": None if spec.measured is None else to_json(spec.measured),
        "tolerance": spec.tolerance,
        "mean_tolerance": spec.mean_tolerance,
        "opset": spec.opset,
        "inputs": [_tensor(tensor) for tensor in spec.inputs],
        "outputs": [_tensor(tensor) for tensor in spec.outputs],
        "files": {name: to_json(facts) for name, facts in spec.files.items()},
        "producer": spec.producer,
        "source": spec.source,
    }


def _tensor(tensor: TensorFacts) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": [int(s) if s.isdigit() else s for s in tensor.shape],
    }


def describe_lines(facts: dict[str, Any]) -> list[str]:
    """The same facts as lines of text; the tensors of equal shape on one line each for first and last."""
    model, rule = facts["model"], facts["rule"]
    fed = (
        f"FF {model['d_ff']}"
        if model["d_ff"]
        else f"{model['persistent']} persistent vectors ({model['sublayers']})"
    )
    sizes = (
        f"{model['layers']} layers, D {model['d_model']}, H {model['heads']}, K {model['head_dim']}, {fed}"
    )
    lines = [
        f"{facts['kind']:<12}{facts['identity']:.64}",
        f"model       {model['positions']} positions, {sizes}",
        f"            vocabulary {model['vocab_size']}, {model['parameters']:,} parameters",
        f"rule        mem_len {rule['mem_len']}, segment {rule['segment']}, mask {rule['mask']}, "
        f"clamp_len {rule['clamp_len']}, initial_memory {rule['initial_memory']}",
    ]
    if facts["kind"] == "run":
        return [*lines, f"vocabulary  {facts['vocabulary']}"]
    saved = f", {facts['bytes_saved_by_spans']:,} saved by learned spans" if model["reaches"] else ""
    stream = facts["bytes_per_stream"], facts["fp32_bytes_per_stream"]
    half = any(tensor["dtype"] == "float16" for tensor in facts["inputs"])
    held = f"{per_stream(*stream)} in fp32" if half else f"{stream[0]:,} bytes per stream"
    running = facts["running_bytes_per_stream"]
    twice = f", {running:,} while a session runs" if running > stream[0] else ""
    lines.append(f"memory      {facts['memory_form']}{' in fp16' if half else ''}, {held}{saved}{twice}")
    mean = (
        f" and {facts['mean_tolerance']:g} in the mean"
        if facts["mean_tolerance"] < facts["tolerance"]
        else ""
    )
    lines.append(
        f"precision   {facts['precision']}, check within {facts['tolerance']:g} nats{mean}, opset {facts['opset']}"
    )
    if facts["measured"]:
        measured = Measured(**facts["measured"])
        lines.append(f"            {sentence(facts['precision'], measured, stream=stream if half else None)}")
    elif facts["precision"] in QUANTISED:
        lines.append(f"            {unmeasured(facts['precision'])}")
    if facts["kind"] == "artefact":
        lines.append(f"kernel      {_kernel(facts)}")
    lines += _engine_lines(facts["engine"]) if facts["kind"] == "engine" else []
    lines += [
        f"file        {name}, {file['num_bytes']:,} bytes, sha256 {file['sha256']}"
        for name, file in facts["files"].items()
    ]
    for kind in ("inputs", "outputs"):
        lines += [
            f"{kind:<12}{tensor['name']}  {tensor['dtype']} {tensor['shape']}" for tensor in facts[kind]
        ]
    made = [f"{name} {version}" for name, version in facts["producer"].items()]
    return [*lines, "made with   " + ", ".join(text for text in made if text.isprintable())]


def _kernel(facts: dict[str, Any]) -> str:
    if not facts["fused_graph"]:
        return "standard operators; the fused kernel does not serve this model and memory"
    if not facts["fused_kernel_built"]:
        return "standard operators; `xl-export fused-kernel` builds the fused one, for which there is a graph"
    return "fused, which is built on this machine"


def _engine_lines(engine: dict[str, Any]) -> list[str]:
    tuned = f"tuned on {engine['gpu']['name']!r:.80}" if engine["gpu"] else "built ahead of time"
    lines = [
        f"engine      {NAMES[engine['flavour']]} {engine['version']!s:.40}, {engine['attention']} attention, {tuned}",
        f"runs on     compute capability {', '.join(engine['compute_capabilities'])}, hardware {engine['hardware']}",
    ]
    for profile in engine["profiles"]:
        batch, tokens = (":".join(map(str, profile[axis])) for axis in ("batch", "tokens"))
        lines.append(f"profile     {profile['name']}, batch {batch}, tokens {tokens} (least:usual:most)")
    counted = [
        f"{count} {kind.lower()}"
        for kind, count in sorted(engine["layers"].items(), key=lambda item: -item[1])
    ]
    return [*lines, f"layers      {', '.join(counted)}", f"plugin      {engine['plugin_layers']} layers"]
