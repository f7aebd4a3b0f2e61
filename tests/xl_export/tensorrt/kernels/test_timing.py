"""The plugin's kernels are timed in the middle of a stream, through a stand-in for the CUDA driver.

No kernel is compiled or run, and the times are made up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.engine import Gpu, Profile, load_engine
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH, load_spec
from tests import fake_gpu
from tests.architectures import ARCHITECTURES
from tests.xl_export.tensorrt.kernels.test_driver import FakeDriver
from xl_export.artefact.export import export
from xl_export.tensorrt.kernels import driver as module
from xl_export.tensorrt.kernels import timing
from xl_export.tensorrt.kernels.compile import JOINS, Kernel, Sizes, Tactic, tactics
from xl_export.tensorrt.kernels.timing import Choice, Shape, attention_shapes, choose, default
from xl_export.tensorrt.naive import naive_relative_attention
from xl_export.tensorrt.network import read_model
from xl_export.tensorrt.operator import Attributes

GPU = Gpu(name="A GPU", compute_capability="8.0")
PROFILES = (
    Profile(name="segment", batch=(1, 2, 4), tokens=(1, 24, 24)),
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


class Timed(FakeDriver):
    """The joining kernel answers what the naive operator does. A step takes as long as `took` says of the
    tiles of its two kernels. The answer has a NaN if `broken` holds for them.
    """

    took: Callable[[int, int], float] = staticmethod(lambda tile, join: 100 / tile + join)
    broken: Callable[[int, int], bool] = staticmethod(lambda tile, join: False)

    def __init__(self) -> None:
        super().__init__()
        self.tiles: list[int] = []
        self.firsts: list[np.ndarray] = []
        self.answers: dict[int, np.ndarray] = {}

    def cuDriverGetVersion(self) -> tuple[Any, ...]:  # noqa: N802 (CUDA's name)
        return self.result, 13010

    def cuLaunchKernel(self, function: tuple[str, str], *given: Any) -> tuple[Any, ...]:  # noqa: N802
        self.tiles.append(int(function[1].split("// tile ")[1].split()[0]))
        return super().cuLaunchKernel(function, *given)

    def cuEventElapsedTime(self, *events: Any) -> tuple[Any, ...]:  # noqa: N802
        return self.result, self.took(*self.tiles[-2:])

    def execute(
        self, name: str, ptx: str, grid: tuple[int, int, int], values: Sequence[int], shared: int
    ) -> None:
        (self._join if name == "join_parts" else self._attend)(grid, values)

    def _array(self, address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.memory.download(address, size).view(dtype).reshape(shape)

    def _attend(self, grid: tuple[int, ...], values: Sequence[int]) -> None:
        *addresses, T, J, _, _ = values
        assert (grid[0], J) == (6, 88)
        self.firsts.append(self._array(addresses[3], (3,), "i4").copy())
        slots = self._array(addresses[10], (3,), "i4")
        assert ((slots >= 0) & (slots + T <= J)).all()
        one = shape(T)
        if T not in self.answers:
            arrays = [
                self._array(at, array.shape, array.dtype.name)
                for at, array in zip(addresses, one.inputs().values(), strict=True)
            ]
            self.answers[T] = naive_relative_attention(
                *arrays, attributes=one.attributes, mem_len=one.mem_len
            )

    def _join(self, grid: tuple[int, ...], values: Sequence[int]) -> None:
        _, _, _, rows, _, out = values
        answer = self.answers[rows // 6].reshape(rows, 16).copy()
        if self.broken(*self.tiles[-2:]):
            answer[-1, -1] = np.nan
        self.memory.upload(out, np.ascontiguousarray(answer, np.float16).reshape(-1).view(np.uint8))


def text_of(tactic: Tactic, fixed: Any, **gpu: Any) -> Kernel:
    """PTX that declares the arguments of a tactic's kernel, and has its tile in a comment."""
    attends = ["u64"] * 11 + ["u32"] * 2 + ["u64"] * 2
    kinds = ["u64"] * 3 + ["u32"] * 2 + ["u64"] if tactic.kernel == "join_parts" else attends
    declared = ",\n".join(f".param .{kind} p{n}" for n, kind in enumerate(kinds))
    threads = 32 * tactic.warps
    ptx = f".entry {tactic.kernel}({declared})\n.reqntid {threads} // tile {tactic.block_t}\n{{}}"
    return Kernel(name=tactic.kernel, ptx=ptx, threads=threads, shared_bytes=0, block_t=tactic.block_t)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Timed:
    made = Timed()
    monkeypatch.setattr(module, "import_module", lambda name: made)
    monkeypatch.setattr(module, "compile_kernel", text_of)
    monkeypatch.setattr(timing, "code", lambda: "this code")
    monkeypatch.setattr(timing, "REPEATS", timing.UNTIMED + 1)
    return made


