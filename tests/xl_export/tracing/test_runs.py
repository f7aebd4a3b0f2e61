"""Runs of this project whose step PyTorch traces: the same answers as the written graph and as PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from runtimes import check, open_session
from runtimes.base.errors import UserError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH, load_spec
from runtimes.contract.tensors import FORMS, Form
from tests.architectures import ARCHITECTURES
from tests.commands import xl
from tests.streams import feed, rows
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import export
from xl_export.tracing.module import ModuleStep
from xl_export.tracing.steps import OwnStep
from xl_export.tracing.verify import drift_of

pytestmark = pytest.mark.usefixtures("fast_traces")
T = 8
CUT = [T, 1, 7, T, T, 3] * 2


def compare(run: Path, form: str, tokens: np.ndarray, folder: Path) -> Path:
    """Returns the artefact of a traced run, compared with the written graph and with PyTorch."""
    traced = export(run, folder / "traced", exporter="trace", memory=form)  # type: ignore[arg-type]
    compare_answers(run, traced, export(run, folder / "written", memory=form), tokens)  # type: ignore[arg-type]
    return traced


def compare_answers(run: Path, traced: Path, written: Path, tokens: np.ndarray) -> None:
    stream, answers = rows(tokens, 2, sum(CUT)), []
    for source in (run, written, traced):
        session = open_session(source)
        memory = session.start(2)
        memory.positions[1] = -9  # one row begins with padding
        answers.append(feed(session, stream, CUT, memory)[0])
    for other in answers[:2]:
        assert np.abs(answers[2][0] - other[0]).max() < 1e-4
        assert np.abs(answers[2][1, 9:] - other[1, 9:]).max() < 1e-4
    spec = load_spec(traced)
    assert spec.exporter == "trace"
    assert load_spec(written).exporter == "graph"
    assert load_spec(written).identity != spec.identity
    assert check(traced).max_difference < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_can_be_traced(
    name: str, form: str, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    compare(make_run(**ARCHITECTURES[name]), form, tokens, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        {"mask": "full", "clamp_len": 9},
        {"mem_len": 0},
        {"initial_memory": "zeros"},
        {"segment": 1},
        {"segment": 2},
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_every_rule_can_be_traced(
    options: dict, form: str, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    rule = MemoryRule(**{"mem_len": 16, "segment": 8, **options})
    run = make_run(rule=rule, pre_norm=True)
    stream, answers = rows(tokens, 2, sum(CUT)), []
    for source in (run, export(run, tmp_path / "traced", exporter="trace", memory=form)):  # type: ignore[arg-type]
        cut = [length for length in CUT if length <= rule.segment] or [rule.segment] * 9
        answers.append(feed(open_session(source), stream[:, : sum(cut)], cut)[0])
    assert np.abs(answers[0] - answers[1]).max() < 1e-4


@pytest.mark.parametrize("segment", [1, 2])
def test_spans_run_on_a_ring_with_the_shortest_segments(
    segment: int, make_run: Callable[..., Path], tokens: np.ndarray
) -> None:
    rule = MemoryRule(mem_len=6, segment=segment)
    run = make_run(**{**ARCHITECTURES["adaptive-span"], "layers": 1})
    step = OwnStep(load_run(run).model.eval(), rule, "ring")
    fed, positions = torch.from_numpy(tokens[None, :segment]), torch.arange(segment)[None]
    expected = open_session(run).with_rule(rule)
    with torch.no_grad():
        hidden, _ = step.step(fed, positions, step.start(1))
        logits = step.logits(hidden).numpy()
    assert np.abs(logits - expected.step(fed.numpy(), expected.start(1))[0]).max() < 1e-4


def test_the_command_traces_a_ring_that_is_written_in_place(
    make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    run, artefact, trace = make_run(layers=1), tmp_path / "artefact", ("--exporter", "trace")
    result = xl("export", run, "--out", artefact, *trace)
    assert "is ready: ring memory, memory 16" in result.stdout
    assert 'exporter "trace"' in xl("info", artefact, "--all").stdout
    compare_answers(run, artefact, export(run, tmp_path / "written"), tokens)
    graph = onnx.load(artefact / GRAPH, load_external_data=False).graph
    for state in load_spec(artefact).state:
        readers = [node.op_type for node in graph.node for value in node.input if value == state.name]
        assert readers == ["TensorScatter"], state.name
    session = open_session(artefact)
    memory = session.start(2)
    before = {name: array.ctypes.data for name, array in memory.tensors.items()}
    for _ in range(5):
        session.step(tokens[:16].reshape(2, 8), memory)
    assert {name: array.ctypes.data for name, array in memory.tensors.items()} == before


def test_a_step_of_ours_that_drifts_is_an_error(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = OwnStep.step

    def rounded(self: OwnStep, tokens: torch.Tensor, positions: torch.Tensor, memory: Any) -> Any:
        hidden, after = step(self, tokens, positions, memory)
        return hidden + (positions - positions.float().double()).float()[..., None], after

    monkeypatch.setattr(OwnStep, "step", rounded)
    with pytest.raises(UserError, match=r"OwnStep gives other answers .* from about position 16,777,216 on"):
        export(make_run(layers=1), tmp_path / "a", exporter="trace")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("name", "options"), [("absolute", {"context": 37}), ("adaptive-span", {})])
@pytest.mark.parametrize("form", ["hidden", "ring"])
def test_steps_of_ours_do_not_drift(
    name: str, options: dict[str, int], form: Form, make_run: Callable[..., Path]
) -> None:
    run = load_run(make_run(**{**ARCHITECTURES[name], "layers": 1, **options}))
    rule = run.config.evaluation
    step = ModuleStep(OwnStep(run.model.eval(), rule, form).eval())
    assert drift_of(step, rule, form, period=run.config.model.context or 1) is None


@pytest.mark.slow
def test_a_traced_run_for_tensorrt_is_in_float16(make_run: Callable[..., Path], tmp_path: Path) -> None:
    artefact = export(make_run(layers=1), tmp_path / "a", exporter="trace", target="tensorrt")
    assert {state.dtype for state in load_spec(artefact).state} == {"float16"}
    assert 0 < check(artefact).max_difference < 2e-2
    adaptive = make_run(**ARCHITECTURES["adaptive-softmax"], layers=1)
    with pytest.raises(UserError, match="NonZero operator, which makes shapes that depend on tokens"):
        export(adaptive, tmp_path / "b", exporter="trace", target="tensorrt")
    assert not (tmp_path / "b").exists()
