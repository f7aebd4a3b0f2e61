"""The contract of every kind of session: one matrix of schedules, and one table of refusals."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from runtimes import Memory, Session, open_session
from runtimes.base.errors import ArtefactError, StreamError
from runtimes.contract.checks import check_memory, owner_of
from runtimes.contract.engine import Profile
from runtimes.contract.precision import MemoryPrecision
from runtimes.contract.rule import MemoryRule
from runtimes.contract.saved_streams import load_memory, save_memory
from runtimes.contract.spec import FUSED, Storage, load_spec
from runtimes.sessions import fused_cpu
from runtimes.sessions.graph import GraphSession
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.sessions.open import describe
from runtimes.tasks.describe import summary_lines
from tests import fake_gpu, host_gpu
from tests.architectures import ARCHITECTURES
from tests.schedule import DENSE, MOST_ROWS, Schedule
from tests.session_kinds import COMPUTED_BY, KINDS, folders_of_kinds
from tests.streams import feed, rows
from trainer.run.checkpoint import load_run
from trainer.run.session import ProjectedTorchSession
from xl_export.artefact.export import export

Make = Callable[..., Path]


@pytest.fixture(params=[*KINDS, "projected"])
def session(
    request: pytest.FixtureRequest, run: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Session:
    fake_gpu.install(monkeypatch)
    if request.param == "device":
        host_gpu.install(monkeypatch)
    if request.param == "projected":  # PyTorch with keys and values as its memory; no folder is opened so
        return projected(run)
    return open_session(folders[request.param], device="cuda" if request.param == "device" else "auto")


@pytest.fixture(scope="module")
def folders(
    run: Path, artefacts: dict[str, Path], cut_ring: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    made = {"torch": run, "cut-ring": cut_ring, **artefacts}
    return folders_of_kinds(made, tmp_path_factory.mktemp("kinds"))


def test_what_computes_a_step_is_named(session: Session, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["session"]
    assert session.computed_by == COMPUTED_BY["torch" if kind == "projected" else kind]
    kernels = {"ring": "standard", "shift": "standard", "hidden": "standard", "device": "cuda"}
    assert session.kernel == kernels.get(kind.removeprefix("cut-"))
    assert (session.spec is None) == (session.computed_by == "PyTorch")
    if session.spec is not None:
        assert session.spec.rule == session.rule
        assert session.spec.state == session.state


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_described_as_its_session_is(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    session, facts = open_session(folders[kind]), describe(folders[kind])
    assert facts["identity"] == session.identity
    assert facts["computed_by"] == session.computed_by
    assert facts["rule"] == dataclasses.asdict(session.rule)
    assert facts["model"]["vocab_size"] == session.vocab.size
    kinds = {"torch": "run", "engine": "engine", "ring-engine": "engine"}
    assert facts["kind"] == kinds.get(kind, "artefact")
    lines = summary_lines(facts, folders[kind])
    assert f"computed by {session.computed_by}" in "\n".join(lines)
    assert (f"identity    {session.identity}" in lines) == (kind != "torch")


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_expected_identity_is_opened(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    identity = describe(folders[kind])["identity"]
    assert open_session(folders[kind], expected_identity=identity).identity == identity
    with pytest.raises(ArtefactError, match=f"{identity}, expected {identity[::-1]}; "):
        open_session(folders[kind], expected_identity=identity[::-1])


def test_another_rule_gives_another_session_or_is_refused(session: Session, tokens: np.ndarray) -> None:
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


def test_a_saved_stream_continues_on_every_session_with_its_memory(
    folders: dict[str, Path], tokens: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    host_gpu.install(monkeypatch)
    sessions = {
        kind: open_session(folders[kind], device="cuda" if kind == "device" else "auto") for kind in KINDS
    }
    layouts: dict[str, list[str]] = {}
    for kind, session in sessions.items():
        layouts.setdefault(session.memory_identity.layout, []).append(kind)
    assert list(map(len, layouts.values())) == [2, 4, 2]  # hidden, ring and shift
    batch = rows(tokens, 2, 48)
    for kinds in layouts.values():
        for begun, continued in itertools.permutations(kinds, 2):
            _, memory = feed(sessions[begun], batch[:, :40], [8] * 5)
            expected, _ = sessions[begun].step(batch[:, 40:], memory.copy())
            save_memory(memory, tmp_path / "stream")
            loaded = load_memory(tmp_path / "stream", sessions[continued])
            logits, _ = sessions[continued].step(batch[:, 40:], loaded)
            assert np.abs(logits - expected).max() < 1e-4, (begun, continued)


def test_a_step_needs_the_bytes_of_memory_and_logits(session: Session) -> None:
    memory = sum(np.asarray(array).nbytes for array in session.start(1).tensors.values())
    one, two = (session.step_bytes(segment=segment) for segment in (1, 2))
    assert one >= memory + 4 * session.vocab.size
    assert two >= one + 4 * session.vocab.size


def test_the_hook_runs_in_each_step_before_the_memory_moves(session: Session, tokens: np.ndarray) -> None:
    batch, memory = rows(tokens, 2, 8), session.start(2)
    seen: list[int] = []
    session.before_run = lambda: seen.append(int(memory.positions[0]))
    session.step(batch[:, :4], memory)
    session.predict(batch[:, 4:6], memory)
    session.score(batch[:, 6:7], batch[:, 7:8], memory)
    assert sorted(set(seen)) == [0, 4, 6]
    count = len(seen)
    with pytest.raises(StreamError):
        session.predict(np.full_like(batch[:, :1], session.vocab.size), memory)
    assert len(seen) == count


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


# The table of refusals: what is given to a session with a memory of two rows, and what the sentence names.

ZEROS = np.zeros((2, 4), np.int64)


def each_verb(tokens: Any, **options: Any) -> Iterator[Callable[[Session, Memory], Any]]:
    """The three verbs with these tokens."""
    targets = np.full(np.shape(tokens), -1)
    yield lambda session, memory: session.step(tokens, memory, **options)
    yield lambda session, memory: session.predict(tokens, memory, **options)
    yield lambda session, memory: session.score(tokens, targets, memory, **options)


TOKENS: list[Any] = [
    *(np.zeros(shape, np.int64) for shape in ((3, 4), (2, 9), (2, 0), 4)),
    np.zeros((2, 4), np.float32),
    np.full((2, 4), -1),
    np.full((2, 4), 999),
]
LENGTHS: list[Any] = [[1, 2, 3], [[1, 2]], [[1], [1, 2]], 2, [1.0, 2.0], [True, False], [0, 5], [-1, 4]]
TARGETS = [np.zeros((2, 3), np.int64), np.zeros((2, 4)), np.full((2, 4), -2), np.full((2, 4), 999)]


def takes_lengths(session: Session) -> bool:
    return session.spec is None or session.spec.form == "ring"


def refused(session: Session, memory: Memory, use: Callable[[Session, Memory], Any], words: str) -> None:
    """A use of a memory is refused in one sentence, and changes nothing."""
    before = memory.copy()
    with pytest.raises(StreamError, match=words) as caught:
        use(session, memory)
    assert "\n" not in str(caught.value)
    assert np.array_equal(memory.positions, before.positions)
    assert all(np.array_equal(memory.tensors[name], array) for name, array in before.tensors.items())
    with memory.in_use():  # it is not left locked
        pass


def test_tokens_lengths_and_targets_that_do_not_fit_are_refused(session: Session) -> None:
    memory = session.start(2)
    session.step(ZEROS, memory)
    for given in TOKENS:
        for use in each_verb(given):
            refused(session, memory, use, "token")
    for given in ([[1, 2], [3]], {"ids": ZEROS}):
        refused(session, memory, lambda s, m, given=given: s.step(given, m), "tokens|input_ids")
    for given in LENGTHS:
        for use in each_verb(ZEROS, lengths=given):
            refused(session, memory, use, "length")
    for given in TARGETS:
        refused(session, memory, lambda s, m, given=given: s.score(ZEROS, given, m), "target")
    padded: Any = [4, 2]  # and a target after the padding begins
    refused(session, memory, lambda s, m: s.score(ZEROS, ZEROS, m, lengths=padded), "row 1.*length 2")
    by_row = takes_lengths(session)
    if by_row:
        session.predict(ZEROS, memory, lengths=[4, 0])  # type: ignore[arg-type]
        session.predict(ZEROS, memory, lengths=np.array([1, 3], np.uint8))
        session.predict(ZEROS, memory, lengths=[4, 4])  # type: ignore[arg-type]
        assert memory.positions.tolist() == [13, 11]


def test_an_impossible_batch_is_refused(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in (0, -1, 1 << 20, "two", 1.5, [1], None):
        with pytest.raises(StreamError, match=r"batch is .*; expected a whole number from 1 to"):
            session.start(batch)  # type: ignore[arg-type]
    assert session.start(np.int64(2)).batch == 2  # type: ignore[arg-type]
    monkeypatch.setattr("runtimes.base.machine.memory_bytes", lambda: 10_000)
    with pytest.raises(StreamError, match=r"the memory of 9 streams takes about \d+ GiB .* smaller batch"):
        session.start(9)


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def mapped(array: np.ndarray) -> np.ndarray:
    """A read-only map of a file, which ends the process that writes to it."""
    path = Path(os.environ["PYTEST_MAP"])
    array.tofile(path)
    return np.memmap(path, array.dtype, mode="r", shape=array.shape)


def misaligned(array: np.ndarray) -> np.ndarray:
    room = np.zeros(array.nbytes + 1, np.uint8)
    return room[1:].view(array.dtype).reshape(array.shape)


ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "read-only": read_only,
    "a map": mapped,
    "misaligned": misaligned,
    "a view": lambda array: np.concatenate([array, array])[: len(array)],
    "other bytes first": lambda array: array.astype(array.dtype.newbyteorder()),
    "wider": lambda array: array.astype(np.float64 if array.dtype.kind == "f" else np.float32),
    "a list": lambda array: array.tolist(),
    "fewer rows": lambda array: array[:-1].copy(),
    "nothing": lambda array: None,
}
SHAPES: dict[str, Callable[[np.ndarray], Any]] = {  # of tensors alone
    "columns first": np.asfortranarray,
    "shorter": lambda array: array[..., :-1].copy(),
}


def test_memory_that_was_tampered_with_is_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_MAP", str(tmp_path / "map"))
    memory = session.start(2)
    session.step(ZEROS, memory)
    memory = memory.copy()  # of arrays, on a device too
    name, tensors, positions = session.state[-1].name, dict(memory.tensors), memory.positions

    def refuses(words: str) -> None:
        for use in each_verb(ZEROS):
            with pytest.raises(StreamError, match=words) as caught:
                use(session, memory)
            assert "\n" not in str(caught.value)
        memory.tensors.clear()
        memory.tensors.update(tensors)
        memory.positions = positions

    for spoil in (ARRAYS | SHAPES).values():
        memory.tensors[name] = spoil(memory.tensors[name])
        refuses(f"the memory's array {name} is")
    for spoil in ARRAYS.values():
        if spoil is not ARRAYS["fewer rows"]:
            memory.positions = spoil(memory.positions)
            refuses("the memory's (positions are not|array positions is)")
    memory.positions = np.full(2, -(2**63))
    refuses("positions are beyond")
    memory.tensors.popitem()
    refuses("do not have the names of this session")
    memory.owner = memory.owner._replace(artefact="another")
    refuses("the memory belongs to artefact another")
    for given in (None, "memory", {"positions": 1}, np.zeros(3)):
        for use in each_verb(ZEROS):
            with pytest.raises(StreamError, match=r"the memory is of type \w+; use memory from start\(\)"):
                use(session, given)  # type: ignore[arg-type]
    memory.owner = owner_of(session)
    session.step(ZEROS, memory)
    check_memory(session, memory)


def test_memory_in_use_is_not_stepped_copied_or_saved(session: Session) -> None:
    memory = session.start(2)
    uses = [*each_verb(ZEROS), lambda s, m: m.copy(), lambda s, m: m.select([0])]
    uses += [lambda s, m: m.join(s.start(1)), lambda s, m: s.start(1).join(m)]
    uses += [lambda s, m: m.replace([0], s.start(1)), lambda s, m: s.start(2).replace([0, 1], m)]
    with memory.in_use():
        for use in uses:
            with pytest.raises(StreamError, match="another thread is using this memory"):
                use(session, memory)
    for use in uses:
        use(session, memory)
    assert memory.positions.tolist() == [0, 12]


def test_a_session_that_keeps_memory_on_a_device_refuses_parts(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    host_gpu.install(monkeypatch)
    for session in (open_session(folders["engine"]), host_gpu.opened(folders["ring"])):
        memory, token = session.start(2), np.zeros((1, 1), np.int64)
        with pytest.raises(StreamError, match="this session keeps memory on a device"):
            session.step(token, memory.part(1, 2))
        session.step(np.zeros((2, 1), np.int64), memory)
        with pytest.raises(StreamError, match="the memory is on a device"):
            memory.part(0, 1)
        assert memory.positions.tolist() == [1, 1]


def test_padding_never_reaches_a_graph(artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(artefacts["ring"])
    fed, right = [], session.run  # type: ignore[attr-defined]
    assert isinstance(session, GraphSession)

    def run(inputs: dict[str, np.ndarray], *others: Any) -> None:
        fed.append(inputs["input_ids"].tolist())
        right(inputs, *others)

    lengths, memory = np.array([4, 2, 0]), session.start(3)
    monkeypatch.setattr(session, "run", run)
    session.predict(np.array([[5, 6, 7, 8], [5, 6, 9, 9], [9, 9, 9, 9]]), memory, lengths=lengths)
    assert fed == [[[5, 6, 7, 8], [5, 6, 6, 6], [0, 0, 0, 0]]]


# The matrix: model × session × operation, and precision × memory precision × storage × kernel × operation.

# In addition to the architectures: each mask with each initial memory, a memory shorter than a segment, none.
RULES: dict[str, dict[str, Any]] = {
    "full-zeros-pre-norm": {
        "rule": MemoryRule(mem_len=10, segment=7, mask="full", initial_memory="zeros"),
        "pre_norm": True,
    },
    "zeros-pre-norm": {"rule": MemoryRule(mem_len=10, segment=7, initial_memory="zeros"), "pre_norm": True},
    "full": {"rule": MemoryRule(mem_len=10, segment=7, mask="full")},
    "short-memory": {"rule": MemoryRule(mem_len=3, segment=8, clamp_len=2)},
    "no-memory": {"rule": MemoryRule(mem_len=0, segment=6)},
}
MODELS = ARCHITECTURES | RULES
FROM_END = [name for name, sizes in MODELS.items() if sizes.get("from_segment_end")]
# What is exported for a side: None for the run itself. A row of the matrix is a model and a side.
SIDES: dict[str, dict[str, Any] | None] = {
    "ring": {},  # with both kernels
    "torch": None,
    "shift": {"memory": "shift"},
    "ring-device": {},
    "cut-ring": {"target": "tensorrt", "precision": "fp32"},
    "projected": None,
    "hidden": {"memory": "hidden"},
    "ring-engine": {"target": "tensorrt", "precision": "fp32", "attention": "native"},
    "shift-device": {"memory": "shift"},
    "plugin-engine": {"target": "tensorrt", "precision": "fp32"},
    "shift-engine": {"target": "tensorrt", "precision": "fp32", "memory": "shift", "attention": "native"},
}


@pytest.fixture(scope="session")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The library of the fused operator; None without a compiler."""
    if shutil.which("g++") is None:
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("operator")))
        return fused_cpu.build()


