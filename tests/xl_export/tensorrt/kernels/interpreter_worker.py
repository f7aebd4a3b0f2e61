"""Runs every case of the kernels in Triton's interpreter, which a process has for good or not at all; answers
go to an .npz.

Every tensor lies between margins of NaN, so that reading or writing outside of it shows, and the answers
start as NaN.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl

from tests.xl_export.tensorrt.kernels.cases import SKEWS, SMALL, UNSEEN, divisions_of, key, tactics_of
from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.kernels.compile import JOINS, Tactic
from xl_export.tensorrt.kernels.launch import launch
from xl_export.tensorrt.kernels.skew import skewed

MARGIN = 4096  # elements


def guarded(array: np.ndarray) -> torch.Tensor:
    filler = np.nan if array.dtype.kind == "f" else 1 << 30
    buffer = torch.full((array.size + 2 * MARGIN,), filler, dtype=torch.from_numpy(array).dtype)
    view = buffer[MARGIN : MARGIN + array.size].view(array.shape)
    view[:] = torch.from_numpy(array)
    return view


def answer(case: Case, inputs: dict[str, np.ndarray], tactic: Tactic, divided: int) -> np.ndarray:
    out, rows = (
        guarded(np.full(inputs["query"].shape, np.nan, case.dtype)),
        divided * case.B * case.H * case.T,
    )
    mixed, level = (guarded(np.full(size, np.nan, np.float32)) for size in ((rows, case.K), (rows,)))
    launch(
        tactic,
        [guarded(array) for array in inputs.values()],
        out,
        attributes=case.attributes,
        mem_len=case.mem_len,
        scratch=(mixed, level),
        divided=divided,
        join=JOINS[divided < 40],
    )
    for written in (out, mixed, level):
        whole = torch.empty(0, dtype=written.dtype).set_(written.untyped_storage())
        assert whole[:MARGIN].isnan().all(), "written in front of the answer"
        assert whole[-MARGIN:].isnan().all(), "written behind the answer"
    return out.numpy()


@triton.jit
def skew_three_tiles(scores, by_key, T: tl.constexpr, J: tl.constexpr):
    """The relative shift of rows [T, T + 2 J]: what lies T columns before, and then two tiles."""
    i, j = tl.arange(0, T)[:, None], tl.arange(0, J)[None, :]
    row = scores + i * (T + 2 * J)
    _, earlier = skewed(tl.load(row + tl.arange(0, T)[None, :]), (), True)
    left, earlier = skewed(tl.load(row + T + j), earlier, False)
    right, earlier = skewed(tl.load(row + T + J + j), earlier, False)
    tl.store(by_key + i * 2 * J + j, left)
    tl.store(by_key + i * 2 * J + J + j, right)


def skew(T: int, J: int) -> np.ndarray:
    """What becomes of the scores i + j / 1024 for row i and column j."""
    scores = torch.arange(T)[:, None] + torch.arange(T + 2 * J) / 1024
    by_key = torch.full((T, 2 * J), torch.nan)
    skew_three_tiles[(1,)](scores, by_key, T, J)
    return by_key.numpy()


def main(path: str, *names: str) -> None:
    """Writes the answers of these cases, which may be of those with tiles that nobody sees."""
    torch.set_num_threads(1)
    answers = {f"skew-{T}-{J}": skew(T, J) for T, J in SKEWS}
    for name in [name for name in names if name in CASES]:
        case = CASES[name]
        for tactic in tactics_of(name):
            for divided in divisions_of(case, tactic):
                answers[key(name, tactic, divided)] = answer(case, case.inputs(), tactic, divided)
    for name in [name for name in names if name in UNSEEN]:
        case, (start, stop) = UNSEEN[name]
        inputs = case.inputs()
        for what in ("key", "value"):
            inputs[what][:, :, start:stop] = np.nan
        for tactic in SMALL:
            answers[key(name, tactic, 3)] = answer(case, inputs, tactic, 3)
    np.savez(path, **answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
