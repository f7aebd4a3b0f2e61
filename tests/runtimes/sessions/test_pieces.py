"""A ring that no step writes across: segments are cut at its end, and no score changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtimes import open_session
from runtimes.base.errors import ArtefactError
from runtimes.sessions.graph import cut
from runtimes.sessions.onnx_runtime import OrtSession


def test_pieces_end_at_the_end_of_a_ring() -> None:
    for positions, length, slots, edges in (
        ([0], 8, {24}, [0, 8]),
        ([16], 8, {24}, [0, 8]),
        ([17], 8, {24}, [0, 7, 8]),
        ([17, 20, 41], 8, {24}, [0, 4, 7, 8]),
        ([-3], 8, {24}, [0, 3, 8]),
        ([(1 << 33) + 1], 8, {10, 24}, [0, 7, 8]),
        ([1], 8, {2, 24}, [0, 1, 3, 5, 7, 8]),
    ):
        pieces = cut(np.array(positions), length, slots)
        assert [0, *(piece.stop for piece in pieces)] == edges, (positions, slots)
        assert [piece.start for piece in pieces] == edges[:-1]


def test_an_uncut_segment_never_crosses_the_end_of_a_ring(cut_ring: Path) -> None:
    """ONNX Runtime refuses such a step as TensorRT demands: what is tested above is cutting, not wrapping."""
    session = open_session(cut_ring)
    assert isinstance(session, OrtSession)
    memory = session.start(1)
    memory.positions[:] = session.rule.slots - 3
    session.step(np.zeros((1, 8), np.int64), memory)
    session._ring_sizes = set()
    memory.positions[:] = session.rule.slots - 3
    with pytest.raises(ArtefactError, match="linear mode"):
        session.step(np.zeros((1, 8), np.int64), memory)
