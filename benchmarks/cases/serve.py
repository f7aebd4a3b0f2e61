"""A server of many streams: tokens per second, CPU time besides the steps of its model, and other servers.

- `throughput`: tokens per second through the server, divided by the rate of a loop over a session
- `overhead`: CPU time of the server's process per token, less the CPU time of the same steps in a loop
- `others`: tokens per second of onnxruntime-genai and of llama.cpp's server, if they are installed

The server is `xl-export serve` in a process of its own, the load comes from another process over raw sockets,
and the loop runs in this process. The *baseline server* is a small program that steps and sends each token,
without scheduler, limits or sampling. All have the same number of threads. Decoding is greedy, and every
stream must have the tokens of `generate`. The model has a vocabulary of ids, so each token is an event.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checked_sessions import open_checked
from benchmarks.harness import Document, Job, Row, only_option
from benchmarks.measure import timing
from benchmarks.models import artefact_of
from benchmarks.serving import llama
from benchmarks.serving.baseline_server import baseline_server
from benchmarks.serving.server import Served, running, serving
from runtimes.base.errors import ArtefactError
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session
from runtimes.tasks.generate import generate

PACKAGES = ("starlette", "uvicorn", "msgspec", "prometheus_client")
REPEATS = 5
OVERHEAD_STREAMS = (1, 4, 16, 32)
THROUGHPUT_STREAMS = (1, 8)
WARMUP_TOKENS = 20  # of each stream before anything is timed
# The least of what is timed. Shorter windows vary by a third: the tokens of short steps arrive together every
# 4 ms, and later if the event loop or the client waits for a CPU.
WINDOW_SECONDS = 0.5
LOOP = "loop over Session"
BASELINE = "baseline server"
OURS = "xl-export serve"
GENAI = "onnxruntime-genai"
LLAMA = "llama.cpp's server"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all parts share."""

    job: Job
    artefact: Path
    session: Session
    tokens: int
    """Number of tokens of each stream."""

    def long_enough(self, streams: int) -> Bench:
        """The same with as many tokens as these streams have in WINDOW_SECONDS, or more."""
        seconds, _ = self.loop(streams)
        return replace(self, tokens=max(self.tokens, WARMUP_TOKENS + math.ceil(WINDOW_SECONDS / seconds)))

    def prompts(self, count: int) -> list[list[int]]:
        """Random prompts of one segment."""
        draw = np.random.default_rng(0)
        size = (count, self.job.config.segment)
        found: list[list[int]] = draw.integers(self.job.config.model.vocab_size, size=size).tolist()
        return found

    def loop(self, streams: int) -> tuple[float, float]:
        """Wall and CPU seconds of one step, over the same positions as the timed tokens of the streams.

        A token at a later position attends to more memory, so the loop must be where the streams are.
        """
        memory = self.session.start(streams)
        for array in memory.tensors.values():
            array.fill(0)  # memory that was never written would be read from the cache
        count = self.tokens - WARMUP_TOKENS
        memory.positions[:] = self.job.config.segment
        draw = np.random.default_rng(0)
        tokens = draw.integers(self.session.vocab.size, size=(self.tokens, streams, 1))
        for step in range(WARMUP_TOKENS):
            self.session.predict(tokens[step], memory)
        seconds, cpu = time.perf_counter(), time.process_time()
        for step in range(WARMUP_TOKENS, self.tokens):
            self.session.predict(tokens[step], memory)
        return (time.perf_counter() - seconds) / count, (time.process_time() - cpu) / count


def run(job: Job) -> Iterator[Row]:
    """The rows of the chosen parts. Steps are computed by the fused operator."""
    artefact = artefact_of(job, ids=True)
    # Every session here and the server use the fused operator once it is built on this machine. Without this
    # line a new machine would measure standard operators, and nothing would show it.
    open_checked(artefact, threads=job.threads, operators="fused")
    session = open_session(artefact, threads=job.threads, device="cpu")
    tokens = WARMUP_TOKENS + 4 * job.config.token_repeats
    bench = Bench(job=job, artefact=artefact, session=session, tokens=tokens)
    for part in job["only"] or PARTS:
        for row in PARTS[part](bench):
            yield {"part": part, "threads": job.threads, **row}