def on_the_cpu(artefact: Path, operator: Path | None, monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """A session with each kernel; a memory may pass between them."""
    sessions: list[Session] = [OrtSession.open(artefact, kernel="standard")]
    if operator and FUSED in load_spec(artefact).files:
        with monkeypatch.context() as patch:
            patch.setattr(fused_cpu, "built", lambda: operator)
            sessions.append(OrtSession.open(artefact, kernel="fused"))
    return sessions


def projected(run: Path) -> Session:
    trained = load_run(run)
    rule = trained.config.evaluation
    return ProjectedTorchSession(trained.model.eval(), trained.vocab, rule, weights=trained.sha256)


def opened(
    side: str, run: Path, operator: Path | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Session]:
    """The sessions of a side, which have one identity."""
    options = SIDES[side]
    if options is None:
        return [projected(run) if side == "projected" else open_session(run)]
    artefact = export(run, folder / "artefact", **options)
    if side.endswith("device"):
        return [host_gpu.opened(artefact)]
    if side.endswith("engine"):
        attention = options.get("attention", "plugin")
        longest = load_spec(artefact).rule.segment
        profiles = [
            Profile(name=name, batch=(1, MOST_ROWS, MOST_ROWS), tokens=(1, tokens, tokens))
            for name, tokens in (("segment", longest), ("token", 1))
        ]
        made = fake_gpu.make_engine(
            artefact, folder / "engine", attention=attention, profiles=tuple(profiles)
        )
        return [open_session(made)]
    sessions = on_the_cpu(artefact, operator, monkeypatch)
    assert side != "ring" or len(sessions) == 2 or operator is None  # the fused operator serves every model
    return sessions


# By default every model with one side.
PAIRS = [
    pytest.param(model, side, marks=() if at == m % len(SIDES) else pytest.mark.slow)
    for m, model in enumerate(MODELS)
    for at, side in enumerate(SIDES)
    if model != "adaptive-span-gated-full" or "target" not in (SIDES[side] or {})  # engines lack its epsilon
]


@pytest.mark.parametrize(("model", "side"), PAIRS)
def test_each_row_gets_what_its_text_gets_alone(
    model: str,
    side: str,
    make_run: Make,
    operator: Path | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_gpu.install(monkeypatch)
    host_gpu.install(monkeypatch)
    run = make_run(**MODELS[model])
    sessions = opened(side, run, operator, tmp_path, monkeypatch)
    by_row = takes_lengths(sessions[0])
    if by_row and sessions[0].spec:
        by_row = model not in FROM_END
    assert sessions[0].pads_right == (model not in FROM_END)
    if not by_row:
        refuses_lengths(sessions[0])
    schedule = Schedule(sessions, open_session(run, device="cpu"), random.Random(0), tmp_path, by_row=by_row)
    schedule.pads = side == "plugin-engine"
    schedule.run([*DENSE, *schedule.choose(6)])


@pytest.mark.parametrize("side", ["shift", "hidden", "torch", "projected", "shift-device", "shift-engine"])
def test_an_overflow_that_no_answer_shows_ends_with_its_text(
    side: str,
    make_run: Make,
    tmp_path: Path,
    tokens: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_gpu.install(monkeypatch)
    host_gpu.install(monkeypatch)
    session = opened(side, make_run(), None, tmp_path, monkeypatch)[0]
    text = tokens[None, :4].repeat(2, axis=0)
    expected, _ = session.step(text, session.start(2))
    memory = session.start(2)
    session.step(text, memory)
    for name, array in memory.tensors.items():  # a value beyond float16, say, with the weight 0
        memory.tensors[name] = spoiled = np.array(array)
        spoiled[0] = np.inf
    memory.positions[0] = 0
    answers, _ = session.step(text, memory)
    assert np.abs(answers[0] - expected[0]).max() < 1e-4


def refuses_lengths(session: Session) -> None:
    memory = session.start(2)
    for use in (session.step, session.predict):
        with pytest.raises(StreamError, match="leave lengths out"):
            use(np.zeros((2, 3), np.int64), memory, lengths=np.array([3, 1]))
    assert memory.positions.tolist() == [0, 0]
    assert not any(np.asarray(array).any() for array in memory.tensors.values())


FEW_BITS = ("fp32", "fp16", "int8-stored", "int8", "int4")
# Every value of each by default.
PRESETS = [
    pytest.param(precision, memory, storage, marks=() if m == p % 3 and s == 2 * p % 3 else pytest.mark.slow)
    for (p, precision), (m, memory), (s, storage) in itertools.product(
        enumerate(FEW_BITS), enumerate(get_args(MemoryPrecision)), enumerate(get_args(Storage))
    )
    if (precision, storage) != ("int8-stored", "ort")
]


@pytest.mark.parametrize(("precision", "memory", "storage"), PRESETS)
def test_each_preset_keeps_rows_independent(
    precision: str,
    memory: str,
    storage: str,
    make_run: Make,
    operator: Path | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference is the artefact itself, a row at a time; other tests compare it with PyTorch."""
    run = make_run(d_model=48, heads=2, head_dim=20, d_ff=64)
    options: dict[str, Any] = {"precision": precision, "memory_precision": memory, "storage": storage}
    artefact = export(run, tmp_path / "artefact", **options)
    sessions = on_the_cpu(artefact, operator, monkeypatch)
    # A number on the edge between two halves or bytes may go either way.
    tolerance = 1e-4 if (precision, memory) == ("fp32", "fp32") else 1e-2
    groups = [sessions]
    if precision in ("int8", "int4"):  # the standard operators round activations, and the fused ones do not
        groups = [[session] for session in sessions]
    for alike in groups:
        Schedule(alike, alike[0], random.Random(0), tmp_path, tolerance=tolerance).run(DENSE)
