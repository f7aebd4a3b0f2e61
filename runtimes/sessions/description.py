"""The facts of an artefact that `info` prints, from its verified spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtimes.base.records import to_json
from runtimes.base.sealed import verify_file
from runtimes.contract.spec import SPEC, VOCAB, Spec
from runtimes.contract.vocabulary import VOCAB_FILES, SubwordVocab, Vocab, load_vocab


def describe_vocab(vocab: Vocab) -> dict[str, Any]:
    """Kind, size and special tokens of a vocabulary, and the library that computes it, as JSON."""
    library = {"library": vocab.library} if isinstance(vocab, SubwordVocab) else {}
    return {"kind": vocab.kind, **library, "size": vocab.size, "special": vocab.special.to_json()}


def describe_spec(spec: Spec, folder: Path) -> dict[str, Any]:
    """Model, rule, vocabulary, memory, precision, tensors, hashes and producers of an artefact, as JSON.

    The vocabulary is null for a step that is no language model.

    folder: of its vocabulary, whose hashes are verified.
    """
    for name in VOCAB_FILES:
        if name in spec.files:
            verify_file(folder / name, spec.files[name], record=SPEC, again="export the run again")
    return {
        "kind": "artefact",
        "identity": spec.identity,
        "memory_identity": to_json(spec.memory_identity),
        "model": to_json(spec.model),
        "rule": to_json(spec.rule),
        "vocabulary": describe_vocab(load_vocab(folder / VOCAB)) if spec.language_model else None,
        "concern": spec.concern,
        "trained_tokens": spec.trained_tokens,
        "exporter": spec.exporter,
        "without": list(spec.without),
        "fixed_rows": spec.fixed_rows,
        "fixed_tokens": list(spec.fixed_tokens),
        "moves_every": spec.moves_every,
        "drifts_from": spec.drifts_from,
        "rounding": spec.rounding,
        "mean_rounding": spec.mean_rounding,
        "original_difference": spec.original_difference,
        "equals_up_to": spec.equals_up_to,
        "not_compared": list(spec.not_compared),
        "target": spec.target,
        "memory_form": spec.form,
        "bytes_per_stream": spec.bytes_per_stream,
        "fp32_bytes_per_stream": spec.fp32_bytes_per_stream,
        "running_bytes_per_stream": spec.running_bytes_per_stream,
        "precision": spec.precision,
        "memory_precision": spec.memory_precision,
        "measured": None if spec.measured is None else to_json(spec.measured),
        "tolerance": spec.tolerance,
        "mean_tolerance": spec.mean_tolerance,
        "opset": spec.opset,
        "inputs": [tensor.to_json() for tensor in spec.inputs],
        "outputs": [tensor.to_json() for tensor in spec.outputs],
        "files": {name: to_json(facts) for name, facts in spec.files.items()},
        "producer": spec.producer,
        "source": spec.source,
    }
