"""A new kind of position is one class: it exports in every form of memory, and equals PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runtimes import open_session
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import load_spec
from runtimes.contract.tensors import FORMS
from tests.nightly import matrix
from tests.streams import feed, rows
from trainer.model import positions
from trainer.model.attention import Terms
from trainer.model.config import ModelConfig
from trainer.model.positions import Positions
from xl_export.artefact.export import export


@pytest.fixture(autouse=True)
def linear_bias() -> Iterator[None]:
    """Registers the kind of docs/extending/position.md for one test: a bias alone, as no other kind has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "KINDS", dict(positions.KINDS))

        class LinearBias(Positions, kind="linear-bias"):  # as Press et al. 2022, with learned slopes
            def __init__(self, config: ModelConfig) -> None:
                super().__init__(config)
                self.slope = nn.Parameter(torch.empty(config.layers, config.heads))

            def terms(self, layer: int, vectors: Tensor) -> Terms:
                return Terms(bias=self.slope[layer] * vectors.to(self.slope)[:, None])

        yield


@pytest.mark.parametrize(("form", "clamp_len"), matrix(FORMS, [None, 5], together=1))
def test_a_new_kind_exports_as_it_is(
    form: str,
    clamp_len: int | None,
    make_run: Callable[..., Path],
    tokens: np.ndarray,
    tmp_path: Path,
) -> None:
    run = make_run(positions="linear-bias", rule=MemoryRule(mem_len=16, segment=8, clamp_len=clamp_len))
    artefact = export(run, tmp_path / "artefact", memory=form)  # type: ignore[arg-type]
    assert load_spec(artefact).model.positions == "linear-bias"
    stream = rows(tokens, 2, 64)
    expected, _ = feed(open_session(run), stream, [8, 1, 7] * 4)
    answer, _ = feed(open_session(artefact), stream, [8, 1, 7] * 4)
    assert np.abs(answer - expected).max() < 1e-4


@pytest.mark.parametrize("attention", ["plugin", "native"])
def test_a_new_kind_exports_for_tensorrt(
    attention: str, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    run = make_run(positions="linear-bias")
    artefact = export(run, tmp_path / "artefact", target="tensorrt", attention=attention)  # type: ignore[arg-type]
    stream = rows(tokens, 2, 64)
    expected, _ = feed(open_session(run), stream, [8, 1, 7] * 4)
    answer, _ = feed(open_session(artefact), stream, [8, 1, 7] * 4)
    assert np.abs(answer - expected).max() < 0.05  # float16
