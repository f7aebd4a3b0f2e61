"""Modules of a user become artefacts, and those that cannot be traced are refused in a sentence."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from torch import nn

from runtimes import check, evaluate, generate, load_memory, open_session, save_memory
from runtimes.base.errors import MissingPackageError, UserError
from runtimes.contract.reference import load_reference
from runtimes.contract.spec import GRAPH, WEIGHTS, load_spec
from tests.runtimes.tasks.independent_texts import same_as_alone, some_texts
from tests.streams import feed
from tests.xl_export.tracing import modules
from tests.xl_export.tracing.modules import RULE, VOCAB
from xl_export import trace
from xl_export.artefact.traced import module_spec
from xl_export.tracing.module import ModuleStep
from xl_export.tracing.session import ModuleSession

pytestmark = pytest.mark.usefixtures("fast_traces")
TEXT = b"Each artefact of a module runs as every other artefact does."


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Right modules as artefacts; a segment of 2 is the shortest that the trace could take for a constant."""
    folder = tmp_path_factory.mktemp("traced")
    return {
        kind.__name__: trace(kind(), folder / kind.__name__, vocab=VOCAB, rule=rule)
        for kind, rule in ((modules.Ring, RULE), (modules.Gru, dataclasses.replace(RULE, segment=2)))
    }


def test_modules_of_each_form_run_as_every_artefact(traced: dict[str, Path], tmp_path: Path) -> None:
    for name, form in (("Ring", "ring"), ("Gru", "own")):
        artefact = traced[name]
        spec, report, session = load_spec(artefact), check(artefact), open_session(artefact)
        assert (spec.form, spec.exporter, spec.model.sublayers) == (form, "trace", "own")
        assert report.passed
        assert report.max_difference < 1e-5
        tokens = session.vocab.encode(TEXT.decode())
        T = session.rule.segment
        scores = [evaluate(session, tokens, segment=segment).bits_per_token for segment in {1, T - 1, T}]
        assert np.ptp(scores) < 1e-4
        assert len(list(generate(session, ["Each ", "A"], max_tokens=5))) == 10
        memory = session.start(1)
        session.step(tokens[None, :T], memory)
        save_memory(memory, tmp_path / f"{name}.npz")
        again = load_memory(tmp_path / f"{name}.npz", session)
        ahead = session.step(tokens[None, T : 2 * T], memory)[0]
        named, again = session.step({"input_ids": tokens[None, T : 2 * T]}, again)
        assert np.array_equal(named["logits"], ahead)
        with pytest.raises(UserError, match=r"the inputs are \['ids'\]; expected only input_ids"):
            session.step({"ids": tokens[None, :T]}, again)


def test_the_published_relative_shift_is_right_for_any_cut(tmp_path: Path) -> None:
    """PyTorch cannot prove for all T what its `view` needs, and for T = 1, 2 and 3 it differs from T = 4."""
    module = modules.Shifted().eval()
    step = ModuleStep(module)
    sessions = (
        open_session(trace(module, tmp_path / "a", vocab=VOCAB, rule=RULE)),
        ModuleSession(step, VOCAB, module_spec(step, VOCAB, RULE, None)),
    )
    tokens = np.random.default_rng(0).integers(0, VOCAB.size, (2, 40))
    mine, theirs = (feed(session, tokens, [4, 3, 1, 2, 4, 4, 1, 1] * 2)[0] for session in sessions)
    assert np.abs(mine - theirs).max() < 1e-5


def test_a_padded_vocabulary_is_legal_without_its_ids(module_artefact: Callable[[str], Path]) -> None:
    padded_artefact = module_artefact("padded")
    report, session = check(padded_artefact), open_session(padded_artefact)
    assert report.passed
    assert report.max_difference < 1e-5
    assert np.isneginf(
        load_reference(padded_artefact, load_spec(padded_artefact)).last[:, modules.PADDING :]
    ).all()
    assert evaluate(session, VOCAB.encode(TEXT)).bits_per_token < 20
    assert evaluate(session, np.array([1, 255, 1])).impossible == 1


def test_nan_behind_constant_logits_never_reaches_the_next_text(
    module_artefact: Callable[[str], Path],
) -> None:
    session, tokens = open_session(module_artefact("padded")), VOCAB.encode(TEXT.decode())[None, :4]
    memory = session.start(1)
    expected, _ = session.step(tokens, memory)
    for array in memory.tensors.values():
        array.fill(np.nan)
    logits, _ = session.step(tokens, memory)
    assert np.isfinite(logits[..., 0]).all()
    memory.positions[:] = 0
    assert np.array_equal(session.step(tokens, memory)[0], expected)


def test_the_graph_has_standard_operators_and_nothing_of_this_machine(traced: dict[str, Path]) -> None:
    for artefact in traced.values():
        onnx.checker.check_model(str(artefact / GRAPH), full_check=True)
        model = onnx.load(artefact / GRAPH, load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}
        assert len(model.functions) == 0
        content = (artefact / GRAPH).read_bytes()
        assert all(word not in content for word in (b".py", b"/home", b"torch", b"fx_node"))


