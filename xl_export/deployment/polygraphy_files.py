"""Inputs and answers of an artefact as files that NVIDIA's `polygraphy run` reads.

With them that tool compares any runtime that it knows, TensorRT above all, with the answers of the artefact
on ONNX Runtime. The files are JSON in the layout of Polygraphy 0.49 and newer (`polygraphy/json/serde.py`).
"""

from __future__ import annotations

import base64
import io
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.base.files import write_json
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.base.kinds import POLYGRAPHY
from runtimes.contract.memory import Memory
from runtimes.contract.precision import MemoryType
from runtimes.contract.spec import GRAPH, load_language_model, refuse_unless_one_onnx
from runtimes.sessions.onnx_runtime import OrtSession

INPUTS = "inputs.json"
ANSWERS = "answers.json"
COMMANDS = "polygraphy.txt"
RUNNER = "xl-export"  # what the tool calls the answers of these files
SEED = 0
# Relative tolerance by type of the memory, whose values have any size; for int8, the tolerance of the scales.
RELATIVE: dict[MemoryType, float] = {"float32": 1e-4, "float16": 1e-2, "int8": 1e-4}


def write_polygraphy_files(artefact: Path, out: Path, *, batch: int = 2, force: bool = False) -> list[str]:
    """Writes inputs, answers and command lines to the folder `out`; returns what the steps are, in words.

    There are three: a segment from empty memory, and with full memory a segment and a single token, each of
    `batch` rows with random tokens. The answers hold the memory after each of them too. Raises UserError
    if `out` exists, unless `force` is set, and for a damaged artefact.
    """
    refuse_existing(out, POLYGRAPHY, force=force, sources=[artefact])
    spec = load_language_model(artefact)
    refuse_unless_one_onnx(spec, artefact, what="polygraphy")
    session = OrtSession.open(artefact, kernel="standard")
    T = spec.rule.segment
    V = spec.model.vocab_size
    draw = np.random.default_rng(SEED)
    memory = session.start(batch)
    named: list[str] = []
    iterations: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
    for name, length in (("a segment from empty memory", T), ("a segment", T), ("a single token", 1)):
        if iterations:
            length = _fill(session, memory, draw, following=length)
            name += f" after {int(memory.positions[0])} tokens"
        named.append(f"{name}, {batch} x {length}")
        iterations.append(recorded_step(session, memory, draw.integers(0, V, (batch, length))))
    with atomic_folder(out, POLYGRAPHY, force=force, sources=[artefact]) as folder:
        write_json(
            folder / INPUTS,
            [{name: _array(array) for name, array in inputs.items()} for inputs, _ in iterations],
        )
        write_json(folder / ANSWERS, _results([answers for _, answers in iterations]))
        (folder / COMMANDS).write_text("\n".join(command_lines(artefact, session)) + "\n", encoding="utf-8")
    return named


def command_lines(artefact: Path, session: OrtSession) -> list[str]:
    """Lines for `polygraphy run`, in the folder of the files: the graph on ONNX Runtime, and an engine.

    A ring has no line for engines: the tool binds inputs and outputs at different addresses.
    """
    spec = session.spec
    relative = RELATIVE[spec.state_dtype]
    files = ["--load-inputs", INPUTS, "--load-outputs", ANSWERS]
    # A value between two bytes may go either way.
    in_bytes = [f"{state.present}:1" for state in spec.state if ELEMENT_TYPES[state.dtype].scaled]
    tolerances = ["--atol", f"{spec.tolerance:g}", *in_bytes, "--rtol", f"{relative:g}"]
    graph = str((artefact / GRAPH).resolve())
    lines = [["polygraphy", "run", graph, "--onnxrt"]]
    if spec.form == "shift":
        lines.append(["polygraphy", "run", "ENGINE/step.plan", "--model-type", "engine", "--trt"])
    return [shlex.join([*line, *files, *tolerances]) for line in lines]


def recorded_step(
    session: OrtSession, memory: Memory, tokens: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The inputs and outputs of the graph in one step on tokens [B, T], by name; advances the memory."""
    batch, length = tokens.shape
    spec = session.spec
    fed = {"input_ids": tokens, "position_ids": memory.positions[:, None] + np.arange(length)}
    if spec.model.selective:
        fed["targets"] = np.roll(tokens, -1, axis=1)
        fed["logit_rows"] = np.arange(1, batch + 1) * length - 1
    before = {name: np.array(array) for name, array in memory.tensors.items()}
    pasts = {str(state.present): state.name for state in spec.state}
    answers = {
        fact.name: np.empty(fact.sizes(batch=batch, tokens=length, rows=batch), fact.dtype)
        for fact in spec.outputs
        if fact.name not in pasts
    }
    session.run(fed, answers, memory)
    memory.positions += length
    after = {present: np.array(memory.tensors[past]) for present, past in pasts.items()}
    return fed | before, answers | after


def _fill(session: OrtSession, memory: Memory, draw: np.random.Generator, *, following: int) -> int:
    """Feeds random tokens until the memory is full and its largest ring begins again; returns how many tokens
    the next step may have.

    They are at most `following`, and end before a ring does. So the step fits a graph that does not write
    across the end of its ring.
    """
    spec = session.spec
    rings = [state.row[1] for state in spec.state] if spec.circular else []
    largest = max(rings, default=1)
    wanted = -(-(int(memory.positions[0]) + spec.rule.slots) // largest) * largest
    while (left := wanted - int(memory.positions[0])) > 0:
        shape = memory.batch, min(left, spec.rule.segment)
        session.predict(draw.integers(0, spec.model.vocab_size, shape), memory)
    return min((following, *(size - wanted % size for size in rings)))


def _array(array: np.ndarray) -> dict[str, str]:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return {"array": base64.b64encode(stream.getvalue()).decode(), "polygraphy_class": "ndarray"}


def _results(iterations: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """The answers of one runner as Polygraphy's RunResults."""
    made = [
        {
            "outputs": {
                name: {"values": _array(array), "polygraphy_class": "LazyArray"}
                for name, array in answers.items()
            },
            "runtime": 0.0,
            "runner_name": RUNNER,
            "polygraphy_class": "IterationResult",
        }
        for answers in iterations
    ]
    return {"lst": [[RUNNER, made]], "polygraphy_class": "RunResults"}
