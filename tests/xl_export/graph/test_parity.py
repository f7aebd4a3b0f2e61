"""Every form of memory computes what PyTorch computes in float64.

The schedules of `tests/test_sessions.py` compare long streams, however they are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.contract.spec import GRAPH
from runtimes.contract.tensors import FORMS, Form
from tests.architectures import ARCHITECTURES
from tests.nightly import matrix
from tests.streams import feed, rows
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import make_spec, write_graphs

CUT = [8, 1, 7, 8, 8, 3, 8]


def exact_answers(run: Path, stream: np.ndarray, cut: list[int], *, padding: int) -> np.ndarray:
    """PyTorch's log-probabilities in float64; the second row begins with padding."""
    import torch

    loaded = load_run(run)
    model, rule = loaded.model.double().eval(), loaded.config.evaluation
    state, positions, at, truth = model.start(2, rule), torch.tensor([0, -padding]), 0, []
    with torch.no_grad():
        for length in cut:
            piece = torch.from_numpy(stream[:, at : at + length])
            logits, state = model(piece, state, positions, rule)
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
