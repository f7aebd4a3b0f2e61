"""What a token of a small model costs besides its arithmetic.

- `python`: for each precision of the weights, ONNX Runtime's run of one token, what the calls of a session
  add to it, and the least that it can take: reading the step's bytes from the processor's cache, or computing
  its multiply-adds, at rates of one core that are measured in the same run.
- `busy`: one token while 0, 1, 2 and 9 other processes compute, with the threads that a session chooses for
  itself, with one, and with all. Sessions are opened while the machine is idle.

All sides step streams of their own, in turns of some dozen tokens.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from benchmarks.arithmetic import needed_multiply_adds
from benchmarks.checked_sessions import agreed, fed, filled, open_checked
from benchmarks.harness import OPERATORS, Column, Document, Job, Row, megabytes, only_option
from benchmarks.measure import least_ms, measure_limits, milliseconds, take_turns, timing
from benchmarks.models import run_of
from runtimes import Session, open_session
from runtimes.base.machine import available_cpus
from runtimes.contract.precision import Precision
from runtimes.contract.sampling import Sampler
from runtimes.contract.spec import FUSED, GRAPH, Spec
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.generate import generate
from xl_export import export

PARTS = ("python", "busy")
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-stored", "int8", "int4")
TOKENS = {"python": 3000, "busy": 600}  # of each side
TURN_TOKENS = 50  # tokens of one side before the next one
WARMUP_TOKENS = 5  # untimed tokens at the beginning of a turn
FIRST_TOKENS = 20  # untimed tokens of each side before the first turn
BYTES_AFTER_CAST = {ir.DataType.FLOAT16: 2, ir.DataType.INT8: 4}  # times the bytes in the file
MOST_TOKENS = 10**9  # more than are ever generated
OTHERS = (0, 1, 2, 9)  # numbers of other processes
OTHERS_START_SECONDS = 0.5
DEFAULT = "default"
TOLERANCE_NATS = 1e-4
OPTIONS = (only_option(PARTS, "Measure this part only"), OPERATORS)


def run(job: Job) -> Iterator[Row]:
    """The rows of the chosen parts; --repeats is the number of tokens of each side."""
    parts = job["only"] or PARTS
    if "python" in parts:
        yield from _python(job)
    if "busy" in parts:
        yield from _busy(job)


def _python(job: Job) -> Iterator[Row]:
    """A row for each precision, after a comparison with PyTorch or with the same weights in fp32."""
    tokens = job.repeats(TOKENS["python"])
    multiply_adds_rate = measure_limits(1)["multiply_adds"]
    for precision in PRECISIONS:
        job.say(f"{precision}: exporting, then timing {tokens} tokens of each side")
        artefact = export(run_of(job), job.folder / precision, precision=precision, rule=job.rule)
        session = open_checked(artefact, threads=job.threads, operators=job.operators)
        calls = sides(session)
        for call in calls.values():
            milliseconds(call, repeats=0, warmup=FIRST_TOKENS)
        num_bytes = read_bytes(session.spec, artefact / (FUSED if job.operators == "fused" else GRAPH))
        times = _in_turns(calls, tokens)
        yield {
            "part": "python",
            "precision": precision,
            "operators": job.operators,
            "parameters": session.spec.model.parameters,
            **{f"{side}_ms": timing(ms) for side, ms in times.items()},
            "read_bytes": num_bytes,
            "multiply_adds": needed_multiply_adds(job.config.model, job.rule, 1),
            "core": {"read_bytes": cache_rate(num_bytes), "multiply_adds": multiply_adds_rate},
        }


def _in_turns(calls: Mapping[str, Callable[[], Any]], tokens: int) -> dict[str, list[float]]:
    turns = -(-tokens // TURN_TOKENS)
    return take_turns(calls, repeats=tokens, turns=turns, warmup=WARMUP_TOKENS, rest=False)


def sides(session: OrtSession) -> dict[str, Callable[[], object]]:
    """A call for each side that computes one token of its own stream, whose memory is full."""
    token = np.zeros((1, 1), np.int64)
    memories = {name: filled(session, 1) for name in ("onnxruntime", "predict", "step", "score")}
    for _ in range(3):  # from then on the session keeps its arrays bound
        session.predict(token, memories["onnxruntime"])
    bound = memories["onnxruntime"].binding.ios[0]
    pieces = generate(session, [0], max_tokens=MOST_TOKENS, sampler=Sampler(top_k=40))
    for _ in range(session.rule.slots):
        next(pieces)
    return {
        "onnxruntime": lambda: memories["onnxruntime"].binding.session.run_with_iobinding(bound),
        "predict": lambda: session.predict(token, memories["predict"]),
        "step": lambda: session.step(token, memories["step"]),
        "score": lambda: session.score(token, token, memories["score"]),
        "generate": lambda: next(pieces),
    }


def read_bytes(spec: Spec, graph: Path) -> int:
    """The bytes that one token must read: weights and tables as they are once loaded, and the visible memory.

    ONNX Runtime folds a Cast from float16 or int8 when it loads a graph, so a table behind one is read in
    float32.
    """
    num_bytes = 0
    for value in ir.load(graph).graph.initializers.values():
        is_cast = any(node.op_type == "Cast" for node, _ in value.uses())
        factor = BYTES_AFTER_CAST.get(value.dtype or ir.DataType.FLOAT, 1) if is_cast else 1
        num_bytes += value.const_value.nbytes * factor if value.const_value is not None else 0
    return num_bytes + spec.bytes_per_stream * (spec.rule.mem_len + 1) // spec.rule.slots


def cache_rate(num_bytes: int) -> float:
    """Bytes per second at which one core reads a buffer of this size again and again."""
    numbers = np.ones(num_bytes, np.int8)
    return num_bytes / min(milliseconds(numbers.max, repeats=200)) * 1e3


def _busy(job: Job) -> Iterator[Row]:
    """A row for each side and number of other processes, after all sides gave the same answers."""
    tokens = job.repeats(TOKENS["busy"])
    precision: Precision = "int8-stored"
    artefact = export(run_of(job), job.folder / "busy", precision=precision, rule=job.rule)
    threads = {DEFAULT: None, "one thread": 1, "all threads": available_cpus()}
    sessions = {side: open_session(artefact, threads=count, device="cpu") for side, count in threads.items()}
    compare(sessions)
    calls = {side: _token(session) for side, session in sessions.items()}
    for others in OTHERS:
        job.say(f"{others} other processes: timing {tokens} tokens of each side")
        with computing(others):
            times = _in_turns(calls, tokens)
        fixed = [times["one thread"], times["all threads"]]
        for side, ms in times.items():
            yield {
                "part": "busy",
                "other_processes": others,
                "side": side,
                "precision": precision,
                "mean_ms": float(np.mean(ms)),
                "token_ms": timing(ms),
                "p99_ms": float(np.percentile(ms, 99)),
                "mean_over_better": float(np.mean(ms) / min(map(np.mean, fixed))),
                "p99_over_better": float(np.percentile(ms, 99) / min(np.percentile(x, 99) for x in fixed)),
            }


@contextlib.contextmanager
def computing(others: int) -> Iterator[None]:
    """Other processes that compute while the body runs."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
    try:
        time.sleep(OTHERS_START_SECONDS)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _token(session: Session) -> Callable[[], Any]:
    """One token after another of one stream."""
    memory = session.start(1)
    token = np.zeros((1, 1), np.int64)
    return lambda: session.predict(token, memory)


