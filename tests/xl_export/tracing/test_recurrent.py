"""`nn.LSTM` and `nn.GRU` become artefacts as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from runtimes import check, open_session
from runtimes.base.errors import UserError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import load_spec
from xl_export import trace

RULE = MemoryRule(mem_len=6, segment=5)


@pytest.mark.parametrize(
    "net",
    [
        lambda: nn.LSTM(3, 7, num_layers=2, dropout=0.5),
        lambda: nn.GRU(3, 7, num_layers=2, batch_first=True),
        pytest.param(lambda: nn.LSTM(3, 7, bias=False, batch_first=True), marks=pytest.mark.slow),
        pytest.param(lambda: nn.GRU(3, 7, bias=False), marks=pytest.mark.slow),
    ],
    ids=["LSTM", "GRU", "LSTM without bias", "GRU without bias"],
)
def test_a_stack_has_the_answers_of_pytorch(net: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = net()  # type: ignore[operator]
    artefact = trace(module, tmp_path / "a", rule=RULE)
    assert module.training  # as it was
    spec = load_spec(artefact)
    assert (spec.without, [x.name for x in spec.signature[0]]) == ((), ["input", "position_ids"])
    assert spec.signature[1][0].shape == ("batch", "tokens", 7)
    assert check(artefact).passed
    session = open_session(artefact)
    x = torch.randn(2, 23, 3)
    memory = session.start(2)
    memory.positions[1] = -2  # the row begins with padding
    pieces = np.split(x.numpy(), [5, 6, 10, 13, 18], axis=1)
    mine = np.concatenate([session.step(piece, memory)[0] for piece in pieces], axis=1)
    module.eval()
    module.batch_first = True
    with torch.no_grad():
        first, second = module(x[:1])[0], module(x[1:, 2:])[0]
    assert np.abs(mine[:1] - first.numpy()).max() < 1e-6
    assert np.abs(mine[1:, 2:] - second.numpy()).max() < 1e-6


@pytest.mark.parametrize("option", [{"bidirectional": True}, {"proj_size": 2}], ids=str)
def test_a_stack_that_no_stream_or_operator_can_have_is_refused_by_name(
    option: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"the LSTM .*{next(iter(option))}"):
        trace(nn.LSTM(3, 7, **option), tmp_path / "a", rule=RULE)  # type: ignore[arg-type]
