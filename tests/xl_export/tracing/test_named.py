"""Steps that are no language model: named inputs and outputs, and promises that a module declines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from runtimes import check, evaluate, generate, load_memory, open_session, save_memory, score_texts
from runtimes.base.errors import ArtefactError, StreamError, UserError
from runtimes.cli.info import info_command
from runtimes.contract.precision import MeasuredStep, Precision
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.spec import GRAPH, SPEC, load_spec, read_spec
from runtimes.sessions.artefact import refuse_wrong_answers
from runtimes.sessions.onnx_runtime import OrtSession
from tests import host_gpu
from tests.sealing import sealed
from tests.steps import observed
from tests.xl_export.tracing import modules
from tests.xl_export.tracing.modules import RULE, M, T
from xl_export import features, trace
from xl_export.tracing.module import ModuleStep

pytestmark = pytest.mark.usefixtures("fast_traces")
Inputs = dict[str, np.ndarray]
# The type of the matrices of each precision.
STORED = {
    "fp16": onnx.TensorProto.FLOAT16,
    "int8-stored": onnx.TensorProto.INT8,
    "int8": onnx.TensorProto.UINT8,
    "int4": onnx.TensorProto.UINT8,
}


class Both(modules.WholeSegments, modules.MixedRows):
    """Answers depend on the cuts and on the other rows, and streams do not start with zeros."""

    def start(self, batch: int) -> list[torch.Tensor]:
        return [torch.linspace(-1, 1, M * modules.D).view(1, M, modules.D).repeat(batch, 1, 1)]


@pytest.fixture(scope="module")
def frames(module_artefact: Callable[[str], Path]) -> Path:
    return module_artefact("frames")


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`Both` without the promises that it breaks."""
    folder = tmp_path_factory.mktemp("named") / "segments"
    return trace(Both(), folder, rule=RULE, without={"padding", "cuts", "rows"})


def part(inputs: Inputs, first: int, last: int) -> Inputs:
    return {name: x if name == "goal" else x[:, first:last] for name, x in inputs.items()}


def by_hand(module: Any, inputs: Inputs, lengths: list[int]) -> dict[str, np.ndarray]:
    """The outputs of a module that is fed as its author would do it."""
    memory = module.start(len(next(iter(inputs.values()))))
    pieces: dict[str, list[np.ndarray]] = {}
    at = 0
    for length in lengths:
        fed = {name: torch.from_numpy(x) for name, x in part(inputs, at, at + length).items()}
        positions = torch.arange(at, at + length).expand(len(inputs["goal"]), -1)
        with torch.no_grad():
            outputs, memory = module.step(fed, positions, memory)
        for name, output in outputs.items():
            pieces.setdefault(name, []).append(output.numpy())
        at += length
    return {name: np.concatenate(parts, axis=1) for name, parts in pieces.items() if name != "features"}


def run(session: Session, inputs: Inputs, memory: Any, lengths: list[int]) -> dict[str, np.ndarray]:
    pieces: dict[str, list[np.ndarray]] = {}
    at = 0
    for length in lengths:
        outputs, memory = session.step(part(inputs, at, at + length), memory)
        for name, output in outputs.items():
            pieces.setdefault(name, []).append(output)
        at += length
    return {name: np.concatenate(parts, axis=1) for name, parts in pieces.items() if name != "features"}


