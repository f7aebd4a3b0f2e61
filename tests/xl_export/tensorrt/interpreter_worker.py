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

from tests.xl_export.tensorrt.cases import CASES, SMALL, UNSEEN, Case, divisions_of, key, tactics_of
from xl_export.tensorrt.compile import JOINS, Tactic
from xl_export.tensorrt.launch import launch

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
        scratch=(mixed, level),
        divided=divided,
        join=JOINS[divided < 40],
    )
    for written in (out, mixed, level):
        whole = torch.empty(0, dtype=written.dtype).set_(written.untyped_storage())
        assert whole[:MARGIN].isnan().all(), "written in front of the answer"
        assert whole[-MARGIN:].isnan().all(), "written behind the answer"
    return out.numpy()


def main(path: str, *names: str) -> None:
    """Writes the answers of these cases, and of those with tiles that nobody sees."""
    torch.set_num_threads(1)
    answers = {}
    for name in names:
        case = CASES[name]
        for tactic in tactics_of(case):
            for divided in divisions_of(case, tactic):
                answers[key(name, tactic, divided)] = answer(case, case.inputs(), tactic, divided)
    for name, (case, (start, stop)) in UNSEEN.items():
        inputs = case.inputs()
        for what in ("key", "value"):
            inputs[what][:, :, start:stop] = np.nan
        for tactic in SMALL:
            for divided in divisions_of(case, tactic):
                answers[key(name, tactic, divided)] = answer(case, inputs, tactic, divided)
    np.savez(path, **answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
