"""Damaged artefacts under address and undefined-behaviour sanitizers: each ends in one sentence or an answer.

The damage is that of the Python package's own test. Sealed damage has hashes and digest recomputed, and gets
past them.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.architectures import ARCHITECTURES
from tests.cpp.program import DRIVER, SANITIZED, compiled
from tests.parity.operations import Program
from tests.parity.test_vocabularies import TALES, wild_texts
from tests.runtimes.contract.mutation_worker import changed, damaged_bytes, damaged_json
from tests.sealing import sealed
from xl_export.artefact.export import export

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SPEC, GRAPH, VOCAB, REFERENCE, ANSWERS = (
    "spec.json",
    "step.onnx",
    "vocab.json",
    "reference.json",
    "reference.bin",
)
Damage = tuple[str, str, dict[str, bytes]]  # kind, what, and the files that change


@pytest.fixture
def sanitized() -> Iterator[Program]:
    running = Program(compiled(DRIVER, *SANITIZED), tolerance=0)
    yield running
    assert running.close() == 0  # leaks are found at the end


def checked(program: Program, folder: Path) -> dict[str, Any]:
    """The answer of `check` after an artefact was opened anew, or the refusal."""
    program.ask("close")
    answer = program.ask("open", model=str(folder))
    return answer if "error" in answer else program.ask("check")


def damages(folder: Path, draw: np.random.Generator) -> Iterator[Damage]:
    """Byte flips, truncations and exchanged contents of every file; every value of spec.json replaced."""
    whole = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    spec, names = json.loads(whole[SPEC]), list(whole)
    for index, name in enumerate(names):
        for what, data in damaged_bytes(whole[name], whole[names[index - 1]], draw, flips=6):
            yield "bytes", f"{name}: {what}", {name: data}
    for damage in damaged_json(spec, draw):
        what, document = f"{damage!r:.80}", changed(spec, *damage)
        try:
            text = json.dumps(document).encode()
        except UnicodeEncodeError:
            continue
        yield "spec", what, {SPEC: text}
        yield "sealed spec", what, {SPEC: sealed(document, folder)}
    for name, flips in ((GRAPH, 150), (VOCAB, 60), (REFERENCE, 60), (ANSWERS, 20)):
        for what, data in damaged_bytes(whole[name], whole[SPEC], draw, flips=flips):
            yield "sealed file", f"{name}: {what}", {name: data}
    for name in (VOCAB, REFERENCE):
        document = json.loads(whole[name])
        for damage in damaged_json(document, draw):
            if draw.random() < 0.15:
                data = json.dumps(changed(document, *damage)).encode()
                yield "sealed file", f"{name}: {damage!r:.80}", {name: data}


@pytest.mark.parametrize("name", ["ring", "shift", "adaptive-softmax"])
def test_no_damage_crashes_it(
    name: str,
    sanitized: Program,
    artefacts: dict[str, Path],
    make_run: Callable[..., Path],
    tmp_path: Path,
) -> None:
    if name in artefacts:
        artefact = artefacts[name]
    else:
        artefact = export(make_run(**ARCHITECTURES[name]), tmp_path / "artefact")
    folder = Path(shutil.copytree(artefact, tmp_path / "copy"))
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    sanitized.ask("open", model=str(folder))
    assert sanitized.ask("check")["passed"]
    counts: Counter[tuple[str, str]] = Counter()
    for kind, what, files in damages(artefact, np.random.default_rng(0)):
        for file, data in files.items():
            (folder / file).write_bytes(data)
            if kind == "sealed file":
                (folder / SPEC).write_bytes(sealed(json.loads(whole[SPEC]), folder, file))
        answer = checked(sanitized, folder)  # each refusal is one sentence
        outcome = "refused" if "error" in answer else "passed" if answer["passed"] else "failed"
        if outcome != "refused":
            sanitized.ask("start", stream="a")
            sanitized.ask("generate", stream="a", tokens=[0, 1], max_tokens=3, temperature=0)
        # What is not sealed never gets as far as other numbers; the last line end of spec.json means nothing.
        assert outcome != "failed" or kind.startswith("sealed"), (kind, what, answer)
        counts[kind, outcome] += 1
        for file in (*files, SPEC):
            (folder / file).write_bytes(whole[file])
    print(name, sum(counts.values()), dict(counts))
    assert counts["bytes", "refused"] > 80, counts
    assert counts["spec", "refused"] > 100, counts
    assert counts["sealed spec", "refused"] > 100, counts
    assert counts["sealed file", "refused"] > 50, counts
    assert counts["sealed file", "failed"] > 0, counts  # some damage did get as far as the numbers


def test_damaged_streams_texts_and_ort_graphs(
    sanitized: Program, artefacts: dict[str, Path], run: Path, tmp_path: Path
) -> None:
    """What the artefacts' damage does not touch: saved streams, texts and tokens, and graphs of `--ort`."""
    draw, ring = np.random.default_rng(2), artefacts["ring"]
    path = tmp_path / "saved"
    sanitized.ask("open", model=str(ring))
    sanitized.ask("start", stream="a", rows=2)
    sanitized.ask("predict", stream="a", tokens=[[0], [1]])
    sanitized.ask("save", stream="a", file=str(path))
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    numbers = whole[8 + int.from_bytes(whole[:8], "little") :]
    counts: Counter[bool] = Counter()

    def load(content: bytes) -> None:
        path.write_bytes(content)
        refused = "error" in sanitized.ask("load", stream="b", file=str(path))
        if not refused:
            sanitized.ask("predict", stream="b", tokens=[[0], [1]])
        counts[refused] += 1

    for damage in damaged_json(header, draw):
        text = json.dumps(changed(header, *damage)).encode(errors="replace")
        load(len(text).to_bytes(8, "little") + text + numbers)
    for _, data in damaged_bytes(whole, whole[::-1], draw, flips=100):
        load(data)
    assert counts[True] > 100, counts
    for folder in (ring, TALES):
        sanitized.ask("open", model=str(folder))
        for text in wild_texts(40):
            sanitized.ask("encode", text=text)
            sanitized.ask("decode", tokens=draw.integers(-1, 60, 20).clip(0).tolist())
    folder = export(run, tmp_path / "ort", memory="shift", storage="ort")
    spec, graph = json.loads((folder / SPEC).read_text()), (folder / "step.ort").read_bytes()
    for _, data in damaged_bytes(graph, whole, draw, flips=60):
        (folder / "step.ort").write_bytes(data)
        (folder / SPEC).write_bytes(sealed(spec, folder, "step.ort"))
        checked(sanitized, folder)
