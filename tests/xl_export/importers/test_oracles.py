"""What other projects compute, imported models compute: per token, in PyTorch and on ONNX Runtime, cut as
theirs was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from runtimes import open_session
from tests.xl_export.importers.oracles import ROUNDING, Case, nll, oracle_cases, shared_cases, variant_cases
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import export

CASES = oracle_cases()


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """Imports a checkpoint under one evaluation, once; returns the run."""
    folder = tmp_path_factory.mktemp("imported")
    return functools.cache(lambda case: case.imported(folder / str(case)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_double_precision_meets_the_oracles_own(case: Case, run_of: Callable[[Case], Path]) -> None:
    run, expected = load_run(run_of(case)), case.expected()
    model, rule = run.model.double().eval(), run.config.evaluation
    tokens, targets = (torch.from_numpy(expected[name]) for name in ("tokens", "targets"))
    for kind in ("segments", "segments_b"):
        memory, pieces, at = [m.double() for m in model.start(len(tokens), rule)], [], 0
        for length in expected[kind].tolist():
            places = torch.full((len(tokens),), at)
            with torch.no_grad():
                outputs, memory = model.layers(tokens[:, at : at + length], memory, places, rule)
                wanted = targets[:, at : at + length].flatten()
                pieces.append(
                    -model.vocabulary.log_prob(outputs[-1].flatten(0, 1), wanted).view(len(tokens), -1)
                )
            at += length
        found = torch.cat(pieces, dim=1).numpy()
        if kind == "segments":
            assert np.abs(found - expected["nll_f64"]).max() < 1e-9
            last = model.vocabulary.logits(outputs[-1][:, -1]).log_softmax(-1).detach().numpy()
            assert np.abs(last - expected["logprobs_last"]).max() < ROUNDING
            _compare_memories(memory, expected)
        else:
            assert np.abs(found - expected["nll_b"]).max() < ROUNDING


def _compare_memories(memory: list[torch.Tensor], expected: dict[str, np.ndarray]) -> None:
    """The inputs of the first and the last layer that are left; theirs are [M, B, D] or [B, M, D] and may
    reach further back."""
    for mine, name in ((memory[0], "mems_last_layer0"), (memory[-1], "mems_last_layerN")):
        theirs = expected.get(name)
        if theirs is None or not theirs.size:
            continue
        theirs = (
            theirs
            if theirs.shape[0] == len(mine) and theirs.shape[1] != len(mine)
            else theirs.transpose(1, 0, 2)
        )
        count = min(mine.shape[1], theirs.shape[1])
        assert count
        assert np.abs(mine.numpy()[:, -count:] - theirs[:, -count:]).max() < ROUNDING * np.abs(theirs).max()


# Each checkpoint in one form under one evaluation; tests/xl_export/graph compares the forms with each other.
ARTEFACTS = [
    pytest.param(
        case,
        form,
        marks=() if case.evaluation == "eval" and (number + at) % 2 == 0 else pytest.mark.slow,
        id=f"{case}-{form}",
    )
    for number, case in enumerate(CASES)
    for at, form in enumerate(("ring", "shift"))
]


@pytest.mark.parametrize(("case", "form"), ARTEFACTS)
def test_artefacts_give_every_token_the_oracles_likelihood(
    case: Case, form: str, run_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    session = open_session(export(run_of(case), tmp_path / "artefact", memory=form))  # type: ignore[arg-type]
    expected = case.expected()
    assert np.abs(nll(session, expected) - expected["nll"]).max() < ROUNDING


@pytest.mark.slow
@pytest.mark.skipif(
    not shared_cases(), reason="the oracles outside the repository are not here: XL_EXPORT_ORACLES"
)
@pytest.mark.parametrize("case", shared_cases() or [None], ids=str)
def test_oracles_outside_the_repository_agree_in_pytorch_ring_and_shift(case: Case, tmp_path: Path) -> None:
    run, expected = case.imported(tmp_path / "run"), case.expected()
    sources = [run, *(export(run, tmp_path / form, memory=form) for form in ("ring", "shift"))]
    for source in sources:
        assert np.abs(nll(open_session(source), expected) - expected["nll"]).max() < ROUNDING


@pytest.mark.parametrize("case", variant_cases(), ids=str)
def test_options_that_no_oracle_has(case: Case, run_of: Callable[[Case], Path]) -> None:
    session, expected = open_session(run_of(case)), case.expected()
    assert np.abs(nll(session, expected) - expected["nll"]).max() < ROUNDING