def overhead(bench: Bench) -> Iterator[Row]:
    """Microseconds of CPU per token beyond the steps, of the server and of the baseline server."""
    job = bench.job
    options = ("--rows", max(OVERHEAD_STREAMS))
    with serving(bench.artefact, threads=job.threads, options=options) as served:
        for streams in OVERHEAD_STREAMS:
            job.say(f"overhead: {streams} streams")
            timed = bench.long_enough(streams)
            prompts = timed.prompts(streams)
            expected = greedy(timed.session, prompts, timed.tokens)
            found: dict[str, list[float]] = {OURS: [], BASELINE: []}
            with baseline_server(bench.artefact, threads=job.threads, streams=streams) as baseline:
                for _ in range(job.repeats(REPEATS)):
                    _, loop_cpu = timed.loop(streams)
                    for side, program in ((OURS, served), (BASELINE, baseline)):
                        got = window(program, timed, prompts, expected)
                        cpu = got["server_cpu_seconds"] / got["tokens"] - loop_cpu / streams
                        found[side].append(cpu * 1e6)
            for side, values in found.items():
                yield {"side": side, "streams": streams, "cpu_us_per_token": timing(values)}


def throughput(bench: Bench) -> Iterator[Row]:
    """Tokens per second of the loop, the baseline server and the server, in turns."""
    job = bench.job
    for streams in THROUGHPUT_STREAMS:
        job.say(f"throughput: {streams} streams")
        timed = bench.long_enough(streams)
        prompts = timed.prompts(streams)
        expected = greedy(timed.session, prompts, timed.tokens)
        rates: dict[str, list[float]] = {LOOP: [], BASELINE: [], OURS: []}
        with (
            serving(bench.artefact, threads=job.threads) as served,
            baseline_server(bench.artefact, threads=job.threads, streams=streams) as baseline,
        ):
            for _ in range(job.repeats(REPEATS)):
                rates[LOOP].append(streams / timed.loop(streams)[0])
                for side, program in ((BASELINE, baseline), (OURS, served)):
                    rates[side].append(_rate(window(program, timed, prompts, expected)))
        for side, values in rates.items():
            over = [rate / loop for rate, loop in zip(values, rates[LOOP], strict=True)]
            yield {
                "side": side,
                "streams": streams,
                "tokens_per_second": timing(values),
                "over_loop": None if side == LOOP else timing(over),
            }


def others(bench: Bench) -> Iterator[Row]:
    """Tokens per second of each side, in turns.

    genai computes the same artefact in this process, without a server, and gives the same tokens. llama.cpp
    serves a Llama with the same number of bytes, with the same load; its tokens are counted only.
    """
    job = bench.job
    notes = {LOOP: "", OURS: ""}
    if missing := llama.missing():
        job.say(f"others: {LLAMA} is skipped: {missing}")
    else:
        notes[LLAMA] = f"xllamacpp {version('xllamacpp')}, a Llama with the same number of bytes"
    if importlib.util.find_spec("onnxruntime_genai") is None:
        job.say(f"others: {GENAI} is skipped: it is not installed; pip install onnxruntime-genai")
    else:
        notes[GENAI] = f"{version('onnxruntime-genai')}, in this process, the same tokens"
    for streams in THROUGHPUT_STREAMS:
        job.say(f"others: {streams} streams")
        timed = bench.long_enough(streams)
        prompts = timed.prompts(streams)
        expected = greedy(timed.session, prompts, timed.tokens)
        rates: dict[str, list[float]] = {side: [] for side in (LOOP, OURS, GENAI, LLAMA) if side in notes}
        for _ in range(job.repeats(REPEATS)):
            rates[LOOP].append(streams / timed.loop(streams)[0])
            with serving(bench.artefact, threads=job.threads) as served:
                rates[OURS].append(_rate(window(served, timed, prompts, expected)))
            if GENAI in rates:
                rates[GENAI].append(_genai(timed, prompts, expected))
            if LLAMA in rates:
                rates[LLAMA].append(_llama(bench, prompts))
        for side, values in rates.items():
            yield {
                "side": side,
                "streams": streams,
                "tokens_per_second": timing(values),
                "note": notes[side],
            }


def _rate(got: dict[str, float]) -> float:
    return got["tokens"] / got["seconds"]


