"""A step that keeps the state of a stream in its module is refused by name, and a trace changes no module."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xl_export
from runtimes import check
from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MemoryRule
from xl_export.tracing.module import ModuleStep
from xl_export.tracing.state import Snapshot, refuse_state, restored

pytestmark = pytest.mark.usefixtures("fast_traces")
WIDTH = 3


class Noting(nn.Module):
    """A running sum of what `note` returns for its inputs and its module, at any position."""

    def __init__(self, note: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inputs = xl_export.features(WIDTH)
        self.note = note
        self.part = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(()))
        self.table: Tensor | None = None
        self.seen: Any = None
        self.calls = 0
        self.kept = SimpleNamespace(keys=[], by_name={}, distribution=None)
        self.log: list[Tensor] = []
        self.array = np.zeros(2)

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, WIDTH)]

    def step(self, x: Tensor, positions: Tensor, memory: Any) -> Any:
        y = self.part(self.note(self, x, positions))
        total = y.cumsum(dim=1) + torch.where(positions[:, :1] > 0, memory[0], 0.0)[:, None]
        return total, [total[:, -1]]


def anneals(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.steps += 1
    return x / (1 + torch.relu(module.steps - 600))


def counts(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.calls += 1
    return x if module.calls < 600 else -x


def sums(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.seen = x[:, -1:] if module.seen is None else module.seen + x[:, -1:]
    return x + module.seen


def remembers(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    before, module.seen = module.seen, x[:, -1:]
    return x if before is None else x + before


def sums_since_zero(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    """Starts again at position 0, as a module that is told of each episode."""
    if bool((positions[:, 0] == 0).all()):
        module.seen = torch.zeros_like(x[:, :1])
    module.seen = module.seen + x.sum(dim=1, keepdim=True)
    return x + module.seen


def caches(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.kept.keys.append(x.mean(dim=1, keepdim=True))
    return x + torch.stack(module.kept.keys[-3:]).mean(dim=0)


def smooths(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.kept.by_name["mean"] = 0.5 * module.kept.by_name.get("mean", 0) + x.mean()
    return x - module.kept.by_name["mean"]


def writes_weights(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.part.bias += 0.1
    return x


def writes_an_array(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.array += 1
    return x + float(module.array[0] > 600)


def in_a_part(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.part.last = getattr(module.part, "last", 0) + 1
    return x


@pytest.mark.parametrize(
    ("note", "name"),
    [
        (anneals, "steps"),
        (counts, "calls"),
        (sums, "seen"),
        (remembers, "seen"),
        (sums_since_zero, "seen"),
        (caches, "kept.keys"),
        (smooths, "kept.by_name"),
        (writes_weights, "part.bias"),
        (writes_an_array, "array"),
        (in_a_part, "part.last"),
    ],
)
@pytest.mark.parametrize("rows", [None, 1])
def test_state_outside_of_the_memory_is_refused_by_name(note: Any, name: str, rows: int | None) -> None:
    with pytest.raises(ArtefactError, match=f"keeps memory in the attribute `{name}`"):
        refuse_state(ModuleStep(Noting(note).eval(), rows), 2)


class Attribute(nn.Module):
    """Keeps the memory of so many rows in an attribute, and returns another one, or none."""

    def __init__(self, rows: int | None, returned: int) -> None:
        super().__init__()
        self.inputs = xl_export.features(WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.h = None if rows is None else torch.zeros(rows, WIDTH)
        self.returned = returned

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, WIDTH)]

    def step(self, x: Tensor, positions: Tensor, memory: Any) -> Any:
        self.h = self.cell(x[:, 0], self.h)
        return self.h[:, None], [self.h] * self.returned


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("returned", [0, 1, 2])
def test_a_memory_in_an_attribute_is_named_whatever_else_is_wrong(
    rows: int | None, returned: int, tmp_path: Path
) -> None:
    with pytest.raises(ArtefactError, match=r"Attribute keeps memory in the attribute `h`, .* from `step`"):
        xl_export.trace(Attribute(rows, returned), tmp_path / "a", rule=MemoryRule(mem_len=8, segment=1))


class Moved(Attribute):
    """Fills the attribute with the memory first, as the guide advises."""

    def step(self, x: Tensor, positions: Tensor, memory: Any) -> Any:
        self.h = memory[0]
        return super().step(x, positions, memory)


def test_a_memory_that_is_moved_through_an_attribute_is_traced(tmp_path: Path) -> None:
    rule = MemoryRule(mem_len=8, segment=1)
    artefact = xl_export.trace(Moved(None, 1), tmp_path / "a", rule=rule, without={"padding"})
    assert check(artefact).passed


def table_of(count: int) -> Tensor:
    return torch.arange(count) ** 0.5


def fills_a_table(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    if module.table is None:
        module.table = table_of(WIDTH)
    return x + module.table


def grows_a_table(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    last = int(positions.max())
    if module.table is None or len(module.table) <= last:
        module.table = table_of(2 * last + 1)
    return x + module.table[positions][..., None]


def notes_its_last_inputs(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.seen = x
    module.kept.by_name["size"] = x.shape[1]
    module.kept.keys[:] = [x.mean()]
    module.kept.distribution = torch.distributions.Categorical(logits=x)
    return x


def writes_the_same_again(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    module.steps.fill_(0.5)
    return x * module.steps


def draws(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    """It is refused elsewhere, for what it does."""
    module.seen = torch.rand_like(x)
    return x + module.seen


@pytest.mark.parametrize(
    "note", [fills_a_table, grows_a_table, notes_its_last_inputs, writes_the_same_again, draws]
)
def test_changes_that_no_later_step_reads_are_harmless(note: Any) -> None:
    refuse_state(ModuleStep(Noting(note).eval()), 2)


@pytest.mark.parametrize(
    "note", [caches, smooths, fills_a_table, anneals, notes_its_last_inputs, writes_an_array]
)
def test_a_module_is_restored(note: Any) -> None:
    """Also one that has no deep copy: with a lock, and with a tensor that has a history."""
    module = Noting(note).train()
    module.part.eval()
    module.lock = threading.Lock()  # type: ignore[assignment]
    module.log = [2 * module.part.weight]
    before = Snapshot(module)
    with restored(module):
        step = ModuleStep(module.eval())
        step({"input": torch.ones(2, 2, WIDTH)}, torch.arange(2).expand(2, -1), step.start(2))
        module.other = 1  # type: ignore[assignment]
        assert before.changed(Snapshot(module))
    assert before.changed(Snapshot(module)) == []
    assert module.training
    assert not module.part.training
    assert module.kept.keys == []


def test_a_module_that_fills_a_table_is_traced_and_unchanged(tmp_path: Path) -> None:
    module = Noting(fills_a_table)
    before = Snapshot(module)
    artefact = xl_export.trace(
        module, tmp_path / "a", rule=MemoryRule(mem_len=4, segment=2), without={"padding"}
    )
    assert check(artefact).passed
    assert before.changed(Snapshot(module)) == []
    assert module.table is None
