"""Checkpoints with something else in one of their places: each is read, or refused in one sentence."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtimes.base.errors import UserError
from tests.xl_export.importers.files.test_fairseq import write
from tests.xl_export.importers.files.test_state_dicts import CASES
from tests.xl_export.importers.oracles import DATA
from xl_export.importers import FORMATS
from xl_export.importers.formats import open_source, recognise
from xl_export.importers.pickle.values import Foreign
from xl_export.importers.shared.checkpoint import ImportOptions, Source
from xl_export.importers.shared.settings import Settings

LENGTHS = {"mem_len": 9, "mask": "full", "clamp_len": 0}


def opened(folder: str) -> Callable[[Path], tuple[Source, ImportOptions]]:
    vocab = DATA / folder / "vocab.txt"
    return lambda _: (open_source(DATA / folder), ImportOptions(vocab=vocab if vocab.exists() else None))


def bare(name: str, **settings: Any) -> Callable[[Path], tuple[Source, ImportOptions]]:
    """A checkpoint of which only the tensors are left."""

    def make(_: Path) -> tuple[Source, ImportOptions]:
        folder, state_of, vocab, *_others = CASES[name]
        chosen = Settings(segment=8, **settings).chosen("option")
        source = Source(path=folder / "state.pt", content={"model": state_of(folder)})
        return source, ImportOptions(settings=chosen, vocab=folder / vocab)

    return make


SOURCES: dict[str, Callable[[Path], tuple[Source, ImportOptions]]] = {
    "kimiyoung": opened("kimiyoung-wt103-large"),
    "nvidia": opened("nvidia-wt103-base"),
    "huggingface": opened("hf-wt103/pretrained"),
    "adaptive-span": opened("adaptive-span-persistent"),
    "adaptive-io": opened("variants/adaptive-span-io"),
    "shaw": opened("variants/kimiyoung-shaw"),
    "per-layer": opened("variants/kimiyoung-per-layer"),
    "fairseq": lambda folder: (open_source(write(folder)), ImportOptions()),
    "bare": bare("one table", cutoffs=(10, 25), **LENGTHS),
    "bare-nvidia": bare("nvidia", cutoffs=(93, 189, 301), **LENGTHS),
    "bare-huggingface": bare("huggingface", **LENGTHS),
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
    source, options = SOURCES[kind](tmp_path)
    draw, format_, messages = random.Random(kind), FORMATS[recognise(source)].project, []
    for _ in range(count):
        changed = Source(path=source.path, content=mutate(source.content, draw))
        try:
            if format_.recognises(changed):
                checkpoint = format_.read(changed, options)
                assert all(np.isfinite(tensor.numpy()).all() for tensor in checkpoint.tensors.values())
        except UserError as error:
            messages.append(str(error))
    assert all(message.isprintable() and len(message) < 600 for message in messages)
    assert len(messages) >= count // 20
