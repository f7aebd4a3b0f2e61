"""Any schedule of live streams gives each row what its text gets alone: ring memory and PyTorch.

`test_fused_cpu.py` puts the fused operator through such schedules.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Session, open_session
from runtimes.base.errors import DivergedError, StreamError
from runtimes.contract.rule import MemoryRule
from tests.architectures import ARCHITECTURES
from tests.live_rows import check_schedules
from tests.streams import feed, rows
from trainer.run.session import ProjectedTorchSession
from xl_export.artefact.export import export

Make = Callable[..., Path]
FULL_ZEROS = MemoryRule(mem_len=10, segment=7, mask="full", initial_memory="zeros")
# Beside the architectures: each mask with each initial memory, a memory shorter than a segment, and none.
RULES: dict[str, dict[str, Any]] = {
    "full-zeros-pre-norm": {"rule": FULL_ZEROS, "pre_norm": True},
    "zeros-pre-norm": {"rule": MemoryRule(mem_len=10, segment=7, initial_memory="zeros"), "pre_norm": True},
    "full": {"rule": MemoryRule(mem_len=10, segment=7, mask="full")},
    "short-memory": {"rule": MemoryRule(mem_len=3, segment=8, clamp_len=2)},
    "no-memory": {"rule": MemoryRule(mem_len=0, segment=6)},
}
EVERY = ARCHITECTURES | RULES
FROM_END = [name for name, sizes in EVERY.items() if sizes.get("from_segment_end")]
IN_PYTORCH = ["transformer-xl", "all-attention-groups", "adaptive-softmax", "full-zeros-pre-norm", *FROM_END]


@pytest.mark.parametrize("name", [name for name in EVERY if name not in FROM_END])
def test_any_schedule_gives_each_row_what_it_gets_alone(name: str, make_run: Make, tmp_path: Path) -> None:
    run = make_run(**EVERY[name])
    check_schedules(open_session(export(run, tmp_path / "artefact")), open_session(run), 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in EVERY if name not in FROM_END])
def test_many_schedules_give_each_row_what_it_gets_alone(name: str, make_run: Make, tmp_path: Path) -> None:
    run = make_run(**EVERY[name])
    check_schedules(open_session(export(run, tmp_path / "artefact")), open_session(run), 300)


@pytest.mark.parametrize("kind", ["torch", "projected"])
@pytest.mark.parametrize("name", IN_PYTORCH)
def test_pytorch_gives_each_row_what_it_gets_alone(kind: str, name: str, make_run: Make) -> None:
    reference: Any = open_session(make_run(**EVERY[name]))
    session: Session = reference
    if kind == "projected":
        session = ProjectedTorchSession(reference.model, reference.vocab, reference.rule, identity="any")
    check_schedules(session, reference, 2)


@pytest.mark.parametrize("name", FROM_END)
def test_positions_from_the_end_of_a_segment_take_no_lengths(
    name: str, make_run: Make, tmp_path: Path
) -> None:
    session = open_session(export(make_run(**EVERY[name]), tmp_path / "artefact"))
    memory = session.start(2)
    for _ in range(2):
        with pytest.raises(StreamError, match="positions of this model count from the end of the segment"):
            session.predict(np.zeros((2, 3), np.int64), memory, lengths=np.array([3, 1]))
    assert memory.positions.tolist() == [0, 0]
    assert not any(np.asarray(array).any() for array in memory.tensors.values())


def test_what_stands_in_the_padding_reaches_no_graph(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = open_session(artefacts["ring"])
    fed, right = [], session.run

    def run(inputs: dict[str, np.ndarray], *others: Any) -> None:
        fed.append(inputs["input_ids"].tolist())
        right(inputs, *others)

    lengths, memory = np.array([4, 2, 0]), session.start(3)
    session.predict(np.full((3, 4), 5), memory, lengths=lengths)  # the trial is over
    monkeypatch.setattr(session, "run", run)
    session.predict(np.array([[5, 6, 7, 8], [5, 6, 9, 9], [9, 9, 9, 9]]), memory, lengths=lengths)
    assert fed == [[[5, 6, 7, 8], [5, 6, 6, 6], [0, 0, 0, 0]]]


def test_a_model_that_is_not_finite_takes_no_lengths_and_says_why(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = open_session(artefacts["ring"])
    right = session.run

    def run(inputs: Any, outputs: dict[str, np.ndarray], memory: Any) -> None:
        right(inputs, outputs, memory)
        outputs["logits"][:] = np.nan

    monkeypatch.setattr(session, "run", run)
    with pytest.raises(DivergedError, match="gives log-probabilities that are not finite"):
        session.predict(np.zeros((2, 3), np.int64), session.start(2), lengths=np.array([3, 1]))
    monkeypatch.setattr(session, "run", right)
    session.predict(np.zeros((2, 3), np.int64), session.start(2), lengths=np.array([3, 1]))


@pytest.mark.parametrize(
    ("precision", "memory"),
    [
        *((name, "fp16") for name in ("fp16", "int8-stored", "int8", "int4")),
        ("fp32", "int8"),
        ("int4", "int8"),
    ],
)
def test_numbers_of_few_bits_take_lengths(
    precision: str, memory: str, make_run: Make, tmp_path: Path
) -> None:
    """They are tried as all graphs are, and what rounding changes must not count as seeing the end."""
    run = make_run(d_model=48, heads=2, head_dim=20, d_ff=64)
    session = open_session(
        export(run, tmp_path / "artefact", precision=precision, memory_precision=memory)  # type: ignore[arg-type]
    )
    said, memory = session.predict(np.full((2, 8), 5), session.start(2), lengths=np.array([8, 2]))
    assert memory.positions.tolist() == [8, 2]
    assert np.isfinite(said).all()


def test_going_back_by_up_to_a_segment_is_exact_on_the_ring(
    artefacts: dict[str, Path], tokens: np.ndarray
) -> None:
    """What those tokens saw is still in its slots, because S = M + T; padding behind them uses the same."""
    session = open_session(artefacts["ring"])
    text, other = rows(tokens, 1, 64), rows(tokens, 2, 64)[1:]
    for padding, back in ((0, 1), (0, 8), (0, 9), (3, 5), (3, 6), (7, 1), (7, 2)):
        _, memory = feed(session, text[:, :40], [8] * 5)
        session.step(text[:, 40:48], memory, lengths=np.array([8 - padding]))
        memory.positions -= back
        again, _ = feed(session, other[:, :24], [8] * 3, memory)
        whole = np.concatenate([text[:, : 48 - padding - back], other[:, :24]], axis=1)
        expected, _ = feed(session, whole, [1] * whole.shape[1])
        difference = np.abs(again - expected[:, -24:]).max()
        assert (difference < 1e-4) == (padding + back <= session.rule.segment), (padding, back, difference)


@pytest.mark.parametrize("verb", ["step", "predict", "score"])
@pytest.mark.parametrize("name", ["transformer-xl", "adaptive-softmax"])
def test_a_row_that_overflowed_is_noticed_behind_its_padding(
    verb: str, name: str, make_run: Make, tmp_path: Path
) -> None:
    """The next text in that row must not see what is not a number."""
    run = make_run(**EVERY[name])
    tokens, lengths = np.full((2, 8), 5), np.array([8, 3])
    for session in (open_session(run), open_session(export(run, tmp_path / "artefact"))):
        expected, memory = session.predict(tokens, session.start(2))
        for array in memory.tensors.values():
            array[1] = np.nan
        targets = np.where(np.arange(8) < lengths[:, None], 5, -1)
        given = (tokens, targets) if verb == "score" else (tokens,)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what NumPy says of NaN
            getattr(session, verb)(*given, memory, lengths=lengths)
        memory.positions[:] = 0
        assert np.abs(session.predict(tokens, memory)[0] - expected).max() < 1e-4
