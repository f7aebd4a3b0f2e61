"""The facts of a folder as text: what it is in words, what to do next, and on request every detail."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtimes.base.ranges import counted
from runtimes.base.records import json_text
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
        running = f"{_bytes(facts['running_bytes_per_stream'])} per stream"
        grows = "text" if vocabulary else "stream"
        lasting = f"{running}, however long the {grows} grows"
        if facts["memory_form"] == "own":  # it may be a recurrent state, which has no number of tokens
            lines.append(f"memory      {lasting}; exported with mem_len={facts['rule']['mem_len']}")
        else:
            lines.append(f"{memory}, {lasting}")
        lossy = (facts["precision"], facts["memory_precision"]) != ("fp32", "fp32")
        doubt = "; what they lose was not measured" if lossy and not facts["measured"] else ""
        lines.append(f"precision   weights {facts['precision']}, memory {facts['memory_precision']}{doubt}")
    else:
        lines.append(memory)
    if vocabulary:
        lines.append(f"sampling    {Sampler(**facts['sampling'])}")
    lines.append(f"computed by {facts['computed_by']}{_fused_advice(facts)}")
    if facts["kind"] != "run":
        lines.append(f"identity    {facts['identity']}")
    if facts.get("training") and (best := facts["training"]["best"]):
        lines.append(f"training    {best['bits_per_token']:.4f} bits per token at step {best['step']:,}")
    if facts.get("concern"):
        lines.append(f"warning     {facts['concern']}")
    if files := facts.get("not_compared"):
        reason = "the exporting machine could not run it; run `xl-export check` on one that can"
        lines.append(f"unchecked   {', '.join(files)}: {reason}")
    rows, counts = facts.get("fixed_rows"), facts.get("fixed_tokens")
    if rows:
        most = facts["rule"]["segment"]
        lines.append(f"rows        {rows} in every step, of {'1 to ' * bool(counts)}{counted(most, 'token')}")
    if counts:
        lines.append(
            f"graphs      of {', '.join(map(str, counts))} tokens; a step is computed by as few as fit"
        )
    if count := facts.get("moves_every"):
        lines.append(f"moves       the memory moves when {count} tokens are complete")
    if position := facts.get("drifts_from"):
        lines.append(f"drifts      the same text has other answers from about position {position:,} on")
    if rounding := facts.get("rounding"):
        unit = " nats" if vocabulary else ""
        lines.append(
            f"rounding    answers change by {rounding:.1g}{unit} if weights are rounded once more; tolerance "
            f"{facts['tolerance']:.1g}"
        )
    if (difference := facts.get("original_difference")) is not None:
        lines.append(f"original    agrees with the model's own loop to {difference:.1e}")
    if count := facts.get("equals_up_to"):
        lines.append(f"cut         equals the original only for texts of up to {count:,} tokens")
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


def _bytes(number: int) -> str:
    """A number of bytes, such as `2.16 MB` or `640 bytes`."""
    for size, unit in ((10**6, "MB"), (10**3, "kB")):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,} bytes"


def detail_lines(facts: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every fact of `runtimes.sessions.open.describe` on a line, by its path in the JSON."""
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield from detail_lines(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from (f"{prefix}{name} {json_text(each)}" for each in value)
        else:
            yield f"{prefix}{name} {json_text(value)}"


def _fused_advice(facts: dict[str, Any]) -> str:
    """What the reader should know about the fused operator; empty if nothing is to be said."""
    if "fused_graph" not in facts:
        return ""
    if not facts["fused_graph"]:
        return "; the fused operator does not serve this model and memory"
    ignored = f"; {facts['fused_kernel_ignored'].rstrip('.')}" if "fused_kernel_ignored" in facts else ""
    if not facts["fused_kernel_built"]:
        return ignored or "; there is a graph for the fused operator, which `xl-export fused-kernel` builds"
    variant = facts["fused_kernel_variant"]
    return ignored if variant == "native" else f"; the package's library for {variant}{ignored}"
