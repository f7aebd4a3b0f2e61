"""The facts of an artefact that `info` prints, from its verified spec alone."""

from __future__ import annotations

from typing import Any

from runtimes.base.records import to_json
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import TensorFacts


def describe_spec(spec: Spec) -> dict[str, Any]:
    """Model, rule, memory, precision, tensors, hashes and producers of an artefact, as JSON."""
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
    shape = [int(size) if size.isdigit() else size for size in tensor.shape]
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": shape}
