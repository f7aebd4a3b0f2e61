"""The facts of its spec in a graph, for readers who have only the `.onnx` file."""

from __future__ import annotations

import json

import onnx_ir as ir

from runtimes.base.records import to_json
from runtimes.contract.spec import Spec
from runtimes.contract.vocabulary import Vocab

PREFIX = "xl_export."


def graph_facts(spec: Spec, vocab: Vocab | None) -> dict[str, str]:
    """The `metadata_props` of a spec's graphs. The identity is not among them: it has the graphs' hashes."""
    records = {"model": to_json(spec.model), "rule": to_json(spec.rule)}
    plain = {
        "schema": str(spec.schema),
        "form": spec.form,
        "precision": spec.precision,
        "memory_precision": spec.memory_precision,
        "target": spec.target,
        "exporter": spec.exporter,
    }
    if vocab is not None:
        plain["vocabulary"] = vocab.kind
    texts = plain | {name: json.dumps(record, sort_keys=True) for name, record in records.items()}
    return {f"{PREFIX}{name}": text for name, text in texts.items()}


def stamp(graph: ir.Model, spec: Spec, vocab: Vocab | None) -> ir.Model:
    """The graph itself, which has its facts now; call it right before the graph is written."""
    graph.metadata_props.update(graph_facts(spec, vocab))
    return graph
