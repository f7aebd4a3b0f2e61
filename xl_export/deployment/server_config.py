"""`config.pbtxt` of Triton Inference Server, for a step graph whose memory the server keeps or for a session.

The format is the text form of the message `ModelConfig` in the server's `model_config.proto`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from runtimes.base.element_types import ELEMENT_TYPES, ElementName
from runtimes.contract.spec import Spec
from xl_export.deployment.server_graph import START, SequenceGraph

Backend = Literal["onnxruntime", "tensorrt"]  # of a graph; a session is run by the backend "python"
CONFIG = "config.pbtxt"
MAX_SEQUENCES = 64  # streams that have their memory in the server at a time; more of them wait
IDLE_SECONDS = 600  # a stream that gets no request for so long is dropped


@dataclass(frozen=True)
class Word:
    """A name of an enumeration, which is written without quotation marks."""

    name: str


def server_config(
    graph: SequenceGraph, *, name: str, backend: Backend, most_rows: int, profiles: int = 0
) -> str:
    """Returns the text of `config.pbtxt` for a graph that `sequence_graph` made.

    most_rows: of a batch that the server makes. profiles: the number of an engine's optimisation profiles;
    the server uses the one that fits a request.
    """
    instance: dict[str, Any] = {"count": 1, "kind": Word("KIND_GPU" if profiles else "KIND_CPU")}
    if profiles:
        instance["profile"] = [str(number) for number in range(profiles)]
    start = {"kind": Word("CONTROL_SEQUENCE_START"), "int32_false_true": [0, 1]}
    return as_text(
        {
            "name": name,
            "backend": backend,
            "max_batch_size": most_rows,
            "input": [_tensor(fact) for fact in graph.inputs],
            "output": [_tensor(fact) for fact in graph.outputs],
            "sequence_batching": {
                "max_sequence_idle_microseconds": IDLE_SECONDS * 1_000_000,
                "oldest": {"max_candidate_sequences": MAX_SEQUENCES},
                "control_input": [{"name": START, "control": [start]}],
                "state": [_state(*pair) for pair in graph.states],
            },
            "instance_group": [instance],
        }
    )


def session_config(spec: Spec, *, name: str, sequences: int, most_rows: int) -> str:
    """Returns the text of `config.pbtxt` for `server_model`, which keeps the memory of `sequences` streams.

    most_rows: of the requests that the server passes at once. Their lengths may differ.
    """
    inputs = (("input_ids", False), ("targets", True), ("position", True))
    outputs: tuple[tuple[str, ElementName, int], ...] = (
        ("logits", "float32", spec.model.vocab_size),
        ("log_probs", "float32", -1),
        ("position", "int64", 1),
    )
    return as_text(
        {
            "name": name,
            "backend": "python",
            "max_batch_size": most_rows,
            "input": [
                {
                    "name": tensor,
                    "data_type": _data_type("int64"),
                    "dims": [1 if tensor == "position" else -1],
                    **({"optional": True} if optional else {}),
                    "allow_ragged_batch": True,
                }
                for tensor, optional in inputs
            ],
            "output": [
                {"name": tensor, "data_type": _data_type(kind), "dims": [size]}
                for tensor, kind, size in outputs
            ],
            "sequence_batching": {
                "max_sequence_idle_microseconds": IDLE_SECONDS * 1_000_000,
                "oldest": {"max_candidate_sequences": sequences},
            },
            "instance_group": [{"count": 1, "kind": Word("KIND_CPU")}],  # two would not share the memory
        }
    )


def _data_type(dtype: ElementName) -> Word:
    return Word(f"TYPE_{ELEMENT_TYPES[dtype].inference}")


def _tensor(fact: Any) -> dict[str, Any]:
    return {"name": fact.name, "data_type": _data_type(fact.dtype), "dims": _dims(fact)}


def _dims(fact: Any) -> list[int]:
    """The sizes of a tensor without its batch; -1 for one that varies."""
    return [size if isinstance(size, int) else -1 for size in fact.shape[1:]]


def _state(read: Any, written: Any) -> dict[str, Any]:
    """One memory tensor, which begins with zeros."""
    kind = _data_type(read.dtype)
    dims = _dims(read)
    beginning = {"data_type": kind, "dims": dims, "zero_data": True, "name": f"{read.name} of a new text"}
    return {
        "input_name": read.name,
        "output_name": written.name,
        "data_type": kind,
        "dims": dims,
        "initial_state": [beginning],
    }


def as_text(message: Mapping[str, Any], indent: str = "") -> str:
    """Returns a message in protobuf's text form: a line for each field, and one for each value of a list."""
    lines = []
    for field, given in message.items():
        for value in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
            if isinstance(value, Mapping):
                lines += [f"{indent}{field} {{", as_text(value, indent + "  ").rstrip("\n"), f"{indent}}}"]
            else:
                lines.append(f"{indent}{field}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    assert isinstance(value, str), value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
