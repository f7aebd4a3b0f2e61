"""From the start of a process to its first token: ours in Python and C++, plain ONNX Runtime, and peers.

Each repeat of a side is a new process; the sides take turns, and all files are in the page cache. Python's
modules are compiled already, as after an installation. All sides but llama.cpp have the same weights in fp32,
and must answer with the same tokens before any is timed. Each has its best form:

- plain ONNX Runtime: the artefact's own graph with standard operators, its ring bound in place;
- OpenVINO: the graph of `shift` memory for one token, saved in OpenVINO's format, its memory a state;
- MNN: the graph of fixed sizes for one token, converted by MNN, whose outputs are fed again;
- llama.cpp: a Llama of the same depth, width and bytes in fp32, in the package `xllamacpp`.

--operators is for ours only. A peer is left out if its package is missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases.policy import CPP_SOURCES, compiled, has_cpp
from benchmarks.checked_sessions import fused_library
from benchmarks.harness import OPERATORS, Job, Row, megabytes
from benchmarks.measure import REST_SECONDS, timing
from benchmarks.models import artefact_of, run_of
from benchmarks.serving import llama
from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import SPEC, WEIGHTS
from xl_export import export

ROOT = CPP_SOURCES.parent
PROGRAM = ROOT / "benchmarks" / "first_tokens.py"
REPEATS = 15  # processes of each side
TIMED = 300  # tokens after the memory is full
OPTIONS = (OPERATORS,)
STATUS = Path("/proc/self/status")
# MNN's own command installs a package that reports each conversion to MNN's makers.
CONVERT_TO_MNN = "import MNN, _tools, sys; _tools.mnnconvert(sys.argv)"


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one process runs, and what a device must hold for it."""

    name: str
    command: list[str]
    runtime_bytes: int  # without Python itself
    model_bytes: int
    same_weights: bool = True


