"""Checkpoints with something else in one of their places: each is read, or refused in one sentence."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtimes.base.errors import UserError
from tests.xl_export.importers.oracles import DATA
from xl_export.importers.formats import FORMATS, open_source, recognise
from xl_export.importers.pickle.read import Foreign
from xl_export.importers.shared.checkpoint import ImportOptions, Source

SOURCES = {
    "kimiyoung": DATA / "kimiyoung-wt103-large",
    "nvidia": DATA / "nvidia-wt103-base",
    "huggingface": DATA / "hf-wt103/pretrained",
    "adaptive-span": DATA / "adaptive-span-persistent",
    "adaptive-io": DATA / "variants/adaptive-span-io",
    "shaw": DATA / "variants/kimiyoung-shaw",
    "per-layer": DATA / "variants/kimiyoung-per-layer",
}
COUNTS = [24, pytest.param(120, marks=pytest.mark.slow)]  # of mutations
JUNK = [
    None,
    True,
    0,
    -1,
    3,
    1 << 40,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    b"x",
    [],
    [1],
    [0, "a"],
    {},
    {"a": 1},
    (2, 1),
    set(),
    torch.zeros(0),
    torch.zeros(3),
    torch.zeros(2, 2, 2),
    torch.tensor(1),
    torch.zeros(4, 10).long(),
    torch.zeros(3, dtype=torch.complex64),
    Foreign("a.b"),
    Foreign("a.b", state=3),
    Foreign("a.b", state={"_modules": {"x": 1}}),
]


def holders(root: Any) -> list[Any]:
    """Every dictionary and list below `root`, optimiser states left out."""
    found, todo = [], [root]
    while todo:
        value = todo.pop()
        if isinstance(value, Foreign):
            value = value.state
        if isinstance(value, dict):
            found.append(value)
            todo += [
                inner
                for name, inner in value.items()
                if name not in ("optimizer", "optimizer_state", "scheduler_state")
            ]
        elif isinstance(value, list):
            found.append(value)
    return [holder for holder in found if holder]


def mutate(root: Any, draw: random.Random) -> Any:
    """A copy with one entry replaced, taken out or renamed."""
    root = copy.deepcopy(root)
    holder = draw.choice(holders(root))
    if isinstance(holder, list):
        holder[draw.randrange(len(holder))] = draw.choice(JUNK)
        return root
    name = draw.choice(list(holder))
    kind = draw.randrange(4)
    if kind == 0:
        del holder[name]
    elif kind == 1:
        holder[draw.choice(["x", 3, None, b"y"])] = holder.pop(name)
    else:
        holder[name] = draw.choice(JUNK)
    return root


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", SOURCES)
def test_a_mutated_checkpoint_is_read_or_refused(kind: str, count: int, tmp_path: Path) -> None:
    opened, draw = open_source(SOURCES[kind]), random.Random(kind)
    format_, vocab, messages = FORMATS[recognise(opened)], SOURCES[kind] / "vocab.txt", []
    for _ in range(count):
        changed = Source(path=opened.path, content=mutate(opened.content, draw))
        try:
            if format_.recognises(changed):
                checkpoint = format_.read(changed, ImportOptions(vocab=vocab if vocab.exists() else None))
                assert all(np.isfinite(tensor.numpy()).all() for tensor in checkpoint.tensors.values())
        except UserError as error:
            messages.append(str(error))
    assert all("\n" not in message and len(message) < 600 for message in messages)
    assert len(messages) >= count // 20
