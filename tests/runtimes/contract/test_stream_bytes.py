"""What `info` says a stream takes is what a session holds for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes import Memory, open_session
from runtimes.contract.precision import MemoryPrecision
from runtimes.contract.tensors import Form
from runtimes.sessions.open import describe
from tests.architectures import ARCHITECTURES
from tests.streams import rows
from xl_export.artefact.export import export

BATCH = 3
CASES = [
    ("transformer-xl", "ring", "fp32"),
    ("all-attention-groups", "ring", "int8"),
    ("transformer-xl", "shift", "fp16"),
    ("per-layer", "hidden", "fp32"),  # whose last layer has no memory
]


def held(memory: Memory, *others: dict[str, np.ndarray]) -> int:
    """The bytes of all arrays, each counted once."""
    sets = (memory.tensors, *others)
    arrays = {id(array): array for tensors in sets for array in tensors.values()}
    return memory.positions.nbytes + sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize(("kind", "form", "precision"), CASES)
def test_info_prints_the_bytes_that_a_session_holds(
    kind: str,
    form: Form,
    precision: MemoryPrecision,
    make_run: Callable[..., Path],
    artefacts: dict[str, Path],
    tokens: np.ndarray,
    tmp_path: Path,
) -> None:
    run = make_run(**ARCHITECTURES[kind])
    folder = export(run, tmp_path / "artefact", memory=form, memory_precision=precision)
    facts, session = describe(folder), open_session(folder)
    memory = session.start(BATCH)
    assert held(memory) == BATCH * facts["bytes_per_stream"]
    types = {"fp32": {"float32"}, "fp16": {"float16"}, "int8": {"int8", "float32"}}[precision]
    assert {array.dtype.name for array in memory.tensors.values()} == types
    for at in range(0, 40, 8):
        _, memory = session.step(rows(tokens, BATCH, 40)[:, at : at + 8], memory)
    assert held(memory) == held(memory.copy()) == BATCH * facts["bytes_per_stream"]
    assert held(memory, memory.binding._spare) == BATCH * facts["running_bytes_per_stream"]
    if kind == "transformer-xl":
        assert held(open_session(artefacts[form]).start(1)) == facts["fp32_bytes_per_stream"]