def test_rows_of_a_traced_ring_may_have_unequal_lengths(traced: dict[str, Path]) -> None:
    session, tokens = open_session(traced["Ring"]), VOCAB.encode(TEXT.decode())
    memory, at = session.start(2), np.zeros(2, int)
    alone = session.start(1), session.start(1)
    for lengths in ([4, 1], [0, 4], [3, 4], [4, 2], [1, 4], [4, 4]):
        fed = np.stack([tokens[start : start + 4] for start in at])
        logits, memory = session.step(fed, memory, lengths=np.array(lengths))
        for row, length in enumerate(lengths):
            if length:
                own, _ = session.step(fed[row : row + 1, :length], alone[row])
                assert np.abs(logits[row, :length] - own[0]).max() < 1e-4
        at += lengths


def test_texts_keep_their_scores_if_answers_count_from_the_segment_end(tmp_path: Path) -> None:
    rule = dataclasses.replace(RULE, mask="full")
    module = modules.RingFromSegmentEnd()
    artefact = trace(module, tmp_path / "artefact", vocab=VOCAB, rule=rule, without={"unequal"})
    same_as_alone(open_session(artefact), some_texts(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": ("unequal",)}, "does not keep the promise `unequal`"),
        ({"fixed_rows": 2}, "exported for exactly 2 rows"),
    ],
)
def test_a_ring_whose_rows_advance_together_says_why(
    traced: dict[str, Path], changes: dict[str, Any], message: str
) -> None:
    session = open_session(traced["Ring"])
    vars(session)["spec"] = dataclasses.replace(load_spec(traced["Ring"]), **changes)
    with pytest.raises(UserError, match=message):
        session.step(np.zeros((2, 4), int), session.start(2), lengths=np.array([1, 4]))


@pytest.mark.slow
@pytest.mark.parametrize("segment", [1, 2])
@pytest.mark.parametrize("kind", [modules.Base, modules.Ring])
def test_short_segments_can_be_traced(
    kind: type[nn.Module], segment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "T", segment)
    rule = dataclasses.replace(RULE, segment=segment)
    assert check(trace(kind(), tmp_path / "a", vocab=VOCAB, rule=rule)).passed


@pytest.mark.slow
def test_the_same_module_gives_the_same_bytes(traced: dict[str, Path], tmp_path: Path) -> None:
    again = trace(modules.Ring(), tmp_path / "again", vocab=VOCAB, rule=RULE)
    for name in (GRAPH, WEIGHTS):
        assert (again / name).read_bytes() == (traced["Ring"] / name).read_bytes()
    assert load_spec(again).source == load_spec(traced["Ring"]).source


@pytest.mark.slow
def test_a_module_with_a_large_vocabulary_and_buffers_named_as_inputs(tmp_path: Path) -> None:
    module = modules.Large().eval()
    artefact = trace(module, tmp_path / "a", vocab=modules.LARGE, rule=RULE, precision="int8")
    session = open_session(artefact)
    assert session.spec is not None
    assert "targets" in [fact.name for fact in session.spec.inputs]
    assert check(artefact).passed
    # For engines the log-probabilities come from whole distributions; `trace` compares them.
    trace(module, tmp_path / "b", vocab=modules.LARGE, rule=RULE, target="tensorrt")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            modules.BranchOnValues,
            "could not trace the step: .*modules.py:.*your code\\) depends on the values",
        ),
        (modules.AssertOnValues, r"`assert torch.isfinite\(logits\).all\(\)` .*, your code\) asserts"),
        pytest.param(
            modules.RingReadTwice,
            r"past_key_values\.0\.key is not written only by xl_export.ring_write",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(
    kind: type[nn.Module],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UserError, match=message) as error:
        trace(kind(), tmp_path / "artefact", vocab=VOCAB, rule=RULE)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "".join(capfd.readouterr()).strip() == ""


def test_a_module_is_left_in_the_mode_that_it_was_in(tmp_path: Path) -> None:
    module = modules.Random().train()
    module.out.eval()
    with pytest.raises(UserError):
        trace(module, tmp_path / "artefact", vocab=VOCAB, rule=RULE)
    assert module.training
    assert module.key.training
    assert not module.out.training


def test_a_text_without_a_second_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a")
    with pytest.raises(UserError, match="text has fewer than 2 tokens; give a longer text"):
        trace(
            modules.Base(),
            tmp_path / "artefact",
            vocab=VOCAB,
            rule=RULE,
            precision="fp16",
            text=tmp_path / "text",
        )
    assert not (tmp_path / "artefact").exists()


def test_parts_of_a_rule_that_a_module_does_not_know_are_refused(tmp_path: Path) -> None:
    rules = [
        {"clamp_len": 4},
        {"initial_memory": "zeros"},
        {"include_self": False},
    ]
    for options in rules:
        (name,) = options
        with pytest.raises(UserError, match=f"{name} is .*, and a module that is traced decides this itself"):
            trace(modules.Base(), tmp_path / "a", vocab=VOCAB, rule=dataclasses.replace(RULE, **options))


def test_without_onnxscript_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingPackageError, match=r"onnxscript is not installed .* 'onnxscript>="):
        trace(modules.Base(), tmp_path / "artefact", vocab=VOCAB, rule=RULE)