def run(job: Job) -> Iterator[Row]:
    """A row for each side; repeats are processes of each. Nothing is timed before the tokens agree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(job.folder / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if job.operators == "standard":  # an empty cache has no fused operator
        environment["XDG_CACHE_HOME"] = str(job.folder / "cache")
    sides = [*_ours(job), *_peers(job)]
    job.say("comparing the tokens of all sides")
    compare(sides, {side.name: _report(side, environment)["tokens"] for side in sides})
    repeats = job.repeats(REPEATS)
    job.say(f"starting {repeats} processes of each side")
    found: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for _ in range(repeats):
        for side in sides:
            time.sleep(REST_SECONDS)
            found[side.name].append(_report(side, environment))
    for side in sides:
        reports = found[side.name]
        yield {
            "side": side.name,
            "operators": job.operators,
            "runtime_bytes": side.runtime_bytes,
            "model_bytes": side.model_bytes,
            **{name: round(median(x[name] for x in reports)) for name in ("resident_bytes", "peak_bytes")},
            **{
                f"{name}_ms": timing([1e3 * x[f"{name}_s"] for x in reports])
                for name in ("first", "first_cpu", "token_cpu")
            },
        }


def _report(side: Side, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a process of a side prints, and the seconds from its start to its first token."""
    began = time.monotonic()
    ended = subprocess.run(side.command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ArtefactError(f"{side.name} ended ({ended.stderr.strip()[-300:]}); please report this.")
    report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return report | {"first_s": report["answered_s"] - began}


def compare(sides: list[Side], tokens: Mapping[str, list[int]]) -> None:
    """Raises ArtefactError if a side with the weights of the first one has other tokens than it."""
    expected = tokens[sides[0].name]
    for side in sides:
        if side.same_weights and tokens[side.name] != expected:
            pairs = zip(expected, tokens[side.name], strict=True)
            at = next(at for at, (ours, theirs) in enumerate(pairs) if ours != theirs)
            raise ArtefactError(f"{side.name} differs from {sides[0].name} in token {at}; nothing was timed.")


def _ours(job: Job) -> Iterator[Side]:
    artefact = artefact_of(job)
    library = fused_library(job.operators)
    fused_bytes = bytes_of(library) if library else 0
    plain_bytes = installed_bytes("onnxruntime", "numpy")
    own_bytes = installed_bytes("click") + bytes_of(ROOT / "runtimes") + fused_bytes
    yield _in_python(job, "artefact, Python", "artefact", artefact, plain_bytes + own_bytes)
    if has_cpp():
        job.say("compiling the C++ program")
        program = compiled("start", job.folder)
        yield Side(
            name="artefact, C++",
            command=[str(program), str(artefact), *_numbers(job), *([str(library)] if library else [])],
            runtime_bytes=bytes_of(program) + bytes_of(job.folder / "libonnxruntime.so.1") + fused_bytes,
            model_bytes=bytes_of(artefact),
        )
    yield _in_python(job, "plain ONNX Runtime", "onnxruntime", artefact, plain_bytes)


def _peers(job: Job) -> Iterator[Side]:
    """The peers that are installed."""
    peers = {
        "OpenVINO": ("openvino", _openvino, ("openvino",)),
        "MNN": ("mnn", _mnn, ("MNN",)),
        "llama.cpp": ("llama", _llama, llama.PACKAGES),
    }
    for name, (function, model_of, packages) in peers.items():
        if missing := " ".join(package for package in packages if find_spec(package) is None):
            job.say(f"{name} is left out: pip install {missing}")
            continue
        job.say(f"making the model for {name} ({packages[0]} {version(packages[0])})")
        yield _in_python(job, name, function, model_of(job), installed_bytes(packages[0]))


def _in_python(job: Job, name: str, function: str, model: Path, runtime_bytes: int) -> Side:
    """A side that is a function of the program."""
    numbers = [*_numbers(job), str(job.config.model.vocab_size)]
    return Side(
        name=name,
        command=[sys.executable, str(PROGRAM), function, str(model), *numbers],
        runtime_bytes=runtime_bytes,
        model_bytes=bytes_of(model),
        same_weights=function != "llama",
    )


def _numbers(job: Job) -> list[str]:
    return [str(number) for number in (job.threads, job.rule.mem_len, TIMED)]


def _openvino(job: Job) -> Path:
    import openvino as ov
    from openvino._offline_transformations import apply_make_stateful_transformation

    model = ov.Core().read_model(artefact_of(job, "shift") / "step.onnx")
    sizes = {
        each.any_name: [1 if size.is_dynamic else size.get_length() for size in each.partial_shape]
        for each in model.inputs
    }
    model.reshape(sizes)
    memory = {name: name.replace("past_key_values", "present") for name in sizes if name.startswith("past")}
    apply_make_stateful_transformation(model, memory)
    folder = job.folder / "openvino"
    ov.save_model(model, folder / "step.xml", compress_to_fp16=False)
    return folder


def _mnn(job: Job) -> Path:
    rule = MemoryRule(mem_len=job.rule.mem_len, segment=1)
    artefact = export(run_of(job), job.folder / "fixed", rule=rule, rows=1)
    folder = job.folder / "mnn"
    folder.mkdir()
    shutil.copy(artefact / SPEC, folder)
    files = ["--modelFile", str(artefact / "step.onnx"), "--MNNModel", str(folder / "step.mnn")]
    command = [sys.executable, "-c", CONVERT_TO_MNN, "-f", "ONNX", *files, "--bizCode", "any"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return folder


def _llama(job: Job) -> Path:
    path = job.folder / "llama.gguf"
    weight_bytes = bytes_of(job.folder / "ring" / WEIGHTS)
    llama.write_model(path, job.config.model, weight_bytes, context=2 * (job.rule.mem_len + TIMED))
    return path


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of a folder without compiled Python."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file() and each.suffix != ".pyc")


def installed_bytes(*names: str) -> int:
    """Bytes of packages and of all that they require, without compiled Python."""
    found: dict[str, int] = {}
    left = list(names)
    while left:
        name = re.split(r"[^\w.-]", left.pop())[0].lower().replace("_", "-")
        try:
            package = distribution(name)
        except PackageNotFoundError:  # of another system
            continue
        if name not in found:
            found[name] = sum(bytes_of(Path(str(file.locate()))) for file in package.files or ())
            left += [line for line in package.requires or () if "extra ==" not in line]
    return sum(found.values())


def unavailable() -> str | None:
    """Why this machine cannot measure it, or None."""
    return None if STATUS.is_file() else f"this system has no {STATUS}"


KEYS = ("side", "operators")
COLUMNS = {
    "side": "side",
    "runtime, MB on disk": megabytes("runtime_bytes"),
    "model, MB on disk": megabytes("model_bytes"),
    "time to the first token, ms": "first_ms",
    "CPU to the first token, ms": "first_cpu_ms",
    "resident at the first token, MB": megabytes("resident_bytes"),
    "peak resident, MB": megabytes("peak_bytes"),
    "CPU per token, ms": "token_cpu_ms",
}
NOTE = (
    "A runtime is its packages with what they import, for PCs and without Python itself; on a phone, "
    "libraries are smaller. llama.cpp runs another model whose weights have the same size in bytes. Each "
    "number is the median of new processes."
)
