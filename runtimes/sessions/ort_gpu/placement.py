"""Which nodes of a graph ONNX Runtime runs on another provider than the requested one."""

from __future__ import annotations

from collections import Counter
from typing import Any

RECORD = "session.record_ep_graph_assignment_info"  # the option of a session that keeps the placement
TELLS_PLACEMENT = "get_provider_graph_assignment_info"  # the method of a session, from release 1.24 on
# ONNX Runtime keeps arithmetic on shapes on the CPU by design: it has a few integers, which other nodes want
# there. Of these operators it is not known whether a node computes a shape, so they are named only next to
# others.
OF_SHAPES = {"Shape", "Size", "Add", "Sub", "Mul", "Div", "Concat", "Squeeze", "Unsqueeze", "Gather", "Slice"}


def elsewhere(session: Any, provider: str, *, refused: bool = False) -> str:
    """The nodes on other providers, as a part of a sentence; empty if none of them computes more than
    shapes.

    refused: whether ONNX Runtime has found that they compute more; then all of them are named. ONNX Runtime
    before 1.24 does not report the placement; the sentence then says that.
    """
    if not hasattr(session, TELLS_PLACEMENT):
        return "some nodes, which this release does not name,"
    here, kinds = _placement(session, provider)
    return "" if not refused and not set(kinds) - OF_SHAPES else _named(here, kinds)


def of_shapes_elsewhere(session: Any, provider: str) -> str:
    """The nodes that ONNX Runtime keeps on the CPU because they compute shapes, as a part of a sentence.

    For a session for which `elsewhere` is empty. Empty if there are none, or if the release does not report
    them.
    """
    if not hasattr(session, TELLS_PLACEMENT):
        return ""
    here, kinds = _placement(session, provider)
    return _named(here, kinds) if kinds else ""


def _placement(session: Any, provider: str) -> tuple[int, Counter[str]]:
    """How many nodes are on the provider, and how many of each operator on others."""
    here = 0
    kinds = Counter[str]()
    for part in session.get_provider_graph_assignment_info():
        if part.ep_name == provider:
            here += len(part.get_nodes())
        else:
            kinds.update(node.op_type for node in part.get_nodes())
    return here, kinds


def _named(here: int, kinds: Counter[str]) -> str:
    return f"{kinds.total()} of {here + kinds.total()} nodes ({', '.join(sorted(kinds))})"
