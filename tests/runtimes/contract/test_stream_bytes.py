"""What `info` says a stream takes is what a session holds for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from runtimes import Memory, open_session
from runtimes.contract.precision import MemoryPrecision
from runtimes.contract.spec import load_spec
from runtimes.contract.tensors import Form
from runtimes.sessions.open import describe
from runtimes.tasks.describe import describe_lines
from tests.architectures import ARCHITECTURES
from tests.nightly import every
from tests.streams import rows
from xl_export.artefact.export import export

BATCH = 3
KINDS = (
    "transformer-xl",
    "adaptive-softmax",
    "all-attention-groups",
    "head-split",
    "per-layer",
)  # the last without memory


@pytest.fixture(scope="module")
def folders(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folders(kind, form, memory precision)`: an artefact, exported once."""
    made: dict[Any, Path] = {}

    def of(kind: str, form: Form, precision: MemoryPrecision) -> Path:
        if kind not in made:
            made[kind] = make_run(**ARCHITECTURES[kind])
        if (kind, form, precision) not in made:
            out = tmp_path_factory.mktemp("artefact") / "artefact"
            made[kind, form, precision] = export(made[kind], out, memory=form, memory_precision=precision)
        return made[kind, form, precision]

    return of


def _bytes(*sets: dict[str, np.ndarray]) -> int:
    """Of all arrays in some sets, each counted once."""
    return sum(
        array.nbytes for array in {id(array): array for arrays in sets for array in arrays.values()}.values()
    )


# Each value of each parameter by default; the other cases are slow.
CASES = [
    pytest.param(kind, form, precision, marks=pytest.mark.slow if k % 3 != f or (k + f) % 3 != p else ())
    for k, kind in enumerate(KINDS)
    for f, form in enumerate(get_args(Form))
    for p, precision in enumerate(get_args(MemoryPrecision))
    if precision != "int8" or form == "ring"
]


@pytest.mark.parametrize(("kind", "form", "precision"), CASES)
def test_info_prints_the_bytes_that_a_session_holds(
    kind: str, form: Form, precision: MemoryPrecision, folders: Callable[..., Path], tokens: np.ndarray
) -> None:
    folder = folders(kind, form, precision)
    facts, spec, session = describe(folder), load_spec(folder), open_session(folder)

    def state(memory: Memory) -> int:
        return memory.positions.nbytes + _bytes(memory.tensors)

    memory = session.start(BATCH)
    assert state(memory) == BATCH * facts["bytes_per_stream"] == BATCH * spec.bytes_per_stream
    types = {"fp32": {"float32"}, "fp16": {"float16"}, "int8": {"int8", "float32"}}[precision]
    assert {array.dtype.name for array in memory.tensors.values()} == types
    for at in range(0, 40, 8):
        _, memory = session.step(rows(tokens, BATCH, 40)[:, at : at + 8], memory)
    assert state(memory) == state(memory.copy()) == BATCH * facts["bytes_per_stream"]
    running = memory.positions.nbytes + _bytes(memory.tensors, memory.binding._spare)
    assert running == BATCH * facts["running_bytes_per_stream"]
    whole = state(open_session(folders(kind, form, "fp32")).start(1))
    assert whole == facts["fp32_bytes_per_stream"]
    line = next(line for line in describe_lines(facts) if line.startswith("memory "))
    assert f"{facts['bytes_per_stream']:,} bytes per stream" in line
    assert ("while a session runs" in line) == (running > BATCH * facts["bytes_per_stream"])
    assert (f" for {whole:,} in fp32" in line) == (precision != "fp32")


@pytest.mark.parametrize(
    ("form", "precision"),
    every(3, [("ring", "int8"), *((f, name) for f in get_args(Form) for name in ("fp32", "fp16"))]),
)
def test_groups_of_heads_save_the_stated_bytes(
    form: Form, precision: MemoryPrecision, folders: Callable[..., Path]
) -> None:
    folder = folders("all-attention-groups", form, precision)
    facts, memory = describe(folder), open_session(folder).start(1)
    model, rule = facts["model"], facts["rule"]
    slots, width = (
        rule["mem_len"] + (rule["segment"] if form == "ring" else 0),
        2 * model["heads"] * model["head_dim"],
    )
    each = {"fp32": 4, "fp16": 2, "int8": 1 + 4 / model["head_dim"]}[precision]  # a scale for K bytes
    numbers = model["layers"] * slots * (model["d_model"] if form == "hidden" else width)
    whole = 8 + round(numbers * each)
    assert facts["bytes_saved_by_spans"] == whole - memory.positions.nbytes - _bytes(memory.tensors)
    assert (facts["bytes_saved_by_spans"] > 0) == (form != "hidden")
    assert (len(memory.tensors) > 2 * model["layers"]) == (form != "hidden")  # more than one group in a layer