def same(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    assert mine.keys() == theirs.keys()
    return all(np.abs(mine[name] - theirs[name]).max() < 1e-5 for name in mine)


def test_a_step_with_named_tensors_agrees_with_its_module(policy: Path) -> None:
    assert check(policy).passed
    session = open_session(policy)
    inputs = observed(2, 50)
    right = by_hand(modules.Policy(), inputs, [T] * 12 + [2])
    assert same(run(session, inputs, session.start(2), [3, 1] * 12 + [2]), right)
    outputs, _ = session.step(part(inputs, 0, T), session.start(2))
    assert {name: (x.shape, x.dtype.name) for name, x in outputs.items()} == {
        "action": ((2, T, 3), "float32"),
        "worth": ((2, T), "float32"),
        "features": ((2, modules.D), "float32"),
        "best": ((2, T), "int64"),
    }


def test_a_step_that_repeats_is_checked_as_the_first_was(policy: Path) -> None:
    session, memory, inputs = open_session(policy), open_session(policy).start(1), observed(1, 4)
    for at in range(3):
        session.step(part(inputs, at, at + 1), memory)
    right = part(inputs, 3, 4)
    for name, wrong in (
        ("previous", np.array([[3]])),
        ("previous", np.array([[0.0]])),
        ("observation", np.zeros((1, 1, 4))),
        ("observation", np.full_like(right["observation"], np.inf)),
        ("observation", None),
    ):
        with pytest.raises(StreamError, match=name):
            session.step(right | {name: wrong}, memory)
    with pytest.raises(StreamError, match="the inputs are"):
        session.step(right | {"other": right["goal"]}, memory)
    outputs, _ = session.step(right, memory)
    whole, _ = session.step(inputs, session.start(1))
    assert np.abs(outputs["action"] - whole["action"][:, 3:]).max() < 1e-5
    memory.positions[0] = -1
    with pytest.raises(StreamError, match="does not keep the promise `padding`"):
        session.step(right, memory)


def test_a_device_gives_the_cpus_answers_and_is_tried_first(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_gpu.install(monkeypatch)
    device = host_gpu.opened(policy)
    cpu = open_session(policy)
    inputs = observed(2, 30)
    lengths = [T, 1, 1, 1, 1, 2] * 3
    mine = run(device, inputs, device.start(2), lengths)
    assert same(mine, run(cpu, inputs, cpu.start(2), lengths))
    refuse_wrong_answers(device, policy, load_spec(policy))
    monkeypatch.setattr(device, "run", lambda inputs, outputs, memory: outputs["worth"].fill(9))
    with pytest.raises(ArtefactError, match=r"differs from the reference by .*"):
        refuse_wrong_answers(device, policy, load_spec(policy))


@pytest.mark.parametrize("name", ["signs", "bounded"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_row_restarts_clean_although_no_output_shows_its_overflow(
    name: str,
    device: str,
    module_artefact: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    host_gpu.install(monkeypatch)
    session = open_session(module_artefact(name), device=device, threads=1)
    clean = np.random.default_rng(0).standard_normal((2, T, 4), np.float32)
    large = clean.copy()
    large[0] = 3e38
    expected = session.step({"input": clean}, session.start(2))[0]
    memory = session.start(2)
    for _ in range(2):  # the second step fills the arrays of the first
        memory.positions[:] = 0
        session.step({"input": large}, memory)
    assert not np.isfinite(np.asarray(next(iter(memory.tensors.values())))[0]).all()
    memory.positions[0] = 0
    save_memory(memory, tmp_path / "streams")
    for restarted in (load_memory(tmp_path / "streams", session), memory.copy(), memory):
        outputs, _ = session.step({"input": clean}, restarted)
        assert all(np.array_equal(outputs[key][0], array[0]) for key, array in expected.items())
        assert restarted.positions.tolist() == [T, 2 * T]


def test_one_input_and_one_output_may_be_passed_bare(frames: Path) -> None:
    assert check(frames).passed
    session = open_session(frames)
    images = np.random.default_rng(0).standard_normal((1, 3, 2, 4, 4), np.float32)
    bare, memory = session.step(images, session.start(1))
    named, _ = session.step({"input": images}, session.start(1))
    assert bare.shape == (1, 3, modules.D)
    assert np.array_equal(bare, named["output"])
    assert memory.positions.tolist() == [3]


def test_a_memory_may_start_with_other_values_than_zero(segments: Path) -> None:
    session = open_session(segments)
    memory = session.start(1)
    inputs = observed(1, T)
    right = by_hand(Both().eval(), inputs, [T])
    for _ in range(2):
        memory.positions[:] = 0
        assert same(run(session, inputs, memory, [T]), right)


def test_info_lists_inputs_outputs_and_promises(policy: Path) -> None:
    text = CliRunner().invoke(info_command, [str(policy)], catch_exceptions=False).output
    for line in (
        "no language model",
        "reads       observation: float32 [batch, tokens, 5]",
        "reads       previous: 3 ids [batch, tokens]",
        "returns     features: float32 [batch, 8]",
        "no promise  padding: that tokens at negative positions leave no trace",
    ):
        assert line in text
    facts = json.loads(CliRunner().invoke(info_command, [str(policy), "--json"]).output.splitlines()[-1])
    assert (facts["vocabulary"], facts["without"]) == (None, ["padding"])


def test_what_needs_a_language_model_says_so(policy: Path) -> None:
    session = open_session(policy)
    tokens = np.zeros((1, 2), np.int64)
    uses = (
        lambda: list(generate(session, "a", max_tokens=1)),
        lambda: evaluate(session, tokens[0]),
        lambda: list(score_texts(session, ["a"])),
        lambda: session.predict(tokens, session.start(1)),
        lambda: session.score(tokens, tokens, session.start(1)),
    )
    for use in uses:
        with pytest.raises(
            UserError, match="no language model: its step reads observation, previous and goal"
        ):
            use()


WRONG: list[tuple[Any, str]] = [
    (np.zeros((1, 2, 5), np.float32), r"reads .* give a dict with an array for each input"),
    ({"observation": np.zeros((1, 2, 5))}, r"the inputs are \['observation'\]; expected a dict"),
    (
        observed(1, 2) | {"observation": np.zeros((1, 2, 6))},
        r"observation is .*\[1, 2, 6\]; expected .*\[1, tokens, 5\]",
    ),
    (observed(1, 2) | {"previous": np.zeros((1, 3), int)}, r"previous is .*\[1, 3\]; expected .*\[1, 2\]"),
    (observed(1, 2) | {"previous": np.full((1, 2), 3)}, "previous has the id 3; expected 0 to 2"),
    (observed(1, 2) | {"goal": np.array([[0, np.nan]])}, "goal has a number that is not finite in float32"),
    (observed(1, T + 1), "the segment has 5 tokens"),
]


def test_inputs_that_do_not_fit_leave_the_memory_alone(policy: Path) -> None:
    session = open_session(policy)
    memory = session.start(1)
    for _ in range(2):  # the second time, the step fills kept arrays
        before = memory.copy()
        for inputs, message in WRONG:
            with pytest.raises(UserError, match=message):
                session.step(inputs, memory)
        with pytest.raises(UserError, match="only the step of a language model takes them"):
            session.step(observed(1, 2), memory, lengths=np.array([1]))
        assert np.array_equal(memory.positions, before.positions)
        assert all(np.array_equal(memory.tensors[name], x) for name, x in before.tensors.items())
        for _ in range(2):
            session.step(observed(1, 2), memory)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [(modules.WholeSegments, "cuts"), (modules.MixedRows, "rows")],
)
def test_a_broken_promise_names_the_argument_that_declines_it(
    kind: type[nn.Module], promise: str, tmp_path: Path
) -> None:
    others = {"padding", "cuts", "rows"} - {promise}
    with pytest.raises(UserError, match=rf"gives other answers .*without=\{{.*\"{promise}\".*\}}"):
        trace(kind(), tmp_path / "artefact", rule=RULE, without=others)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_one_error_names_all_broken_promises(tmp_path: Path) -> None:
    message = (
        r"at position \d+ beside texts .*; .* after padding .*; .* token by token.*; "
        r'or trace it without these promises: without=\{"rows", "padding", "cuts"\}'
    )
    with pytest.raises(UserError, match=message):
        trace(Both(), tmp_path / "artefact", rule=RULE)


def test_a_table_with_a_row_for_each_position_is_refused(tmp_path: Path) -> None:
    class Table(modules.Frames):
        def step(self, inputs: Any, positions: Any, memory: Any) -> Any:
            return super().step(inputs + torch.zeros(99)[positions][..., None, None, None], positions, memory)

    with pytest.raises(UserError, match=r"works at position 0 and not at position 8,589,934,592 .*a table"):
        trace(Table(), tmp_path / "artefact", rule=RULE)


def test_a_step_that_relies_on_a_declined_promise_is_refused(segments: Path) -> None:
    assert load_spec(segments).without == ("rows", "padding", "cuts")
    assert check(segments).passed
    session = open_session(segments)
    inputs = observed(1, 3 * T)
    with pytest.raises(UserError, match="does not keep the promise `rows`"):
        session.step(observed(2, T), session.start(2))
    memory = session.start(1)
    memory.positions[0] = -2
    with pytest.raises(UserError, match="does not keep the promise `padding`"):
        session.step(part(inputs, 0, T), memory)
    memory.positions[0] = 0
    for _ in range(2):
        session.step(part(inputs, 0, T), memory)
    session.step(part(inputs, 0, 1), memory)
    with pytest.raises(UserError, match=f"`cuts`.*a step begins at a multiple of {T} tokens"):
        session.step(part(inputs, 1, 2), memory)


def test_a_graph_may_have_fixed_sizes(module_artefact: Callable[[str], Path], tmp_path: Path) -> None:
    class Static(modules.Policy):
        """Its trace has the number of rows as a constant."""

        def step(self, inputs: Any, positions: Any, memory: Any) -> Any:
            outputs, after = super().step(inputs, positions, memory)
            return outputs | {"action": outputs["action"] + torch.zeros(len(positions), 1, 1)}, after

    rule = MemoryRule(mem_len=M, segment=2)
    with pytest.raises(UserError, match=r"rows is 2, and the rows of MixedRows change each other"):
        trace(modules.MixedRows(), tmp_path / "a", rule=rule, without={"padding", "rows"}, rows=2)
    mixed: Any = modules.MixedRows()
    mixed.step_tokens = 1
    with pytest.raises(
        UserError, match=r"2 tokens of MixedRows at once, .*\(without has `rows`\); give rows=1"
    ):
        trace(mixed, tmp_path / "a", rule=rule, without={"padding", "rows"})
    with pytest.raises(UserError, match=r"test_named.py:\d+, your code\) fixes batch .* to 3.*rows=1"):
        trace(Static(), tmp_path / "a", rule=rule, without={"padding"})
    assert list(tmp_path.iterdir()) == []
    artefact = module_artefact("policy of 2 rows")
    assert check(artefact).passed
    graph = onnx.load(artefact / GRAPH, load_external_data=False).graph
    sizes = [dim for value in (*graph.input, *graph.output) for dim in value.type.tensor_type.shape.dim]
    assert not [dim for dim in sizes if dim.dim_param]
    session = open_session(artefact)
    inputs = observed(2, 5 * T)
    right = by_hand(modules.Policy(), inputs, [T] * 5)
    assert same(run(session, inputs, session.start(2), [T] * 5), right)
    for rows, count in ((1, T), (2, 1)):
        with pytest.raises(UserError, match=f"exported for exactly 2 rows of {T}"):
            session.step(observed(rows, count), session.start(rows))


class ForRows(nn.Module):
    """A step that is written for so many rows, and a loop over its tokens. An input is named as an argument
    of ours."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = rows
        self.inputs = {"method": modules.features(4)}
        self.cell = nn.GRUCell(4, modules.D)

    def start(self, batch: int) -> list[torch.Tensor]:
        return [torch.zeros(self.rows, modules.D)]

    def step(self, inputs: Any, positions: Any, memory: Any) -> Any:
        assert inputs["method"].shape[0] == self.rows
        text = (positions >= 0)[..., None]
        states = [memory[0].view(self.rows, modules.D)]
        for place in range(positions.shape[1]):
            after = self.cell(inputs["method"][:, place], states[-1])
            states.append(torch.where(text[:, place], after, 0.0))
        return {"y": torch.stack(states[1:], 1)}, [states[-1]]


class Pairs(ForRows):
    def step(self, inputs: Any, positions: Any, memory: Any) -> Any:
        assert positions.shape[1] == 2
        return super().step(inputs, positions, memory)


def test_a_step_for_one_row_is_called_with_no_other_number(tmp_path: Path) -> None:
    rule = MemoryRule(mem_len=M, segment=2)
    artefact = trace(ForRows(1), tmp_path / "one", rule=rule, rows=1)
    spec = load_spec(artefact)
    assert (spec.without, spec.fixed_rows) == ((), 1)
    assert spec.signature[1][0].shape == ("batch", "tokens", modules.D)
    assert check(artefact).passed
    with pytest.raises(UserError, match=r"ForRows.start\(1\) has the shape \[2, 8\]; expected 1 rows"):
        trace(ForRows(2), tmp_path / "two", rule=rule, rows=1)
    with pytest.raises(
        UserError, match=r"with method \[1, 1, 4\].*expected it to accept 1 row of any number"
    ):
        trace(Pairs(1), tmp_path / "pairs", rule=rule, rows=1)
    for_two = trace(ForRows(2), tmp_path / "for two", rule=rule, rows=2)
    assert check(for_two).passed
    mixed = trace(modules.MixedRows(), tmp_path / "mixed", rule=rule, without={"padding"}, rows=1)
    assert load_spec(mixed).without == ("padding",)  # a step of one row keeps `rows`


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_step_for_some_rows_computes_others_in_turns(batch: int) -> None:
    step = ModuleStep(ForRows(2), 2)
    x = torch.randn(batch, 3, 4)
    positions = torch.arange(3).expand(batch, -1)
    with torch.no_grad():
        outputs, after = step({"method": x}, positions, step.start(batch))
        for row in range(batch):
            pair = x[row].expand(2, -1, -1)
            one, state = step({"method": pair}, positions[:1].expand(2, -1), step.start(2))
            assert torch.allclose(outputs["y"][row], one["y"][0], atol=1e-6)
            assert torch.allclose(after[0][row], state[0][0], atol=1e-6)
    assert outputs["y"].shape[0] == after[0].shape[0] == batch


def test_a_step_runs_the_largest_graphs_that_fit(
    module_artefact: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artefact = module_artefact("policy of 2 graphs")
    assert load_spec(artefact).token_graphs == {T: GRAPH, 1: "step.1.onnx"}
    assert check(artefact).passed
    session = OrtSession.open(artefact)
    counts: list[int] = []
    session.before_run = lambda: counts.append(T if memory.binding.session is session._sessions[T] else 1)
    inputs = observed(1, 5 * T)
    right = by_hand(modules.Policy(), inputs, [T] * 5)
    memory = session.start(1)
    before = {name: x[:, : 2 * T + 3] for name, x in right.items()}
    assert same(run(session, part(inputs, 0, 2 * T + 3), memory, [T, 1, 1, 3, T - 2]), before)
    assert counts == [T, 1, 1, 1, 1, 1, 1, 1]
    fork = memory.copy()
    save_memory(memory, tmp_path / "stream")
    after = {name: x[:, 2 * T + 3 : 4 * T + 3] for name, x in right.items()}
    for each in (memory, fork, load_memory(tmp_path / "stream", session)):
        assert same(run(session, part(inputs, 2 * T + 3, 4 * T + 3), each, [T, 3, 1]), after)
    memory.positions[0] = 0
    assert same(run(session, inputs, memory, [T] * 5), right)
    with pytest.raises(UserError, match=f"the step has 2 rows of 1 token, .* 1 row of at most {T}"):
        session.step(observed(2, 1), session.start(2))
    host_gpu.install(monkeypatch)
    with pytest.raises(UserError, match="has 2 graphs, and the device cuda runs one"):
        host_gpu.opened(artefact)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": (T,)}, f"tokens is {T} and segment is {T}; expected 1, {T}"),
        ({"rows": 1, "tokens": (2, T)}, f"tokens is 2, {T} and segment is {T}; expected 1, {T}"),
        ({"rows": 1, "tokens": (1, T), "mask": "full"}, "under the mask full the answers depend on the cuts"),
        ({"rows": 1, "tokens": (1, T), "target": "tensorrt"}, "target is tensorrt, which has one graph"),
        ({"rows": 1, "tokens": 2}, "tokens is 2 and segment"),
        ({"rows": 0}, "rows is 0; expected a whole number from 1"),
    ],
)
def test_numbers_of_tokens_that_no_step_could_have_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rule = MemoryRule(mem_len=M, segment=T, mask=options.pop("mask", "same-length"))
    with pytest.raises(UserError, match=message):
        trace(modules.Base(), tmp_path / "a", vocab=modules.VOCAB, rule=rule, **options)


def test_steps_are_not_cut_if_answers_depend_on_the_cuts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the answers of WholeSegments depend on the cuts"):
        trace(
            modules.WholeSegments(),
            tmp_path / "a",
            rule=RULE,
            without={"padding", "cuts"},
            rows=1,
            tokens=(1, T),
        )


@pytest.mark.parametrize(
    ("precision", "largest"),
    [
        ("int8", 0.05),
        pytest.param("fp16", 0.01, marks=pytest.mark.slow),
        pytest.param("int8-stored", 0.05, marks=pytest.mark.slow),
        pytest.param("int4", 0.5, marks=pytest.mark.slow),
    ],
)
def test_a_lower_precision_of_a_named_step_states_its_loss(
    precision: Precision, largest: float, module_artefact: Callable[[str], Path]
) -> None:
    artefact = module_artefact(f"wide in {precision}")
    measured = load_spec(artefact).measured
    assert isinstance(measured, MeasuredStep)
    assert 0 < measured.outputs["value"].rms < measured.outputs["value"].largest < largest
    assert measured.outputs["best"].changed is not None
    graph = onnx.load(artefact / GRAPH, load_external_data=False).graph
    matrices = {x.data_type for x in graph.initializer if np.prod(x.dims) > 500}
    assert matrices == {STORED[precision]}
    report = check(artefact)
    assert (report.passed, report.outputs) == (True, ("value",))  # a rounding may change any id
    text = CliRunner().invoke(info_command, [str(artefact), "--all"], catch_exceptions=False).output
    assert f"measured.outputs.value.rms {measured.outputs['value'].rms}\n" in text
    session, draw = open_session(artefact), np.random.default_rng(0)
    inputs = {"x": draw.standard_normal((2, 50, 40), np.float32), "previous": draw.integers(50, size=(2, 50))}
    memory = session.start(2)
    found = [
        session.step({name: x[:, at : at + 1] for name, x in inputs.items()}, memory)[0] for at in range(50)
    ]
    with torch.no_grad():
        module = modules.Wide()
        right, _ = module.step({n: torch.from_numpy(x) for n, x in inputs.items()}, None, module.start(2))
    mine = np.concatenate([outputs["value"] for outputs in found], axis=1)
    assert np.abs(mine - right["value"].numpy()).max() < 2 * largest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"precision": "int8"},
            "multiplies by no constant matrix of 32 rows or more",
            marks=pytest.mark.slow,
        ),
        ({"target": "tensorrt"}, "exported for ONNX Runtime, and the target is tensorrt"),
        ({"precision": "fp16", "text": Path(__file__)}, "text is for a language model"),
        ({"memory_precision": "int8"}, "a traced step has no scales for memory in int8"),
    ],
)
def test_precisions_that_a_named_step_cannot_have_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trace(modules.Policy(), tmp_path / "a", rule=RULE, without={"padding"}, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_returns_only_ids_stays_in_fp32(tmp_path: Path) -> None:
    class Best(modules.Wide):
        def step(self, inputs: Any, positions: Any, memory: Any) -> Any:
            outputs, after = super().step(inputs, positions, memory)
            return {"best": outputs["best"]}, after

    with pytest.raises(UserError, match="all outputs of the module are ids"):
        trace(Best(), tmp_path / "a", rule=RULE, without={"padding"}, precision="fp16")


def test_a_spec_with_tensors_of_no_step_is_refused(policy: Path, tmp_path: Path) -> None:
    document = json.loads((policy / "spec.json").read_text())
    changes: list[tuple[str, Any]] = [
        ("inputs", [document["inputs"][0] | {"ids": 3}, *document["inputs"][1:]]),
        ("inputs", [*document["inputs"][:3], *document["inputs"][4:]]),
        ("outputs", []),
        ("outputs", [document["outputs"][0] | {"shape": ["batch", "tokens", 0]}, *document["outputs"][1:]]),
        ("without", ["nothing"]),
        ("exporter", "graph"),
        ("fixed_tokens", [1, T]),
    ]
    for key, value in changes:
        (tmp_path / SPEC).write_bytes(sealed(document | {key: value}))
        with pytest.raises(ArtefactError):
            read_spec(tmp_path / SPEC)
    (tmp_path / SPEC).write_bytes(sealed(document))
    assert read_spec(tmp_path / SPEC).signature == load_spec(policy).signature


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": {}}, "has no `sizes` or `inputs`"),
        ({"inputs": {"goal": modules.constant(2)}}, "no input has a value for each token"),
        ({"vocab": modules.VOCAB}, "no language model; leave vocab out"),
        ({"without": {"speed"}}, "without has 'speed'; expected some of padding"),
        ({"rows": 1, "tokens": 0}, "tokens is 0"),
        ({"target": "tpu"}, "target is 'tpu'; expected one of onnxruntime, tensorrt"),
        (
            {"output": lambda x: {"y": x.flatten(1)}},
            r"output y of Plain is float32 \[2, 4\] with batch 2 and 2 tokens.*expected float32 or int64, "
            r"\[batch, tokens, …\]",
        ),
        (
            {"output": lambda x: {"y": x.transpose(0, 1)}, "rows": 1},
            r"output y of Plain is float32 \[2, 1, 2\] with batch 1 and 2 tokens",
        ),
        (
            {"output": lambda x: {"output": x}, "vocab": modules.VOCAB, "sizes": modules.Base().sizes},
            r"the outputs of Plain are \['output'\]; expected logits",
        ),
    ],
)
def test_wrong_arguments_of_named_steps_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    class Plain(nn.Module):
        inputs = change.get("inputs", modules.features(2))

        def start(self, batch: int) -> list[torch.Tensor]:
            return [torch.zeros(batch, 2)]

        def step(self, inputs: Any, positions: Any, memory: Any) -> Any:
            x = inputs if isinstance(inputs, torch.Tensor) else next(iter(inputs.values()))
            return change.get("output", lambda x: x)(x), memory

    module = Plain()
    if "sizes" in change:
        module.sizes = change["sizes"]
    options = {name: value for name, value in change.items() if name not in ("inputs", "output", "sizes")}
    with pytest.raises(UserError, match=message):
        trace(module, tmp_path / "a", rule=MemoryRule(mem_len=2, segment=2), **options)


@pytest.mark.parametrize(
    "make",
    [
        modules.features,
        modules.constant,
        modules.ids,
        lambda size: modules.Sizes(vocab_size=9, layers=1, d_model=size),
    ],
)
@pytest.mark.parametrize("size", [-1, 1.5, float("nan"), "3"])
def test_a_size_is_a_whole_number(make: Any, size: Any) -> None:
    with pytest.raises(UserError, match="expected a whole number"):
        make(size)


def test_a_mask_of_keys_is_one_for_all_queries(tmp_path: Path) -> None:
    """Which ONNX Runtime's Attention does not repeat for each of them."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = {"x": features(8)}
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def start(self, batch: int) -> list[torch.Tensor]:
            return [torch.zeros(batch, 6, 8)]

        def step(self, inputs: Any, positions: torch.Tensor, memory: Any) -> Any:
            x = inputs["x"]
            context = torch.cat([memory[0], x], dim=1)
            age = (6 - torch.arange(context.shape[1])).clamp(min=0)
            empty = age > positions[:, :1].clamp(min=0)
            return {
                "y": self.attention(x, context, context, key_padding_mask=empty, need_weights=False)[0]
            }, [context[:, -6:]]

    torch.manual_seed(0)
    rule = MemoryRule(mem_len=6, segment=4)
    artefact = trace(Masked(), tmp_path / "a", rule=rule, without={"padding", "cuts"})
    assert check(artefact).passed
