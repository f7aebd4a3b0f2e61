"""One token in WebAssembly with memory in place, against copies, Node's ONNX Runtime, Python's and C++.

Every side first replays the artefact's reference. All have one thread and the same graph with standard
operators. Copies are what the public interface of onnxruntime-web does. A token is measured early in a text
and after 10,000 tokens: it costs the same. WebAssembly runs in Node, which has Chromium's compiler.

A side has streams, which have names. `check` raises ArtefactError if the side does not replay the artefact's
reference. `feed` reads a number of tokens, and `times` reads them one by one and returns the milliseconds of
each.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import Case, Claim, Column, Job, Line
from benchmarks.measure import REST, Timing, milliseconds
from benchmarks.models import random_artefact
from runtimes.base.errors import ArtefactError
from runtimes.contract.memory import Memory
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.check import check

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
CPP_SOURCES = ROOT / "cpp"
EARLY = 100  # tokens that a stream has seen
LATE = 10_000
TURNS = 5
WARMUP = 5
IN_PLACE = "WebAssembly"
COPIES = "WebAssembly, copies"
NATIVE = "Node"
PYTHON = "Python"
CPP = "C++"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side."""

    side: str
    mem_len: int
    #: A token after 10,000 others; in C++ one with full memory.
    late: Timing
    #: A token after 100 others; None for C++.
    early: Timing | None
    #: `late` divided by the time of C++; None where C++ cannot be compiled.
    times_cpp: float | None


def run(job: Job) -> list[Row]:
    """A row for each side that runs here, all measured in turns. Every side has one thread."""
    repeats = job.repeats(job.config.token_repeats)
    artefact = random_artefact(job)
    with contextlib.ExitStack() as stack:
        sides = _opened(artefact, job.folder)
        for side in sides.values():
            stack.callback(side.close)
        for label, side in sides.items():
            job.progress(f"{label}: replaying the reference, then {LATE:,} tokens")
            side.check()
            side.feed("early", EARLY)
            side.feed("late", LATE)
        job.progress(f"timing {repeats} tokens of each side, early and late, in {TURNS} turns")
        times = _in_turns(sides, repeats)
    cpp = times[CPP]["late"].median if CPP in times else None
    return [
        Row(
            side=label,
            mem_len=job.rule.mem_len,
            late=times[label]["late"],
            early=times[label].get("early"),
            times_cpp=None if cpp is None else times[label]["late"].median / cpp,
        )
        for label in sides
    ]


def _opened(artefact: Path, folder: Path) -> dict[str, Side]:
    sides: dict[str, Side] = {
        IN_PLACE: NodeSide(artefact, "wasm"),
        COPIES: NodeSide(artefact, "wasm", copies=True),
    }
    if (WEB / "node_modules" / "onnxruntime-node").is_dir():
        sides[NATIVE] = NodeSide(artefact, "native")
    sides[PYTHON] = PythonSide(artefact)
    if has_cpp():
        sides[CPP] = CppSide(artefact, folder)
    return sides


