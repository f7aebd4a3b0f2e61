"""The kernels compute what the naive operator computes: in Triton's interpreter here, and on a GPU where
there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.nightly import every
from tests.xl_export.tensorrt.kernels.cases import SKEWS, SMALL, UNSEEN, divisions_of, key, tactics_of
from tests.xl_export.tensorrt.test_operator import TOLERANCES, truth
from xl_export.tensorrt.kernels.cases import CASES
from xl_export.tensorrt.kernels.compile import parts, programs, scratch_rows

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]


# The interpreter takes seconds for each case, so the others are slow tests.
BY_DEFAULT = ("ring-segment-cut-at-the-end",)


@pytest.fixture(scope="module")
def interpreted(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, np.ndarray]:
    """The answers of the chosen cases in the interpreter, by key."""
    path = tmp_path_factory.mktemp("interpreter") / "answers.npz"
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and "interpreted" in item.fixturenames
        and "name" in item.callspec.params
    }
    names = [name for name in (*CASES, *UNSEEN) if name in chosen]
    command = [sys.executable, "-m", "tests.xl_export.tensorrt.kernels.interpreter_worker", str(path), *names]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr[-2000:]
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in CASES]
)
def test_the_kernels_in_the_interpreter_equal_the_naive_operator(
    name: str, interpreted: dict[str, np.ndarray]
) -> None:
    case, expected = CASES[name], truth(CASES[name])
    for tactic in tactics_of(name):
        for divided in divisions_of(case, tactic):
            answer = interpreted[key(name, tactic, divided)]
            assert np.abs(answer - expected).max() < TOLERANCES[case.dtype], (tactic, divided)


@pytest.mark.parametrize("name", every(3, UNSEEN))
def test_tiles_that_nobody_sees_are_not_looked_at(name: str, interpreted: dict[str, np.ndarray]) -> None:
    case, _ = UNSEEN[name]
    expected = truth(case)
    for tactic in SMALL:
        difference = np.abs(interpreted[key(name, tactic, 3)] - expected).max()
        assert difference < TOLERANCES[case.dtype], tactic


@pytest.mark.parametrize(("T", "J"), SKEWS)
def test_row_i_moves_by_i_columns(T: int, J: int, interpreted: dict[str, np.ndarray]) -> None:
    """In two tiles that follow each other; column T of the scores is distance 0 of the first key."""
    i, j = np.arange(T)[:, None], np.arange(2 * J)
    assert (interpreted[f"skew-{T}-{J}"] == (i + (T + j - i) / 1024).astype(np.float32)).all()


@pytest.mark.parametrize("multiprocessors", [16, 132])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 1), (32, 1), (1, 17), (1, 128), (3, 33), (8, 512)])
def test_keys_are_divided_until_the_gpu_is_busy(B: int, T: int, multiprocessors: int) -> None:
    gpu = {"multiprocessors": multiprocessors}
    undivided, wanted = programs(B, 8, T), 4 * multiprocessors
    number = parts(undivided, **gpu)
    assert wanted <= undivided * number < wanted + undivided or number == 1
    for fewer in range(1, B + 1):  # scratch for a profile's largest shape is enough for every smaller one
        for shorter in range(1, T + 1):
            smaller = programs(fewer, 8, shorter)
            rows = scratch_rows(smaller, shorter, **gpu)
            assert parts(smaller, **gpu) * fewer * 8 * shorter <= rows <= scratch_rows(undivided, T, **gpu)
