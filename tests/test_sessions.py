"""The session contract, the same tests for every kind of session."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from runtimes import Session, open_session
from runtimes.base.errors import StreamError
from runtimes.base.logits import log_sum_exp
from runtimes.sessions.open import describe
from runtimes.tasks.describe import describe_lines
from tests import fake_gpu, host_gpu
from tests.parts import check_parts, refuses_parts
from tests.session_kinds import COMPUTED_BY, KINDS, OTHER_SESSIONS, folders_of_kinds
from tests.streams import feed, rows
from trainer.run.checkpoint import load_run
from xl_export.artefact.write import reference_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Puts each test through every session; what is refused is so before the architecture matters."""
    if "session" in metafunc.fixturenames:
        marks = [pytest.mark.slow] if "refused" in metafunc.function.__name__ else []
        others = [pytest.param(name, marks=marks) for name in OTHER_SESSIONS]
        metafunc.parametrize("session", [*KINDS, "projected", *others], indirect=True)


@pytest.fixture
def session(
    request: pytest.FixtureRequest, run: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Session:
    fake_gpu.install(monkeypatch)
    if request.param.endswith("device"):
        host_gpu.install(monkeypatch)
    if request.param == "projected":  # PyTorch with keys and values as its memory; no folder is opened so
        return reference_of(trained := load_run(run), trained.config.evaluation)
    return opened(folders, request.param)


def opened(folders: dict[str, Path], kind: str) -> Session:
    return open_session(folders[kind], device="cuda" if kind.endswith("device") else "auto")


@pytest.fixture(scope="module")
def folders(
    make_run, run: Path, artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return folders_of_kinds({"torch": run, **artefacts}, make_run, tmp_path_factory.mktemp("kinds"))


def test_what_computes_a_step_is_named(session: Session, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["session"].split()[-1]
    assert session.computed_by == COMPUTED_BY["torch" if kind == "projected" else kind]
    kernels = {"ring": "standard", "shift": "standard", "hidden": "standard", "device": "cuda"}
    assert session.kernel == kernels.get(kind.removeprefix("cut-"))
    assert (session.spec is None) == (session.computed_by == "PyTorch")
    if session.spec is not None:
        assert session.spec.rule == session.rule
        assert session.spec.state == session.state


def test_another_rule_gives_another_session_or_one_sentence(session: Session, tokens: np.ndarray) -> None:
    assert session.with_rule(session.rule) is session
    shorter = dataclasses.replace(session.rule, mem_len=session.rule.mem_len // 2)
    if session.spec is not None:
        sizes = f"--mem-len is {shorter.mem_len} and this artefact was exported with {session.rule.mem_len}"
        with pytest.raises(StreamError, match=f"{sizes}.*export again"):
            session.with_rule(shorter)
        return
    other = session.with_rule(shorter)
    assert (other.rule, other.vocab.size) == (shorter, session.vocab.size)
    assert type(other) is type(session)
    assert other.identity != session.identity
    steps = session.rule.mem_len // 8 + 2  # until the longer memory is full
    batch = rows(tokens, 1, 8 * steps)
    own, memory = feed(session, batch, [8] * steps)
    others, _ = feed(other, batch, [8] * steps)
    assert np.abs(own[:, :8] - others[:, :8]).max() < 1e-5  # no memory yet
    assert np.abs(own[:, -8:] - others[:, -8:]).max() > 1e-3
    with pytest.raises(StreamError, match="the memory belongs to"):
        other.step(batch[:, :1], memory)


def test_the_bytes_of_a_step_hold_its_memory_and_its_logits(session: Session) -> None:
    memory = sum(np.asarray(array).nbytes for array in session.start(1).tensors.values())
    one, two = (session.step_bytes(segment=segment) for segment in (1, 2))
    assert one >= memory + 4 * session.vocab.size
    assert two >= one + 4 * session.vocab.size


@pytest.mark.parametrize("kind", [*KINDS, *OTHER_SESSIONS])
def test_a_folder_is_described_as_its_session_is(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    session, facts = open_session(folders[kind]), describe(folders[kind])
    assert facts["identity"] == session.identity
    assert facts["computed_by"] == session.computed_by
    assert facts["rule"] == dataclasses.asdict(session.rule)
    assert facts["model"]["vocab_size"] == session.vocab.size
    assert facts["kind"] == {"torch": "run", "engine": "engine", "ring-engine": "engine"}.get(
        kind.split()[-1], "artefact"
    )
    assert f"computed by {session.computed_by}" in "\n".join(describe_lines(facts))


def test_step_returns_float32_logits_and_the_same_memory_advanced(
    session: Session, tokens: np.ndarray
) -> None:
    memory = session.start(3)
    logits, after = session.step(rows(tokens, 3, 5), memory)
    assert logits.shape == (3, 5, session.vocab.size)
    assert logits.dtype == np.float32
    assert after is memory
    assert memory.positions.tolist() == [5, 5, 5]


def test_predict_and_score_say_what_step_says(session: Session, tokens: np.ndarray) -> None:
    batch = rows(tokens, 2, 17)
    memory = feed(session, batch[:, :8], [8])[1]
    forks = memory.copy(), memory.copy()
    truth, _ = feed(session, batch[:, 8:16], [8], memory)
    targets = batch[:, 9:17].copy()
    targets[1, 3] = -1
    predicted, _ = session.predict(batch[:, 8:16], forks[0])
    scored, after = session.score(batch[:, 8:16], targets, forks[1])
    assert np.abs(predicted - log_sum_exp(predicted)[:, None] - truth[:, -1]).max() < 1e-5
    expected = np.take_along_axis(truth, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    assert np.abs(scored - np.where(targets < 0, 0, expected)).max() < 1e-5
    assert after.positions.tolist() == [16, 16]


def takes_lengths(session: Session) -> bool:
    return session.spec is None or session.spec.form == "ring"


def test_whoever_hands_over_is_called_in_each_step_before_the_memory_moves(
    session: Session, tokens: np.ndarray
) -> None:
    batch, memory = rows(tokens, 2, 8), session.start(2)
    seen: list[int] = []
    session.before_run = lambda: seen.append(int(memory.positions[0]))
    try:
        session.step(batch[:, :4], memory)
        session.predict(batch[:, 4:6], memory)
        session.score(batch[:, 6:7], batch[:, 7:8], memory)
        assert sorted(set(seen)) == [0, 4, 6]
        count = len(seen)
        with pytest.raises(StreamError):
            session.predict(np.full_like(batch[:, :1], session.vocab.size), memory)
        assert len(seen) == count
    finally:
        session.before_run = None


def test_rows_of_their_own_lengths_get_what_they_get_alone_or_one_sentence(
    session: Session, tokens: np.ndarray
) -> None:
    """Row 0 has no token, row 1 has all, row 2 has some; the rest of a row is padding of any value."""
    batch, lengths, memory = rows(tokens, 3, 24), np.array([0, 8, 3]), session.start(3)
    feed(session, batch[:, :16], [8, 8], memory)
    if not takes_lengths(session):
        before = memory.copy()
        for use in (session.step, session.predict):
            with pytest.raises(StreamError, match=f"in {session.spec.form} memory all rows.*--memory ring"):  # type: ignore[union-attr]
                use(batch[:, 16:], memory, lengths=lengths)
        with pytest.raises(StreamError, match="leave lengths out"):
            session.score(batch[:, 16:], np.full((3, 8), -1), memory, lengths=[8, 8, 8])  # type: ignore[arg-type]
        assert np.array_equal(memory.positions, before.positions)
        assert all(np.array_equal(memory.tensors[name], array) for name, array in before.tensors.items())
        return
    targets = np.where(np.arange(8) < lengths[:, None], batch[:, 8:16], -1)
    forks = memory.copy(), memory.copy(), memory.copy()
    logits, after = session.step(batch[:, 16:], memory, lengths=lengths)
    last, _ = session.predict(batch[:, 16:], forks[0], lengths=lengths.astype(np.uint8))
    scores, _ = session.score(batch[:, 16:], targets, forks[1], lengths=lengths.tolist())  # type: ignore[arg-type]
    assert (logits.dtype, last.dtype, scores.dtype) == (np.float32,) * 3
    assert after.positions.tolist() == [16, 24, 19]
    assert [memory.unsure, forks[0].unsure, forks[1].unsure] == [False] * 3  # padding is not looked at
    for row, length in enumerate(lengths):
        assert np.isnan(logits[row, length:]).all()
        if length == 0:
            assert np.isnan(last[row]).all()
            assert (scores[row] == 0).all()
            continue
        alone, _ = feed(
            session, batch[row : row + 1, 16 : 16 + length], [int(length)], forks[2].select([row])
        )
        said = logits[row, :length] - log_sum_exp(logits[row, :length])[:, None]
        assert np.abs(said - alone[0]).max() < 1e-4
        assert np.abs(last[row] - logits[row, length - 1]).max() < 1e-4
        wanted = targets[row, :length]
        assert np.abs(scores[row, :length] - alone[0, np.arange(length), wanted]).max() < 1e-4
        assert (scores[row, length:] == 0).all()
    again, _ = feed(session, batch[:, :8], [8], memory)  # the padding is behind every row
    for row, length in enumerate(lengths):
        text = np.concatenate([batch[row, : 16 + length], batch[row, :8]])[None]
        alone, _ = feed(session, text, [8, 8, *([int(length)] if length else []), 8])
        assert np.abs(again[row] - alone[0, -8:]).max() < 1e-4


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2, 3], r"lengths are int64 \[3\]; expected integers \[2\]"),
        ([[1, 2]], "expected integers"),
        ([[1], [1, 2]], "expected integers"),
        (2, "expected integers"),
        ([1.0, 2.0], "lengths are float64"),
        ([True, False], "lengths are bool"),
        ([0, 5], "row 1 has length 5; expected 0 to 4"),
        ([-1, 4], "row 0 has length -1; expected 0 to 4"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_and_the_memory_unchanged(
    session: Session, lengths: object, message: str
) -> None:
    tokens, memory = np.zeros((2, 4), np.int64), session.start(2)
    message = message if takes_lengths(session) else "length"
    for use in (session.step, session.predict):
        with pytest.raises(StreamError, match=message):
            use(tokens, memory, lengths=lengths)  # type: ignore[arg-type]
    with pytest.raises(StreamError, match=message):
        session.score(tokens, np.full((2, 4), -1), memory, lengths=lengths)  # type: ignore[arg-type]
    with pytest.raises(StreamError, match="row 1 has length 2 and wants the target at index 2"):
        session.score(tokens, tokens, memory, lengths=np.array([4, 2]))
    assert memory.positions.tolist() == [0, 0]
    assert not any(np.asarray(array).any() for array in memory.tensors.values())


def test_rows_are_taken_out_put_back_and_joined(session: Session, tokens: np.ndarray) -> None:
    """One row is saved, one forked, one replaced, and a new one joins: each goes on as its text does."""
    batch = rows(tokens, 4, 32)
    _, memory = feed(session, batch[:3, :16], [8, 8], session.start(3))
    saved = memory.select([1])
    memory.positions[0] = 0  # this row begins a new text
    feed(session, batch[:3, 16:24], [8], memory)
    memory.replace([0, 2], memory.select([1, 0]))  # row 0 is now a fork of 1, and 2 has the new text
    joined = memory.join(saved).join(session.start(1))
    assert joined.positions.tolist() == [24, 24, 8, 16, 0]
    goes_on, _ = feed(session, batch[[3] * 5, 24:32], [8], joined)
    stays, _ = feed(session, batch[[3] * 3, 24:32], [8], memory)
    assert np.abs(stays - goes_on[:3]).max() < 1e-5
    texts = [batch[1, :24], batch[1, :24], batch[0, 16:24], batch[1, :16], batch[1, :0]]
    for row, text in enumerate(texts):
        whole = np.concatenate([text, batch[3, 24:32]])[None]
        alone, _ = feed(session, whole, [8] * (whole.shape[1] // 8))
        assert np.abs(goes_on[row] - alone[0, -8:]).max() < 1e-5


def test_a_slice_of_rows_is_stepped_in_place_or_refused_on_a_device(session: Session) -> None:
    on_device = session.computed_by.startswith(("TensorRT", "ONNX Runtime, CUDA"))
    (refuses_parts if on_device else check_parts)(session)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.zeros((1, 3), np.int64), "targets are int64"),
        (np.zeros((1, 4)), "targets are float64"),
        (np.full((1, 4), -2), "outside"),
    ],
)
def test_targets_that_do_not_fit_are_refused(session: Session, targets: np.ndarray, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        session.score(np.zeros((1, 4), np.int64), targets, session.start(1))


def test_a_row_restarts_by_position_zero_and_sees_nothing_of_its_past(
    session: Session, tokens: np.ndarray
) -> None:
    batch = rows(tokens, 2, 48)
    _, memory = feed(session, batch[:, :40], [8] * 5)
    memory.positions[1] = 0
    restarted, _ = feed(session, batch[:, 40:], [3, 5], memory)
    whole, _ = feed(session, batch, [8] * 6)
    fresh, _ = feed(session, batch[1:, 40:], [8])
    assert np.abs(restarted[0] - whole[0, 40:]).max() < 1e-5
    assert np.abs(restarted[1] - fresh[0]).max() < 1e-5
    assert np.abs(fresh[0] - whole[1, 40:]).max() > 1e-2  # the past would have shown


def test_rows_are_independent_and_may_be_at_different_positions(session: Session, tokens: np.ndarray) -> None:
    batch = rows(tokens, 3, 30)
    memory = session.start(3)
    memory.positions[:] = [0, -7, -22]  # rows 1 and 2 begin with padding
    together, _ = feed(session, batch, [8, 8, 8, 6], memory)
    for row, padding in ((0, 0), (1, 7), (2, 22)):
        length = 30 - padding
        alone, _ = feed(session, batch[row : row + 1, padding:], [1] * length)
        assert np.abs(together[row, padding:] - alone[0]).max() < 1e-5


def test_a_copy_of_the_memory_is_an_independent_fork(session: Session, tokens: np.ndarray) -> None:
    batch = rows(tokens, 1, 40)
    _, memory = feed(session, batch[:, :24], [8, 8, 8])
    fork = memory.copy()
    first, _ = feed(session, batch[:, 24:], [8, 8], memory)
    feed(session, batch[:, :8], [8], memory)
    second, _ = feed(session, batch[:, 24:], [8, 8], fork)
    assert np.array_equal(first, second)


def test_memory_reaches_exactly_its_length(session: Session, tokens: np.ndarray) -> None:
    """Two layers see at most 2 M back: a change of token 0 is felt at 2 M and not after it."""
    reach = 2 * session.rule.mem_len
    stream = rows(tokens, 1, reach + 2)
    changed = stream.copy()
    changed[0, 0] = (stream[0, 0] + 1) % session.vocab.size
    # Each alone: on some processors the rows of one product are rounded differently.
    scores, others = (feed(session, each, [1] * (reach + 2))[0][0] for each in (stream, changed))
    differences = np.abs(scores - others).max(axis=-1)
    assert differences[reach] > 1e-9
    assert differences[reach + 1] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: (np.zeros((2, 4), np.int64), s.start(3)), "2 rows and the memory holds 3"),
        (lambda s: (np.zeros((1, 9), np.int64), s.start(1)), "9 tokens; this artefact takes 1 to 8"),
        (lambda s: (np.zeros((1, 0), np.int64), s.start(1)), "0 tokens"),
        (lambda s: (np.zeros(4, np.int64), s.start(1)), "expected integers"),
        (lambda s: (np.zeros((1, 4), np.float32), s.start(1)), "expected integers"),
        (lambda s: (np.full((1, 4), -1), s.start(1)), "token -1 is outside"),
        (lambda s: (np.full((1, 4), s.vocab.size), s.start(1)), "is outside the vocabulary"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_memory_unchanged(session: Session, make, message: str) -> None:
    given, memory = make(session)
    before = memory.copy()
    with pytest.raises(StreamError, match=message):
        session.step(given, memory)
    assert np.array_equal(memory.positions, before.positions)
    assert all(np.array_equal(memory.tensors[name], array) for name, array in before.tensors.items())


def test_memory_of_another_session_is_refused(session: Session, folders: dict[str, Path]) -> None:
    for kind in KINDS:
        other = open_session(folders[kind])
        if other.identity != session.identity:
            with pytest.raises(StreamError, match="the memory belongs to"):
                session.step(np.zeros((1, 1), np.int64), other.start(1))


@pytest.mark.parametrize("batch", [0, -1, 1 << 20])
def test_an_impossible_batch_is_refused(session: Session, batch: int) -> None:
    with pytest.raises(StreamError, match="batch is"):
        session.start(batch)


def test_a_batch_beyond_this_machine_is_refused_before_anything_is_allocated(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtimes.base.machine.memory_bytes", lambda: 10_000)
    with pytest.raises(
        StreamError, match=r"the memory of 9 streams takes about \d+ GiB .* use a smaller batch"
    ):
        session.start(9)


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: setattr(m, "positions", [0]),
        lambda m: setattr(m, "positions", np.zeros(1)),
        lambda m: setattr(m, "positions", np.zeros(2, np.int64)),
        lambda m: setattr(m, "positions", np.full(1, -(2**63))),
        lambda m: m.tensors.popitem(),
        lambda m: m.tensors.update({next(iter(m.tensors)): np.zeros(3, np.float32)}),
        lambda m: m.tensors.update(
            {name: np.asarray(array, np.float64) for name, array in m.tensors.items()}
        ),
    ],
)
def test_memory_that_was_tampered_with_is_refused(session: Session, damage) -> None:
    memory = session.start(1)
    session.step(np.zeros((1, 2), np.int64), memory)
    damage(memory)
    with pytest.raises(StreamError, match="the memory's"):
        session.step(np.zeros((1, 2), np.int64), memory)


def test_memory_survives_deepcopy_and_pickle(session: Session, tokens: np.ndarray) -> None:
    _, memory = feed(session, rows(tokens, 1, 24), [8, 8, 8])
    others = copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))
    expected, _ = session.step(tokens[None, 24:30], memory)
    for other in others:
        assert np.array_equal(session.step(tokens[None, 24:30], other)[0], expected)
