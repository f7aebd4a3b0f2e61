"""The facts of a folder as text: what it is in words, what to do next, and on request every detail."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from runtimes.base.records import from_json
from runtimes.contract.engine import NAMES
from runtimes.contract.precision import (
    QUANTISED,
    Measured,
    MeasuredStep,
    memory_precision_of,
    per_stream,
    sentence,
    unmeasured,
)
from runtimes.contract.promises import PROMISES
from runtimes.contract.sampling import Sampler
from runtimes.contract.tensors import POSITIONS

TOKENS = {"byte": "bytes", "char": "characters", "word": "words", "subword": "subwords", "ids": "token ids"}


def summary_lines(facts: dict[str, Any], path: Path) -> list[str]:
    """What the folder at `path` is, in a few lines."""
    model = facts["model"]
    vocabulary = facts["vocabulary"]
    article = "a" if facts["kind"] == "run" else "an"
    size = f"{_count(model['parameters'])} parameters"
    what = f"{path} is {article} {facts['kind']}: {_kind_of_model(model)} of {size}"
    if vocabulary:
        layers = f"{model['layers']} layers of width {model['d_model']}"
        lines = [f"{what}, {layers}, over {vocabulary['size']:,} {TOKENS[vocabulary['kind']]}"]
    else:
        lines = [f"{what}, no language model", *_tensor_lines(facts)]
    memory = f"memory      {facts['rule']['mem_len']:,} tokens"
    if "bytes_per_stream" in facts:
        running = f"{facts['running_bytes_per_stream'] / 1e6:,.2f} MB per stream"
        grows = "text" if vocabulary else "stream"
        lines.append(f"{memory}, {running}, however long the {grows} grows")
        weights = facts["precision"]
        stored = facts["memory_precision"]
        lines.append(f"precision   weights {weights}, memory {stored}")
    else:
        lines.append(memory)
    if vocabulary:
        lines.append(f"sampling    {Sampler(**facts['sampling'])}")
    lines.append(f"computed by {facts['computed_by']}{_fused_advice(facts)}")
    if facts.get("training") and facts["training"]["best"]:
        best = facts["training"]["best"]
        lines.append(f"training    {best['bits_per_token']:.4f} bits per token at step {best['step']:,}")
    if facts.get("concern"):
        lines.append(f"warning     {facts['concern']}")
    if rows := facts.get("fixed_rows"):
        *fewer, most = map(str, facts["fixed_tokens"] or [facts["rule"]["segment"]])
        counts = f"{', '.join(fewer)} or {most}" if fewer else most
        lines.append(f"sizes       fixed: {rows} rows of {counts} tokens in every run of a graph")
    if count := facts.get("moves_every"):
        lines.append(f"moves       the memory moves when {count} tokens are complete")
    for promise in facts.get("without", ()):
        lines.append(f"no promise  {promise}: that {PROMISES[promise]}")
    return lines


def _tensor_lines(facts: dict[str, Any]) -> list[str]:
    """The inputs and outputs of a step that is no language model, which a caller sees."""
    after = {tensor["present"] for tensor in facts["inputs"] if "present" in tensor}
    hidden = {POSITIONS, *after, *(tensor["name"] for tensor in facts["inputs"] if "present" in tensor)}
    lines = []
    for label, side in (("reads", "inputs"), ("returns", "outputs")):
        for tensor in facts[side]:
            if tensor["name"] not in hidden:
                values = f"{tensor['ids']:,} ids" if "ids" in tensor else tensor["dtype"]
                shape = ", ".join(map(str, tensor["shape"]))
                lines.append(f"{label:<12}{tensor['name']}: {values} [{shape}]")
    return lines


def next_command(facts: dict[str, Any], path: Path) -> str:
    """The command that most users of such a folder run next."""
    folder = shlex.quote(str(path))
    target = facts.get("target")
    if facts["kind"] == "run":
        return f"xl-export export {folder} --out artefact"
    if facts["kind"] == "artefact" and target == "tensorrt":
        return f"xl-export build {folder} --out engine"
    if target == "web":
        return f"xl-export web {folder} --serve"
    if facts["vocabulary"] is None:
        return f"xl-export check {folder}"
    prompt = "--prompt-ids 0" if facts["vocabulary"]["kind"] == "ids" else '--prompt "The"'
    return f"xl-export generate {folder} {prompt}"


def _kind_of_model(model: dict[str, Any]) -> str:
    """Such as `a Transformer-XL`."""
    positions = model["positions"]
    sublayers = model["sublayers"]
    spans = " with learned spans" if model["reaches"] else ""
    if sublayers == "own":
        return "a traced PyTorch module"
    if sublayers == "all-attention":
        return f"an all-attention network{spans}"
    if sublayers == "feed-forward":
        kind = "a Transformer-XL" if positions == "relative" else f"a Transformer with {positions} positions"
        return f"{kind}{spans}"
    return f"a Transformer with {sublayers} sublayers{spans}"


def _count(number: int) -> str:
    """A number of parameters, such as `2.2 million`."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"


def describe_lines(facts: dict[str, Any]) -> list[str]:
    """Every detail: each fact of `runtimes.sessions.open.describe`, after a label of twelve columns."""
    model = facts["model"]
    rule = facts["rule"]
    persistent = f"{model['persistent']} persistent vectors ({model['sublayers']})"
    own = model["sublayers"] == "own"  # of a traced module
    sublayer = f"FF {model['d_ff']}" if model["d_ff"] or own else persistent
    heads = f"H {model['heads']}, K {model['head_dim']}"
    sizes = (
        f", {model['layers']} layers, D {model['d_model']}, {heads}, {sublayer}" if model["layers"] else ""
    )
    vocabulary = f"vocabulary {model['vocab_size']}" if model["vocab_size"] else "no vocabulary"
    lines = [
        f"{facts['kind']:<12}{facts['identity']:.64}",
        f"model       {'a module of its own' if own else model['positions'] + ' positions'}{sizes}",
        f"            {vocabulary}, {model['parameters']:,} parameters",
        f"rule        mem_len {rule['mem_len']}, segment {rule['segment']}, mask {rule['mask']}, "
        f"clamp_len {rule['clamp_len'] or 'none'}, initial_memory {rule['initial_memory']}",
        f"computed by {facts['computed_by']}{_fused_advice(facts)}",
    ]
    if facts.get("vocabulary"):
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
    best = training["best"]
    recipe = training["recipe"]
    rule = training["rule"]
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
    unit = " nats" if facts["vocabulary"] else ""
    lines = [
        f"memory      {facts['memory_form']}{f' in {memory}' if fewer else ''}, {held}{saved}{twice}",
        f"precision   {facts['precision']}, check within {facts['tolerance']:g}{unit}{mean}, opset "
        f"{facts['opset']}",
    ]
    if facts["measured"]:
        measured = Measured(**facts["measured"])
        lines.append(f"            {sentence(facts['precision'], memory, measured, stream=stream)}")
    elif facts["measured_step"]:
        step = from_json(MeasuredStep, facts["measured_step"], where="measured_step")
        lines.append(f"            {step.sentence(facts['precision'], memory, stream=stream)}")
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