def _genai(bench: Bench, prompts: Sequence[Sequence[int]], expected: list[list[str]]) -> float:
    """Tokens per second of genai's own loop over the artefact, with all prompts as one batch."""
    import onnxruntime_genai as og

    config = og.Config(str(bench.artefact))
    options = {"intra_op_num_threads": bench.job.threads}
    # genai always stops at some token; here it is one that does not come.
    drawn = {int(text) for texts in expected for text in texts}
    end = next(token for token in range(bench.job.config.model.vocab_size) if token not in drawn)
    config.overlay(json.dumps({"model": {"eos_token_id": [end], "decoder": {"session_options": options}}}))
    params = og.GeneratorParams(loaded := og.Model(config))
    params.set_search_options(batch_size=len(prompts), chunk_size=0, do_sample=False)
    generator = og.Generator(loaded, params)
    generator.append_tokens(np.array(prompts, np.int32))
    found: list[list[str]] = [[] for _ in prompts]
    began = 0.0
    for step in range(bench.tokens):
        if step == WARMUP_TOKENS:
            began = time.perf_counter()
        generator.generate_next_token()
        for texts, token in zip(found, generator.get_next_tokens(), strict=True):
            texts.append(str(token))
    seconds = time.perf_counter() - began
    check_texts(found, expected)
    return len(prompts) * (bench.tokens - WARMUP_TOKENS) / seconds


def _llama(bench: Bench, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens per second of llama.cpp's server. They arrive one by one, so few are enough, and its memory
    grows with each.
    """
    assert bench.session.spec is not None, "the model is an artefact"
    num_bytes = 4 * bench.session.spec.model.parameters
    context = len(prompts[0]) + bench.tokens + 8
    path = bench.job.folder / f"llama-{context}.gguf"
    if not path.exists():
        llama.write_model(path, bench.job.config.model, num_bytes, context=context)
    numbers = (bench.job.threads, len(prompts), context)
    with running([sys.executable, "-m", llama.__name__, str(path), *map(str, numbers)]) as served:
        return _rate(window(served, bench, prompts, None, ignore_eos=True))


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "throughput": throughput,
    "overhead": overhead,
    "others": others,
}
OPTIONS = (only_option(list(PARTS), "Measure this part only"),)


def greedy(session: Session, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[str]]:
    """The texts of the tokens with which `generate` continues each prompt, without blanks."""
    texts: list[list[str]] = [[] for _ in prompts]
    sampler = Sampler(temperature=0)
    for piece in generate(
        session, [list(p) for p in prompts], max_tokens=max_tokens, sampler=sampler, text=False
    ):
        texts[piece.row].append(str(piece.token))
    return texts


def check_texts(found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> None:
    """Raises ArtefactError if a stream has other tokens than `generate`."""
    for stream, (texts, right) in enumerate(zip(found, expected, strict=True)):
        if [text.strip() for text in texts] != list(right):
            raise ArtefactError(
                f"stream {stream} has other tokens than `generate` gives; please report this."
            )


def window(
    served: Served,
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[str]] | None,
    **fields: Any,
) -> dict[str, float]:
    """What was measured while all streams were decoded; every stream is compared to its end.

    expected: None for another model, whose tokens are only counted. fields: of each request.
    """
    body = {"max_tokens": bench.tokens, "temperature": 0.0, "stream": True, **fields}
    found = served.load(
        bodies=[{"prompt": list(prompt), **body} for prompt in prompts],
        warm=WARMUP_TOKENS,
        until=bench.tokens - 2,
    )
    if expected is not None:
        check_texts(found["texts"], expected)
    measured: dict[str, float] = found["window"]
    return measured


def unavailable() -> str | None:
    """Why this machine cannot measure the case, or None."""
    if not sys.platform.startswith("linux"):
        return "the CPU time of another process is read from Linux"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is missing; pip install {' '.join(missing)}" if missing else None


def _size(row: Row, document: Document) -> str:
    return str(document["config"])


KEYS = ("part", "side", "streams", "threads")
COLUMNS = {
    "part": "part",
    "model": _size,
    "what": "side",
    "streams": "streams",
    "threads": "threads",
    "tokens/s": "tokens_per_second",
    "over the loop": "over_loop",
    "CPU beyond the steps, µs per token": "cpu_us_per_token",
}