def _in_turns(sides: Mapping[str, Side], repeats: int) -> dict[str, dict[str, Timing]]:
    """A timing of every side and stream, in turns, so that a machine that slows down slows all sides."""
    share = -(-repeats // TURNS)
    found: dict[str, dict[str, list[float]]] = {
        label: {stream: [] for stream in (("late",) if label == CPP else ("early", "late"))}
        for label in sides
    }
    for _ in range(TURNS):
        for label, streams in found.items():
            time.sleep(REST)
            for stream, times in streams.items():
                warmup = 0 if label == CPP else WARMUP
                times += sides[label].times(stream, share + warmup)[warmup:]
    return {
        label: {stream: Timing.of(ms) for stream, ms in streams.items()} for label, streams in found.items()
    }


class NodeSide:
    """The module of web/ in Node. device: `wasm` or `native`; copies: whether each step copies the memory."""

    def __init__(self, artefact: Path, device: str, *, copies: bool = False) -> None:
        memory = "copies" if copies else "in-place"
        self._process = subprocess.Popen(
            ["node", str(WEB / "bench" / "steps.js"), str(artefact), device, memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._memory = "copied" if copies else "in place"

    def check(self) -> None:
        report = self._ask({"check": True})
        if not report["passed"] or report["facts"]["memory"] != self._memory:
            raise ArtefactError(
                f"{report['computedBy']} does not compute what it should ({report['sentence']}; memory "
                f"{report['facts']['memory']}, {report['facts']['memoryReason']}); please report this."
            )

    def feed(self, stream: str, count: int) -> None:
        self._ask({"feed": [stream, count]})

    def times(self, stream: str, count: int) -> list[float]:
        found: list[float] = self._ask({"time": [stream, count]})["times"]
        return found

    def close(self) -> None:
        with self._process:  # which closes its streams and waits for it
            pass

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ArtefactError("Node ended while it was measured; run the case again to see why.")
        answer: dict[str, Any] = json.loads(line)
        return answer


class PythonSide:
    """ONNX Runtime in this process, with standard operators and the memory in place."""

    def __init__(self, artefact: Path) -> None:
        self._artefact = artefact
        self._session = OrtSession.open(artefact, threads=1, kernel="standard")
        self._streams: dict[str, Memory] = {}

    def check(self) -> None:
        report = check(self._artefact, threads=1)
        if not report.passed:
            raise ArtefactError(f"{report.sentence}; please report this.")

    def feed(self, stream: str, count: int) -> None:
        segment = self._session.rule.segment
        memory = self._streams.setdefault(stream, self._session.start(1))
        for at in range(0, count, segment):
            tokens = np.arange(at, min(at + segment, count)) % self._session.vocab.size
            self._session.predict(tokens[None], memory)

    def times(self, stream: str, count: int) -> list[float]:
        memory = self._streams[stream]
        token = np.zeros((1, 1), np.int64)
        return milliseconds(lambda: self._session.predict(token, memory), repeats=count, warmup=0)

    def close(self) -> None:
        pass


class CppSide:
    """The program cpp/examples/benchmark.cpp over the library inside the Python wheel.

    It is a new process each time, which fills a memory and then times single tokens; so it has no streams,
    and one number for a call, the median.
    """

    def __init__(self, artefact: Path, folder: Path) -> None:
        self._artefact = artefact
        self._programs = {name: compiled(name, folder) for name in ("benchmark", "check")}

    def check(self) -> None:
        ended = subprocess.run(
            [self._programs["check"], self._artefact], capture_output=True, text=True, check=False
        )
        if ended.returncode or ended.stdout.split()[-1:] != ["passed"]:
            raise ArtefactError(
                f"the C++ library failed its check ({(ended.stderr or ended.stdout).strip()}); please report "
                "this."
            )

    def feed(self, stream: str, count: int) -> None:
        pass

    def times(self, stream: str, count: int) -> list[float]:
        ended = subprocess.run(
            [self._programs["benchmark"], self._artefact, str(count), "1"],
            capture_output=True,
            text=True,
            check=True,
        )
        return [float(json.loads(ended.stdout)["ms_per_token"])]

    def close(self) -> None:
        pass


Side = NodeSide | PythonSide | CppSide


def compiled(name: str, folder: Path) -> Path:
    """A program of cpp/examples, compiled into a folder; raises ArtefactError if it cannot be."""
    library = _onnxruntime_library()
    assert library is not None
    linked = folder / "libonnxruntime.so.1"  # the name that the library calls itself
    if not linked.is_symlink():
        linked.symlink_to(library)
    source = CPP_SOURCES / "examples" / f"{name}.cpp"
    program = folder / name
    includes = [f"-I{CPP_SOURCES}", f"-I{CPP_SOURCES / 'third_party' / 'onnxruntime'}"]
    command = ["g++", "-std=c++17", "-O2", *includes, str(source), "-o", str(program), str(linked)]
    ended = subprocess.run([*command, f"-Wl,-rpath,{folder}"], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ArtefactError(f"{source} could not be compiled: {ended.stderr.strip()[:300]}.")
    return program


def missing_for_node() -> str | None:
    """Why the module cannot run in Node here; None where it can."""
    if shutil.which("node") is None:
        return "node is not installed"
    if not (WEB / "node_modules" / "onnxruntime-web").is_dir():
        return f"the npm packages are not installed; run `npm ci --ignore-scripts` in {WEB}"
    return None


def has_cpp() -> bool:
    """Whether C++ programs can be compiled against the library of the Python wheel."""
    return _onnxruntime_library() is not None and shutil.which("g++") is not None


def _onnxruntime_library() -> Path | None:
    """The shared library in the Python wheel."""
    spec = find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"), None)


def _late(lines: Sequence[Line], side: str) -> float | None:
    return next((float(row["late"]["median"]) for row, _ in lines if row["side"] == side), None)


def _times(side: str, other: str) -> Callable[[Sequence[Line]], float | None]:
    """How many times as long a late token takes on one side as on the other, if both were measured."""

    def ratio_of(lines: Sequence[Line]) -> float | None:
        one = _late(lines, side)
        two = _late(lines, other)
        return None if one is None or two is None else one / two

    return ratio_of


CASE = Case(
    name="web",
    run=run,
    keys=("side", "mem_len"),
    columns=(
        Column("side", "side"),
        Column("ms per token after 100", "early"),
        Column(f"ms per token after {LATE:,}", "late"),
        Column(
            "late / early",
            lambda row, run: f"{row['late']['median'] / row['early']['median']:.2f}" if row["early"] else "",
        ),
        Column("times C++", "times_cpp", ".2f"),
    ),
    claims=(
        Claim(
            config="medium",
            limit=3.0,
            text="in place takes at most {limit:g} times as long as C++",
            found="it took {value:.2f} times as long",
            value=_times(IN_PLACE, CPP),
        ),
        Claim(
            config="medium",
            limit=1.5,
            text="copies take at least {limit:g} times as long as in place",
            found="they took {value:.2f} times as long",
            value=_times(COPIES, IN_PLACE),
            least=True,
        ),
    ),
    options=("config", "repeats", "mem-len"),
    unavailable=missing_for_node,
)
