"""The plugin's kernels are timed in the middle of a stream. No kernel is compiled or run here, and the times
are made up; `test_driver.py` has the launches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import ArtefactError
from runtimes.contract.engine import Gpu, Profile, load_engine
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH, load_spec
from tests import fake_gpu
from tests.architectures import ARCHITECTURES
from xl_export.artefact.export import export
from xl_export.tensorrt.kernels import timing
from xl_export.tensorrt.kernels.compile import JOINS, Sizes, Tactic, tactics
from xl_export.tensorrt.kernels.driver import Answer
from xl_export.tensorrt.kernels.timing import Choice, Shape, attention_shapes, time_shape
from xl_export.tensorrt.naive import naive_relative_attention
from xl_export.tensorrt.network import read_model
from xl_export.tensorrt.operator import Attributes

GPU = Gpu(name="A GPU", compute_capability="8.0")
PROFILES = (
    Profile(name="segment", batch=(1, 2, 4), tokens=(1, 8, 8)),
    Profile(name="token", batch=(1, 3, 3), tokens=(1, 1, 1)),
)


def shape(tokens: int = 24, **changes: Any) -> Shape:
    """An attention of 2 heads of 16 over a ring of 64 + 24 slots."""
    sizes = Sizes(
        heads=2, head_dim=16, table_heads=2, table_rows=65, bias_heads=1, bias_rows=1, persistent_rows=1
    )
    rule = MemoryRule(mem_len=64, segment=24)
    facts: dict[str, Any] = {
        "profile": "segment",
        "batch": 3,
        "tokens": tokens,
        "keys": 88,
        "mem_len": 64,
        "ring": True,
        "sizes": sizes,
        "attributes": Attributes.of(rule),
        "dtype": "float16",
    }
    return Shape(**facts | changes)


class Timed:
    """A GPU whose steps take as long as `took` says of the tiles of the two kernels. An answer has a NaN if
    `broken` holds for them.
    """

    gpu = GPU
    took: Callable[[int, int], float] = staticmethod(lambda tile, join: 100 / tile + join)
    broken: Callable[[int, int], bool] = staticmethod(lambda tile, join: False)

    def __init__(self) -> None:
        self.firsts: list[np.ndarray] = []

    def run(
        self, inputs: dict[str, np.ndarray], attributes: Attributes, *, tactic: Tactic, join: Tactic, **_: Any
    ) -> Answer:
        self.firsts.append(inputs["first"])
        assert ((inputs["slot"] >= 0) & (inputs["slot"] + inputs["query"].shape[2] <= 88)).all()
        answer = naive_relative_attention(*inputs.values(), attributes=attributes, mem_len=64)
        if self.broken(tactic.block_t, join.block_t):
            answer[-1, -1] = np.nan
        took = self.took(tactic.block_t, join.block_t)
        return Answer(answer=answer, milliseconds=(1e-9,) * timing.UNTIMED + (took,))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Timed()
    monkeypatch.setattr(timing, "run_embedded", Timed.run)
    return made


def test_the_fastest_kernels_are_chosen_with_a_full_memory(gpu: Any) -> None:
    wide = shape(tokens=24)
    choice = time_shape(gpu, wide)
    assert (choice.tactic.kernel, choice.tactic.block_t) == ("segment_attention", 16)
    assert (choice.join, choice.milliseconds) == (JOINS[0], 100 / 16 + 1)
    assert np.min(gpu.firsts) >= wide.mem_len + wide.keys  # TensorRT's own inputs are zeros
    gpu.took = lambda tile, join: tile + 1 / join
    other = time_shape(gpu, wide)
    assert (other.tactic.block_t, other.join) == (1, JOINS[1])
    assert other.facts.tile == (other.tactic.block_t, other.tactic.block_j)


def test_kernels_that_answer_wrong_are_not_chosen(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.broken = lambda tile, join: tile == 16 or join == 1
    choice = time_shape(gpu, shape(24))
    assert (choice.tactic.kernel, choice.join.block_t) == ("token_attention", 16)
    said = capsys.readouterr().err
    assert "wrong answers on A GPU (compute capability 8.0), for 24 tokens and 88 keys are not used" in said
    assert "segment_attention in tiles of 16 x 32, joined by 16" in said
    gpu.broken = lambda tile, join: True
    with pytest.raises(ArtefactError, match=r"every kernel .* wrong answers on A GPU .*--attention native"):
        time_shape(gpu, shape(24))


@pytest.mark.parametrize(
    ("name", "form", "precision"),
    [("transformer-xl", "ring", "int8"), ("all-attention-groups", "ring", "fp16"), ("shaw", "shift", "fp32")],
)
def test_the_shapes_are_those_of_the_graph(
    name: str, form: Any, precision: Any, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(**{**ARCHITECTURES[name], "d_model": 16, "head_dim": 16})
    options = {"memory": form, "precision": precision}
    spec = load_spec(export(run, tmp_path / "a", target="tensorrt", **options))  # type: ignore[arg-type]
    shapes = attention_shapes(read_model(tmp_path / "a" / GRAPH), spec, PROFILES)
    keys = {(one.profile, one.batch, one.tokens, one.keys - one.mem_len) for one in shapes}
    assert keys == {("segment", 2, 8, 8), ("token", 3, 1, 8 if form == "ring" else 1)}
    sizes = {int(state.shape[2]) for state in spec.state}
    assert {one.keys if form == "ring" else one.mem_len for one in shapes} == sizes
    assert len(sizes) == (2 if name == "all-attention-groups" else 1)
    for one in shapes:
        arrays = one.inputs()
        assert Sizes.of([array.shape for array in arrays.values()]) == one.sizes
        assert arrays["query"].dtype == ("float32" if precision == "fp32" else "float16")
        assert ("slot" in arrays) == one.ring == (form == "ring")


def test_an_engine_says_which_kernels_it_has(artefacts: dict[str, Path], tmp_path: Path) -> None:
    choice = Choice(shape=shape(), tactic=tactics(16, 80)[0], join=JOINS[0], milliseconds=0.5)
    facts = (choice.facts,)
    folder = fake_gpu.make_engine(artefacts["shift"], tmp_path / "engine", attention="plugin", tactics=facts)
    assert load_engine(folder)[0].tactics == facts
