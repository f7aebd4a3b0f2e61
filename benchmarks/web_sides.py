"""The sides of the case web: each computes single tokens of one artefact, with one thread.

A side has streams, which have names. `difference` is the largest from the artefact's reference, in nats, and
raises ArtefactError beyond its limits. `feed` reads a number of tokens, and `times` reads them one by one and
returns the milliseconds of each.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError
from runtimes.contract.memory import Memory
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.check import check

ROOT = Path(__file__).resolve().parents[1]
WEB = ROOT / "web"
CPP = ROOT / "cpp"


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

    def difference(self) -> float:
        report = self._ask({"check": True})
        if not report["passed"] or report["facts"]["memory"] != self._memory:
            raise ArtefactError(
                f"{report['computedBy']} does not compute what it should ({report['sentence']}; memory "
                f"{report['facts']['memory']}, {report['facts']['memoryReason']}); please report this."
            )
        return float(report["maxDifference"])

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

    def difference(self) -> float:
        report = check(self._artefact, threads=1)
        if not report.passed:
            raise ArtefactError(f"{report.sentence}; please report this.")
        return report.max_difference

    def feed(self, stream: str, count: int) -> None:
        segment = self._session.rule.segment
        memory = self._streams.setdefault(stream, self._session.start(1))
        for at in range(0, count, segment):
            tokens = np.arange(at, min(at + segment, count)) % self._session.vocab.size
            self._session.predict(tokens[None], memory)

    def times(self, stream: str, count: int) -> list[float]:
        memory = self._streams[stream]
        found = []
        for token in range(count):
            tokens = np.array([[token % self._session.vocab.size]])
            began = time.perf_counter()
            self._session.predict(tokens, memory)
            found.append((time.perf_counter() - began) * 1e3)
        return found

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

    def difference(self) -> float:
        ended = subprocess.run(
            [self._programs["check"], self._artefact], capture_output=True, text=True, check=False
        )
        words = ended.stdout.split()
        if ended.returncode or words[-1:] != ["passed"]:
            raise ArtefactError(
                f"the C++ library failed its check ({(ended.stderr or ended.stdout).strip()}); please report "
                "this."
            )
        return float(words[words.index("most") + 1])

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
    spec = find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    library = next((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"))
    linked = folder / "libonnxruntime.so.1"  # the name that the library calls itself
    if not linked.is_symlink():
        linked.symlink_to(library)
    source = CPP / "examples" / f"{name}.cpp"
    program = folder / name
    includes = [f"-I{CPP}", f"-I{CPP / 'third_party' / 'onnxruntime'}"]
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


def has_native() -> bool:
    """Whether the native package of Node is installed."""
    return (WEB / "node_modules" / "onnxruntime-node").is_dir()


def has_cpp() -> bool:
    """Whether C++ programs can be compiled against the library of the Python wheel."""
    spec = find_spec("onnxruntime")
    found = spec and spec.origin and list((Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"))
    return bool(found) and shutil.which("g++") is not None
