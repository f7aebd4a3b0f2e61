"""Every form of memory computes what PyTorch computes, on real text, through many memory lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtimes import open_session
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH
from runtimes.contract.tensors import FORMS, Form
from tests.architectures import ARCHITECTURES
from tests.nightly import matrix
from tests.streams import feed, rows
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import export, make_spec, write_graphs

T, M = 8, 16  # of the shared run
CUTS = {"ones": [1] * 336, "sevens": [7] * 48, "whole": [T] * 42, "mixed": [T, 1, 7] * 21}


@pytest.mark.parametrize(("form", "batch", "cut"), matrix(FORMS, (1, 3), tuple(CUTS), together=1))
def test_log_probabilities_equal_pytorch_over_21_memory_lengths(
    form: str, batch: int, cut: str, run: Path, artefacts: dict[str, Path], tokens: np.ndarray
) -> None:
    stream = rows(tokens, batch, sum(CUTS[cut]))
    assert stream.shape[1] >= 20 * M
    truth, _ = feed(open_session(run), stream, CUTS[cut])
    answer, _ = feed(open_session(artefacts[form]), stream, CUTS[cut])
    assert np.abs(answer - truth).max() < 1e-4


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, T), min_size=1, max_size=40))
def test_cutting_a_stream_never_changes_a_same_length_score(
    form: str, artefacts: dict[str, Path], tokens: np.ndarray, lengths: list[int]
) -> None:
    session = open_session(artefacts[form])
    stream = rows(tokens, 2, sum(lengths))
    cut, _ = feed(session, stream, lengths)
    ones, _ = feed(session, stream, [1] * stream.shape[1])
    assert np.abs(cut - ones).max() < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_the_full_rule_equals_the_naive_model(
    form: str, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    rule = MemoryRule(mem_len=16, segment=8, mask="full")
    run = make_run(rule=rule)
    session = open_session(export(run, tmp_path / "artefact", memory=form))  # type: ignore[arg-type]
    for cut in ([5, 8, 1, 7, 8, 8, 3, 8], [8] * 6):
        stream = rows(tokens, 2, sum(cut))
        answer, _ = feed(session, stream, cut)
        assert np.abs(answer - exact_answers(run, stream, cut, naive=True)).max() < 1e-4
        ones, _ = feed(session, stream, [1] * stream.shape[1])
        assert np.abs(ones - answer).max() > 1e-3  # under this rule the cut matters


CUT = [T, 1, 7, T, T, 3, T]


def exact_answers(
    run: Path, stream: np.ndarray, cut: list[int], *, naive: bool = False, padding: int = 0
) -> np.ndarray:
    """PyTorch's log-probabilities in float64; the second row begins with padding."""
    import torch

    from trainer.model.attention import relative_attention
    from trainer.model.naive import naive_attention

    attention = naive_attention if naive else relative_attention
    loaded = load_run(run)
    model, rule = loaded.model.double().eval(), loaded.config.evaluation
    state, positions, at, truth = model.start(2, rule), torch.tensor([0, -padding]), 0, []
    with torch.no_grad():
        for length in cut:
            piece = torch.from_numpy(stream[:, at : at + length])
            logits, state = model(piece, state, positions, rule, attention=attention)
            truth.append(logits.log_softmax(-1).numpy())
            positions, at = positions + length, at + length
    return np.concatenate(truth, axis=1)


# Each architecture in one form by default; test_precision_parity.py has them in others, and
# tests/test_sessions.py exports them.
@pytest.mark.parametrize(("name", "form"), matrix(tuple(ARCHITECTURES), FORMS, together=1))
def test_every_architecture_equals_pytorch_in_float64(
    name: str, form: Form, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    """Against the model in float64, one row beginning with padding, beyond the end of the ring."""
    run, stream = make_run(**ARCHITECTURES[name]), rows(tokens, 2, sum(CUT))
    expected = exact_answers(run, stream, CUT, padding=9)
    loaded = load_run(run)
    spec = make_spec(loaded, loaded.config.evaluation, form, "onnxruntime", "fp32", "fp32")
    session = write_graphs(spec, tmp_path, loaded, "plugin")[GRAPH]
    memory = session.start(2)
    memory.positions[1] = -9
    answer, _ = feed(session, stream, CUT, memory)
    assert np.abs(answer[0] - expected[0]).max() < 1e-4
    assert np.abs(answer[1, 9:] - expected[1, 9:]).max() < 1e-4
