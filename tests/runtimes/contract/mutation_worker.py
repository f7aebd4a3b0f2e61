"""Damages an artefact in many ways and checks each, for `test_mutations.py`, which names its arguments.

It prints one JSON line for each damage that is tried, which is one of EVERY.

It runs as a process of its own, so that a crash or a hang of ONNX Runtime is seen by the test that started
it. Sealed damage has hashes and digest recomputed: it stands for a writer with a bug, and gets past the
hashes.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import runtimes
from runtimes.contract.spec import ANSWERS, GRAPH, ORT_GRAPH, REFERENCE, SPEC, VOCAB
from tests.sealing import sealed

VALUES: tuple[Any, ...] = (
    None,
    -1,
    0,
    1 << 24,
    10**400,
    1e300,
    True,
    "",
    "x",
    "../x",
    "é\ud800" * 300,
    [],
    [[]],
    {},
    {"a": 1},
)
Damage = Iterator[tuple[str, bytes]]


def damaged_bytes(data: bytes, other: bytes, rng: np.random.Generator, *, flips: int) -> Damage:
    """Byte flips (also of the first bytes, where headers are), truncations, appended, emptied, another file's
    content.
    """
    for number in range(flips):
        at = int(rng.integers(len(data) if number % 3 else min(64, len(data))))
        changed = bytes([data[at] ^ int(rng.integers(1, 256))])
        yield f"flip at {at}", data[:at] + changed + data[at + 1 :]
    for keep in (1, len(data) // 3, len(data) - 9, len(data) - 1):
        yield f"truncated to {keep}", data[:keep]
    yield "appended", data + b"\0"
    yield "twice", data + data
    yield "empty", b""
    yield "another file's content", other


def damaged_json(document: dict[str, Any], rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Every value replaced by some unlikely ones, every key dropped, a key added to every object; each as the
    arguments of `changed`.
    """
    for path in paths(document):
        yield from ((path, VALUES[choice]) for choice in rng.permutation(len(VALUES))[:4])
        yield (path,)
    for path in [(), *paths(document)]:
        if isinstance(at(document, path), dict):
            yield (*path, "surprise"), 1


def paths(node: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values below the top of a JSON document."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path for key, value in items for path in [(*prefix, key), *paths(value, (*prefix, key))]]


def at(node: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


def changed(document: dict[str, Any], path: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """A copy with one value replaced, or dropped when none is given."""
    document = copy.deepcopy(document)
    parent = at(document, path[:-1])
    if value:
        parent[path[-1]] = value[0]
    else:
        del parent[path[-1]]
    return document


def outcome(folder: Path) -> str:
    """How a check ends: passed, failed, refused (with one sentence), or a bug with its traceback."""
    try:
        report = runtimes.check(folder, threads=1)
    except runtimes.UserError as error:
        message = str(error)
        return (
            "refused"
            if message and "\n" not in message and len(message) < 1000
            else f"bug: not one sentence: {message}"
        )
    except BaseException:
        return "bug: " + traceback.format_exc()
    return "passed" if report.passed else "failed"


def run(artefact: Path, folder: Path, rng: np.random.Generator, every: int) -> None:
    """Applies each damage, or one of `every`, to `folder`, a copy of the artefact, and undoes it.

    It prints what came of it.
    """
    shutil.copytree(artefact, folder)
    whole = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    spec = json.loads(whole[SPEC])
    turns = Counter[str]()

    def report(kind: str, what: str, name: str, damage: Callable[[], bytes], *, seal: bool = False) -> None:
        turns[kind] += 1
        if turns[kind] % every:
            return
        print(json.dumps({"begin": f"{kind} {what}"}), flush=True)
        (folder / name).write_bytes(damage())
        if seal:
            (folder / SPEC).write_bytes(sealed(spec, folder, name))
        print(json.dumps({"kind": kind, "what": what, "outcome": outcome(folder)}), flush=True)
        for each in (name, SPEC):
            (folder / each).write_bytes(whole[each])

    print(json.dumps({"kind": "whole", "what": "untouched", "outcome": outcome(folder)}), flush=True)
    names = list(whole)
    for index, name in enumerate(names):
        for what, data in damaged_bytes(whole[name], whole[names[index - 1]], rng, flips=12):
            report("bytes", f"{name}: {what}", name, lambda data=data: data)  # type: ignore[misc]
    for damage in damaged_json(spec, rng):
        what = f"{damage!r:.80}"
        damaged = partial(changed, spec, *damage)
        report("spec", what, SPEC, lambda damaged=damaged: json.dumps(damaged()).encode())  # type: ignore[misc]
        report("sealed spec", what, SPEC, lambda damaged=damaged: sealed(damaged(), folder))  # type: ignore[misc]
    graph = GRAPH if GRAPH in whole else ORT_GRAPH
    for name, flips in ((graph, 60), (VOCAB, 20), (REFERENCE, 30), (ANSWERS, 10)):
        for what, data in damaged_bytes(whole[name], whole[SPEC], rng, flips=flips):
            report("sealed file", f"{name}: {what}", name, lambda data=data: data, seal=True)  # type: ignore[misc]


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), np.random.default_rng(int(sys.argv[3])), int(sys.argv[4]))
