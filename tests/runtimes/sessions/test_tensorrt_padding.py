"""Segments that an engine with a plugin runs at one length have the scores of the model itself.

The engines are a stand-in that runs the artefact on ONNX Runtime; nothing was run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Session, open_session
from runtimes.contract.engine import Profile
from runtimes.contract.rule import MemoryRule
from tests import fake_gpu
from tests.architectures import ARCHITECTURES
from tests.fake_gpu import install, make_engine
from tests.streams import rows
from trainer.model.naive import naive_attention
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import export

ZEROS = MemoryRule(mem_len=16, segment=8, initial_memory="zeros")
BATCH = (
    Profile(name="segment", batch=(1, 6, 6), tokens=(1, 8, 8)),
    Profile(name="token", batch=(1, 6, 6), tokens=(1, 1, 1)),
)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step of an engine had, as the plugin sees it."""
    install(monkeypatch)
    seen: list[int] = []
    execute = fake_gpu._Context.execute_async_v3

    def noted(context: Any, stream: int) -> bool:
        seen.append(context.shapes["input_ids"][1])
        return execute(context, stream)

    monkeypatch.setattr(fake_gpu._Context, "execute_async_v3", noted)
    return seen


@pytest.fixture(scope="module")
def ring(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(run, tmp_path_factory.mktemp("ring"))


def exported(run: Path, folder: Path, **options: Any) -> Path:
    """A run for engines with a plugin, in fp32 so that its answers can be compared closely."""
    return export(run, folder / "artefact", target="tensorrt", precision="fp32", **options)


def opened(artefact: Path, engine: Path, **changes: Any) -> Session:
    """The session over an engine of an artefact."""
    options = {"attention": "plugin", "profiles": BATCH, **changes}
    return open_session(make_engine(artefact, engine, **options))


def naive_log_probs(run: Path, stream: np.ndarray, cuts: list[int]) -> np.ndarray:
    """log p [1, sum of cuts, V] of the naive model in float64."""
    import torch

    trained = load_run(run)
    model, rule = trained.model.double().eval(), trained.config.evaluation
    state, at, answers = model.start(1, rule), 0, []
    with torch.no_grad():
        for length in cuts:
            piece = torch.from_numpy(stream[:, at : at + length])
            logits, state = model(piece, state, torch.tensor([at]), rule, attention=naive_attention)
            answers.append(logits.log_softmax(-1).numpy())
            at += length
    return np.concatenate(answers, axis=1)


def test_a_plugin_over_a_ring_always_sees_one_length(
    lengths: list[int], run: Path, ring: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    """100 tokens, 4 turns of the ring of 24 slots, in segments of all lengths: windows go back at its end."""
    session = opened(ring, tmp_path / "engine")
    draw, cuts = np.random.default_rng(1), list[int]()
    while sum(cuts) < 100:
        cuts.append(int(draw.integers(2, 9)))
    stream = rows(tokens, 1, sum(cuts))
    expected, memory, at = naive_log_probs(run, stream, cuts), session.start(1), 0
    for length in cuts:
        piece = stream[:, at : at + length]
        scores, _ = session.score(piece, piece, memory)
        wanted = np.take_along_axis(expected[:, at : at + length], piece[..., None], axis=-1)[..., 0]
        assert np.abs(scores - wanted).max() < 1e-4, at
        at += length
    assert set(lengths) <= {8, 1}  # 1 behind the ring's end
    assert memory.positions.tolist() == [at]


def test_what_was_not_fed_here_is_not_guessed(
    lengths: list[int], run: Path, ring: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    """A fork near the end of the ring knows no tokens to feed again, so it feeds its segment singly."""
    session, reference = opened(ring, tmp_path / "engine"), open_session(run)
    stream = rows(tokens, 2, 24)
    memories = [one.start(2) for one in (session, reference)]
    for at, stop in ((0, 8), (8, 16), (16, 18)):
        for one, memory in zip((session, reference), memories, strict=True):
            one.step(stream[:, at:stop], memory)
    forks = [memory.copy() for memory in memories]
    lengths.clear()
    for own, other in (memories, forks):
        found, wanted = (
            one.step(stream[:, 18:21], memory)[0] for one, memory in ((session, own), (reference, other))
        )
        assert np.abs(found - wanted).max() < 1e-4
    assert set(lengths) == {8, 1}


def test_only_plugins_pad_segments_to_usual_lengths(
    lengths: list[int], ring: Path, tokens: np.ndarray, tmp_path: Path
) -> None:
    profiles = (Profile(name="segment", batch=(1, 1, 6), tokens=(1, 4, 8)), BATCH[1])
    stream = rows(tokens, 1, 24)
    for attention, expected in (("plugin", [4, 8, 4, 8]), ("native", [3, 6, 4, 8])):
        session = opened(ring, tmp_path / attention, attention=attention, profiles=profiles)
        memory, at = session.start(1), 0
        lengths.clear()
        for length in (3, 6, 4, 8):
            session.step(stream[:, at : at + length], memory)
            at += length
        assert lengths == expected


SHIFTED = {
    "transformer-xl": {},
    "full": {"rule": MemoryRule(mem_len=16, segment=8, mask="full")},
    "absolute-from-segment-end": ARCHITECTURES["absolute-from-segment-end"],
}


@pytest.mark.parametrize("name", SHIFTED)
def test_shift_memory_is_padded_only_at_the_start(
    name: str, lengths: list[int], make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    run = make_run(**SHIFTED[name])
    artefact = exported(run, tmp_path, memory="shift")
    session, reference = opened(artefact, tmp_path / "engine"), open_session(run)
    stream = rows(tokens, 2, 40)
    memories = [one.start(2) for one in (session, reference)]
    for first in (3, 5, 8):  # each is a new text in the same rows
        lengths.clear()
        for memory in memories:
            memory.positions[:] = 0
        for at, stop in ((0, first), (first, first + 6), (first + 6, first + 14)):
            found, wanted = (
                one.step(stream[:, at:stop], memory)[0]
                for one, memory in zip((session, reference), memories, strict=True)
            )
            assert np.abs(found - wanted).max() < 1e-4, (first, at)
        assert lengths == [8, 6, 8]


def test_shift_memory_that_begins_with_zeros_is_not_padded(
    lengths: list[int], make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    """Its first tokens see M empty places, of which padding would take some."""
    run = make_run(rule=ZEROS)
    artefact = exported(run, tmp_path, memory="shift")
    session, reference = opened(artefact, tmp_path / "engine"), open_session(run)
    found, wanted = (one.step(rows(tokens, 1, 3), one.start(1))[0] for one in (session, reference))
    assert np.abs(found - wanted).max() < 1e-4
    assert lengths == [3]


def test_no_row_needs_to_have_a_token(
    lengths: list[int], make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    """Logits of no position are wanted then, of which TensorRT has no empty tensor."""
    artefact = exported(make_run(**ARCHITECTURES["adaptive-softmax"]), tmp_path)
    session = opened(artefact, tmp_path / "engine")
    memory = session.start(2)
    for length in (1, 5):
        said, _ = session.predict(rows(tokens, 2, length), memory, lengths=np.array([0, 0]))
        assert np.isnan(said).all()
    assert (memory.positions.tolist(), lengths[-2:]) == ([0, 0], [1, 8])