def test_the_fastest_kernels_are_chosen_with_a_full_memory(fake: Timed) -> None:
    wide = shape(tokens=24)
    (choice,) = choose([wide], GPU)
    assert (choice.tactic.kernel, choice.tactic.block_t) == ("segment_attention", 16)
    assert (choice.join, choice.milliseconds) == (JOINS[0], 100 / 16 + 1)
    assert len(fake.firsts) >= 3 * timing.REPEATS
    assert np.min(fake.firsts) >= wide.mem_len + wide.keys  # TensorRT's own inputs are zeros
    assert (fake.addresses, fake.modules) == (set(), [])
    fake.took = lambda tile, join: tile + 1 / join  # type: ignore[method-assign]
    (other,) = choose([wide], GPU)
    assert (other.tactic.block_t, other.join) == (1, JOINS[1])
    assert other.facts.tile == (other.tactic.block_t, other.tactic.block_j)


def test_kernels_that_answer_wrong_are_not_chosen(fake: Timed, capsys: pytest.CaptureFixture[str]) -> None:
    fake.broken = lambda tile, join: tile == 16 or join == 1  # type: ignore[method-assign]
    (choice,) = choose([shape(24)], GPU)
    assert (choice.tactic.kernel, choice.join.block_t) == ("token_attention", 16)
    said = capsys.readouterr().err
    assert "wrong answers on A GPU (compute capability 8.0), for 24 tokens and 88 keys are not used" in said
    assert "segment_attention in tiles of 16 x 32, joined by 16" in said


def test_without_a_right_kernel_nothing_is_chosen(fake: Timed) -> None:
    fake.broken = lambda tile, join: True  # type: ignore[method-assign]
    with pytest.raises(ArtefactError, match=r"every kernel .* wrong answers on A GPU .*--attention native"):
        choose([shape(24)], GPU)


def test_timings_are_kept_by_gpu_driver_code_and_shape(
    fake: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, shapes = tmp_path / "tactics.json", [shape(1, profile="token")]
    chosen = choose(shapes, GPU, file=file)
    assert [choice.shape for choice in chosen] == shapes

    def launches(*given: Shape, gpu: Gpu = GPU) -> int:
        before = len(fake.tiles)
        choose(given or shapes, gpu, file=file)
        return len(fake.tiles) - before

    assert choose(shapes, GPU, file=file) == chosen
    assert launches() == 0
    assert launches(*shapes, shape(2)) > 0
    assert launches(shape(2)) == 0
    assert launches(gpu=Gpu(name="Another GPU", compute_capability="8.0")) > 0
    assert launches() == 0
    monkeypatch.setattr(timing, "driver_version", lambda: "580.65.06")
    assert launches() > 0
    monkeypatch.setattr(timing, "code", lambda: "newer code")
    assert launches() > 0
    monkeypatch.setattr(timing, "driver_version", lambda: None)  # as on a Jetson: CUDA counts
    assert launches() > 0
    assert launches() == 0
    monkeypatch.setattr(fake, "cuDriverGetVersion", lambda: (fake.result, 13020))
    assert launches() > 0
    assert launches() == 0
    file.write_text(json.dumps({"schema": 1, "timed": [{"gpu": "A GPU"}]}))
    with pytest.raises(ConfigError, match=r"is not a file of timed kernels .*; remove it, or give another"):
        choose(shapes, GPU, file=file)


def test_without_a_driver_the_defaults_are_taken_and_said(
    fake: Timed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.result = fake.CUresult.CUDA_ERROR_NO_DEVICE
    shapes = [shape(24), shape(1, profile="token"), shape(200, keys=264)]
    chosen = choose(shapes, GPU, file=tmp_path / "tactics.json")
    assert chosen == tuple(default(one, 80) for one in shapes)
    assert [(c.tactic.kernel, c.tactic.block_t, c.join.block_t, c.milliseconds) for c in chosen] == [
        ("segment_attention", 16, 16, None),
        ("token_attention", 1, 1, None),
        ("segment_attention", 128, 16, None),
    ]
    assert default(shape(24), 75).tactic == tactics(16, 75)[0]  # no tensor cores
    # Thor, whose tiles of 64 queries and more do not fit.
    assert (default(shape(128), 110).tactic.block_t, default(shape(24), 110).tactic.block_t) == (32, 16)
    said = capsys.readouterr().err
    assert said.startswith(
        "the plugin's kernels were not timed, and its defaults are built in: no NVIDIA GPU"
    )
    assert list(tmp_path.iterdir()) == []


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
    profiles = tuple(dataclasses.replace(profile, tokens=(1, 8, 8)[:3]) for profile in PROFILES)
    profiles = (profiles[0], PROFILES[1])
    shapes = attention_shapes(read_model(tmp_path / "a" / GRAPH), spec, profiles)
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
    tactic, join = tactics(16, 80)[0], JOINS[0]
    facts = tuple(
        Choice(shape=shape(), tactic=tactic, join=join, milliseconds=ms).facts for ms in (0.5, None)
    )
    folder = fake_gpu.make_engine(artefacts["shift"], tmp_path / "engine", attention="plugin", tactics=facts)
    loaded, _ = load_engine(folder)
    assert loaded.tactics == facts