def compare(sessions: Mapping[str, Session]) -> None:
    """Raises ArtefactError if the sides do not give the same answers."""
    tokens = np.random.default_rng(0).integers(0, sessions[DEFAULT].vocab.size, (1, 24))
    answers = {side: fed(session, tokens)[0] for side, session in sessions.items()}
    for side, answer in answers.items():
        difference = float(np.abs(answer - answers[DEFAULT]).max())
        agreed(difference, TOLERANCE_NATS, f"the side with {side} differs from the default")


def _least_ms(row: Row) -> float:
    return least_ms(row["core"], row["read_bytes"], row["multiply_adds"])


def _python_column(value: Callable[[Row], Any]) -> Column:
    """A column of the part `python`."""
    return lambda row, _: value(row) if row["part"] == "python" else None


def _adds(side: str, base: str = "onnxruntime") -> Column:
    """By how many microseconds a side is slower."""
    return _python_column(lambda row: 1e3 * (row[f"{side}_ms"]["median"] - row[f"{base}_ms"]["median"]))


def _size(row: Row, document: Document) -> str:
    return str(document["config"])


KEYS = ("part", "precision", "operators", "other_processes", "side")
COLUMNS = {
    "size": _size,
    "weights": "precision",
    "MB to read": megabytes("read_bytes"),
    "at least, µs": _python_column(lambda row: 1e3 * _least_ms(row)),
    "run, µs": _python_column(lambda row: 1e3 * row["onnxruntime_ms"]["median"]),
    "times at least": _python_column(lambda row: row["onnxruntime_ms"]["median"] / _least_ms(row)),
    "predict adds, µs": _adds("predict"),
    "step adds, µs": _adds("step"),
    "score adds, µs": _adds("score"),
    "generate adds, µs": _adds("generate", "predict"),
    "other processes": "other_processes",
    "threads": "side",
    "mean, ms": "mean_ms",
    "p99, ms": "p99_ms",
    "mean / better": "mean_over_better",
    "p99 / better": "p99_over_better",
}
NOTE = (
    "*Run* is the time of one token in ONNX Runtime. What Python adds is a difference of medians; generate "
    "is compared with predict. *At least* is the larger of two times on one core: to read the step's bytes "
    "from the cache, and to compute its multiply-adds. *Better* is the better of one thread and all threads."
)
