"""The facts of a folder as lines of text, for people who want to know what it holds before they run it."""

from __future__ import annotations

from typing import Any

from runtimes.contract.engine import NAMES
from runtimes.contract.precision import (
    QUANTISED,
    Measured,
    memory_precision_of,
    per_stream,
    sentence,
    unmeasured,
)


def describe_lines(facts: dict[str, Any]) -> list[str]:
    """The facts of `runtimes.sessions.open.describe`, as lines of a word of twelve columns and what it stands
    for.
    """
    model, rule = facts["model"], facts["rule"]
    persistent = f"{model['persistent']} persistent vectors ({model['sublayers']})"
    own = model["sublayers"] == "own"  # of a traced module
    sublayer = f"FF {model['d_ff']}" if model["d_ff"] or own else persistent
    heads = f"H {model['heads']}, K {model['head_dim']}"
    sizes = f"{model['layers']} layers, D {model['d_model']}, {heads}, {sublayer}"
    lines = [
        f"{facts['kind']:<12}{facts['identity']:.64}",
        f"model       {'a module of its own' if own else model['positions'] + ' positions'}, {sizes}",
        f"            vocabulary {model['vocab_size']}, {model['parameters']:,} parameters",
        f"rule        mem_len {rule['mem_len']}, segment {rule['segment']}, mask {rule['mask']}, "
        f"clamp_len {rule['clamp_len'] or 'none'}, initial_memory {rule['initial_memory']}",
        f"computed by {facts['computed_by']}{_fused_advice(facts)}",
    ]
    if "vocabulary" in facts:
        lines += _vocabulary_lines(facts["vocabulary"])
    if facts.get("training"):
        lines += _training_lines(facts["training"])
    if facts.get("concern"):
        lines.append(f"warning     {facts['concern']}")
    if facts.get("exporter") == "trace":
        lines.append("step        traced by PyTorch")
    if "memory_form" in facts:
        lines += _memory_lines(facts)
    if "engine" in facts:
        lines += _engine_lines(facts["engine"])
    for name, file in facts.get("files", {}).items():
        lines.append(f"file        {name}, {file['num_bytes']:,} bytes, sha256 {file['sha256']}")
    for side in ("inputs", "outputs"):
        for tensor in facts.get(side, ()):
            lines.append(f"{side:<12}{tensor['name']}  {tensor['dtype']} {tensor['shape']}")
    if "producer" in facts:
        made = [f"{name} {version}" for name, version in facts["producer"].items()]
        lines.append("made with   " + ", ".join(text for text in made if text.isprintable()))
    return lines


def _vocabulary_lines(vocabulary: dict[str, Any]) -> list[str]:
    library = f" of {vocabulary['library']}" if "library" in vocabulary else ""
    lines = [f"vocabulary  {vocabulary['kind']}{library}, {vocabulary['size']:,} tokens"]
    named = [f"{name.replace('_', ' ')} {token}" for name, token in vocabulary["special"].items()]
    return [*lines, f"            special tokens: {', '.join(named)}"] if named else lines


def _training_lines(training: dict[str, Any]) -> list[str]:
    """Step, best validation, data and recipe of a run that was trained here."""
    best, recipe, rule = training["best"], training["recipe"], training["rule"]
    score = f"{best['bits_per_token']:.4f} bits/token at step {best['step']:,}" if best else "none"
    known = training["step"] is not None
    return [
        f"training    step {training['step']:,} of {training['steps']:,}, best validation {score}"
        if known
        else "training    unknown",
        f"            data {training['data']}",
        f"            {recipe['optimizer']}, learning rate {recipe['learning_rate']:g}, {recipe['schedule']}",
        f"            warm-up {recipe['warmup_steps']:,} steps, batch {recipe['batch']}, autocast "
        f"{recipe['autocast']}, seed {recipe['seed']}",
        f"            mem_len {rule['mem_len']}, segment {rule['segment']}, mask {rule['mask']}",
    ]


def _fused_advice(facts: dict[str, Any]) -> str:
    """What the reader should know about the fused operator; empty where nothing is to be said."""
    if "fused_graph" not in facts:
        return ""
    if not facts["fused_graph"]:
        return "; the fused operator does not serve this model and memory"
    ignored = f"; {facts['fused_kernel_ignored'].rstrip('.')}" if "fused_kernel_ignored" in facts else ""
    if not facts["fused_kernel_built"]:
        return ignored or "; there is a graph for the fused operator, which `xl-export fused-kernel` builds"
    variant = facts["fused_kernel_variant"]
    return ignored if variant == "native" else f"; the package's library for {variant}{ignored}"


def _memory_lines(facts: dict[str, Any]) -> list[str]:
    """The memory of an artefact, its precision, and what the precision costs."""
    saved = f", {facts['bytes_saved_by_spans']:,} saved by learned spans" if facts["model"]["reaches"] else ""
    stream = facts["bytes_per_stream"], facts["fp32_bytes_per_stream"]
    memory = memory_precision_of(tensor["dtype"] for tensor in facts["inputs"])
    fewer = memory != "fp32"
    held = f"{per_stream(*stream)} in fp32" if fewer else f"{stream[0]:,} bytes per stream"
    running = facts["running_bytes_per_stream"]
    twice = f", {running:,} while a session runs" if running > stream[0] else ""
    tighter = facts["mean_tolerance"] < facts["tolerance"]
    mean = f" and {facts['mean_tolerance']:g} in the mean" if tighter else ""
    lines = [
        f"memory      {facts['memory_form']}{f' in {memory}' if fewer else ''}, {held}{saved}{twice}",
        f"precision   {facts['precision']}, check within {facts['tolerance']:g} nats{mean}, opset "
        f"{facts['opset']}",
    ]
    if facts["measured"]:
        measured = Measured(**facts["measured"])
        lines.append(f"            {sentence(facts['precision'], memory, measured, stream=stream)}")
    elif facts["precision"] in QUANTISED:
        lines.append(f"            {unmeasured(facts['precision'])}")
    return lines


def _engine_lines(engine: dict[str, Any]) -> list[str]:
    tuned = f"tuned on {engine['gpu']['name']!r:.80}" if engine["gpu"] else "built ahead of time"
    lines = [
        f"engine      {NAMES[engine['flavour']]} {engine['version']!s:.40}, {engine['attention']} "
        f"attention, {tuned}",
        f"runs on     compute capability {', '.join(engine['compute_capabilities'])}, hardware "
        f"{engine['hardware']}",
    ]
    for profile in engine["profiles"]:
        batch, tokens = (":".join(map(str, profile[axis])) for axis in ("batch", "tokens"))
        lines.append(f"profile     {profile['name']}, batch {batch}, tokens {tokens} (least:usual:most)")
    most_first = sorted(engine["layers"].items(), key=lambda item: -item[1])
    counted = [f"{count} {kind.lower()}" for kind, count in most_first]
    return [*lines, f"layers      {', '.join(counted)}", f"plugin      {engine['plugin_layers']} layers"]
