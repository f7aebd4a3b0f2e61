"""A ring that no step writes across: segments are cut at its end, and no score changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes import open_session
from runtimes.base.errors import ArtefactError
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.sessions.pieces import cut
from tests import fake_gpu
from tests.architectures import ARCHITECTURES
from tests.streams import rows
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import export
from xl_export.artefact.write import reference_of

# Two heads' spans, whose rings end at different tokens, and a graph that computes logits of chosen rows only.
NAMES = ("all-attention-groups", "adaptive-softmax")


def test_pieces_end_where_a_row_comes_to_the_end_of_a_ring() -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_cut_segments_have_the_scores_of_the_model_itself(
    name: str,
    make_run: Callable[..., Path],
    tokens: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows at three places, one restarted, segments of every length, on ONNX Runtime and in an engine."""
    run = make_run(**ARCHITECTURES[name])
    artefact = export(run, tmp_path / "artefact", target="tensorrt", precision="fp32")
    fake_gpu.install(monkeypatch)
    engine = fake_gpu.make_engine(artefact, tmp_path / "engine")
    trained = load_run(run)
    sessions = [
        reference_of(trained, trained.config.evaluation),
        open_session(artefact),
        open_session(engine),
    ]
    rings = {int(state.shape[2]) for state in sessions[1].state}
    assert len(rings) == (2 if name == NAMES[0] else 1)
    memories = [session.start(3) for session in sessions]
    draw, across = np.random.default_rng(0), 0
    for turn, length in enumerate([8, 1, 7, *draw.integers(1, 9, 16).tolist()]):
        batch = rows(tokens[turn * 50 :], 3, length + 1)
        lengths = draw.integers(0, length + 1, 3) if turn % 4 == 3 else None
        told = np.arange(length) < (length if lengths is None else lengths[:, None])
        targets = np.where(told, batch[:, 1:], -1)
        across += len(cut(memories[1].positions, length, rings)) > 1
        answers = []
        for session, memory in zip(sessions, memories, strict=True):
            if turn == 10:
                memory.positions[1] = 0
            fork = memory.copy()
            scores, _ = session.score(batch[:, :-1], targets, memory, lengths=lengths)
            logits, _ = session.step(batch[:, :-1], fork.copy(), lengths=lengths)
            last, _ = session.predict(batch[:, :-1], fork, lengths=lengths)
            answers.append((scores, np.where(told[..., None], logits, 0), np.nan_to_num(last)))
        for others in answers[1:]:
            for mine, theirs in zip(answers[0], others, strict=True):
                assert np.abs(mine - theirs).max() < 1e-4, turn
    assert across >= 5


def test_a_graph_that_is_not_cut_writes_nothing_across_the_end(run: Path, tmp_path: Path) -> None:
    """ONNX Runtime refuses such a step as TensorRT demands: what is tested above is cutting, not wrapping."""
    session = open_session(export(run, tmp_path / "artefact", target="tensorrt"))
    assert isinstance(session, OrtSession)
    memory = session.start(1)
    memory.positions[:] = session.rule.slots - 3
    session.step(np.zeros((1, 8), np.int64), memory)
    session._ring_sizes = set()
    memory.positions[:] = session.rule.slots - 3
    with pytest.raises(ArtefactError, match="linear mode"):
        session.step(np.zeros((1, 8), np.int64), memory)
