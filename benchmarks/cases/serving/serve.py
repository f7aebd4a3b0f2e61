"""What a server of many streams costs beside the steps of its model, and what it keeps to under load.

The server is `xl-export serve` in a process of its own, the load comes from another process over raw sockets,
and what they are compared with runs in this process. Every stream is greedy and has the tokens of `generate`;
scores are those of `evaluate`. The model has random weights and a vocabulary of ids, so that each token is an
event. Parts are chosen with --only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.case import Case, Column, Job, minutes_option, number, only_option, option
from benchmarks.cases.serving import llama
from benchmarks.cases.serving.attacks import ATTACKS
from benchmarks.cases.serving.baseline_server import baseline_server
from benchmarks.cases.serving.server import ROOT, Served, running, serving
from benchmarks.checked_sessions import open_checked
from benchmarks.measure import Timing
from benchmarks.models import random_artefact
from benchmarks.runs import Figures, History, Run
from runtimes.base.errors import ArtefactError
from runtimes.base.machine import available_cpus
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session
from runtimes.tasks.evaluate import evaluate
from runtimes.tasks.generate import generate
from xl_export.serve.core.admission import EngineSettings

REPEATS = 5
PACKAGES = ("starlette", "uvicorn", "msgspec", "prometheus_client", "httptools")
SIZES_SHOWN = ("demo", "small", "enwik8-base")  # of models, in the documents
GREEDY = Sampler(temperature=0)
STREAMS = (1, 4, 16, 32)  # of the overhead
TOGETHER = 8  # streams of the throughput
PROMPT = 10_000  # tokens of each long prompt that arrives
ARRIVING = 3  # long prompts
LISTENING = 4  # streams that are read meanwhile
WARM = 20  # tokens of each stream before anything is timed
SPARE = 500  # tokens by which streams outlast the prompts that arrive
CLIENTS = 64  # of the mixed load
STORED = 1000  # streams of the mixed load
MANY = 16  # streams from which the target AT_MANY holds
AT_MANY = 15.0
AT_ONE = 80.0
SHARE = 0.97
SHARE_SIZE = "enwik8-base"
LATE = 1.05  # of tokens at the end of a long stream over those near its beginning
BLOCK = 1000  # tokens that are one figure of a long stream
TURNS = 20  # of the part `long`, for each repeat: single turns differ by a third on a busy host
FLAT = 1.02  # of the resident memory
FIRST_TOKENS = 4  # that are checked after each long prompt

MODEL = ROOT / "examples" / "stories" / "tales"  # its tokens are parts of words, which cost most to encode
KEYS = {"attacker": "attacker-0123456789abcdef", "other": "other-0123456789abcdef"}
HEALTH = 50.0  # milliseconds
ATTACKERS = 8  # requests of the attacker
ATTACKED = 5.0  # seconds of each attack
RAW = "loop over Session"
OWN = "xl-export serve"
GENAI = "onnxruntime-genai"
LLAMA = "llama.cpp's server"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure."""

    part: str  # of the case
    side: str  # what was measured
    streams: int  # at once
    unit: str
    figure: Timing  # median, fastest and slowest of the repeats
    most: float | None = None  # the target that the median must keep, if there is one
    least: float | None = None
    note: str = ""  # what belongs to the figure
    threads: int | None = None  # CPUs of a step, if the side does not name them


@dataclass(frozen=True, kw_only=True)
class Bench(Job):
    """The job, the model that it measures, and what all parts share."""

    artefact: Path
    #: With which everything is measured but throughput, which has `threads` and one thread, and the overhead,
    #: which has one: those that the server chooses for itself, if the user gives none.
    default_threads: int

    @property
    def long(self) -> int:
        """Tokens of each stream that is timed."""
        return WARM + 4 * self.config.token_repeats

    def session(self, threads: int) -> Session:
        """The model in this process."""
        return open_session(self.artefact, threads=threads, device="cpu")

    def baseline_loop(self, session: Session, streams: int) -> Baseline:
        """Steps of streams after a prompt of one segment, between WARM and `long` tokens."""
        return baseline_steps(session, streams, self.long - WARM, at=self.config.segment + WARM)

    def prompts(self, count: int, segments: int = 1, *, seed: int = 0) -> list[list[int]]:
        """Random prompts of whole segments, which a server feeds in the same pieces as `generate`."""
        chance = np.random.default_rng([seed, segments])
        size = (count, segments * self.config.segment)
        found: list[list[int]] = chance.integers(self.config.model.vocab_size, size=size).tolist()
        return found


def run(job: Job) -> Iterator[Row]:
    """The rows of the chosen parts, of all when none is named. Steps are computed by the fused operator.

    --threads is for throughput, and for everything else too if it is given; otherwise everything else has the
    threads that the server chooses for itself.
    """
    artefact = random_artefact(job, ids=True)
    # Every session here and the server use the fused operator once it is built on this machine. Without this
    # line a new machine would measure standard operators, and nothing would show it.
    open_checked(artefact, threads=job.threads, operators="fused")
    threads = job.given_threads or _default_threads(artefact)
    bench = Bench(**vars(job), artefact=artefact, default_threads=threads)
    for part in job.chosen(PARTS):
        yield from PARTS[part](bench)


def _default_threads(artefact: Path) -> int:
    """The threads that the server takes for an artefact where it is not told."""
    from xl_export.serve.http.base.server import Source  # needs the extra of the server

    source = Source(name=artefact.name, path=artefact, settings=EngineSettings())
    _, threads = source.open_session()
    return threads or available_cpus()


def overhead(bench: Bench) -> Iterator[Row]:
    """CPU time of the server's process beyond that of the same steps, per token, with one thread.

    `baseline server` is a program that only steps and sends (see `baseline_server`), measured alike.
    """
    session = bench.session(1)
    prompts = bench.prompts(max(STREAMS))
    expected = greedy(session, prompts, bench.long)
    with serving(bench.artefact, threads=1, options=("--rows", max(STREAMS))) as served:
        for streams in STREAMS:
            bench.progress(f"overhead: {streams} streams")
            found: dict[str, list[float]] = {"whole": [], "baseline server": []}
            with baseline_server(bench.artefact, threads=1, streams=streams) as baseline:
                for _ in range(bench.repeats(REPEATS)):
                    loop = bench.baseline_loop(session, streams).cpu / streams * 1e6
                    for side, program in (("whole", served), ("baseline server", baseline)):
                        figures = window(program, bench, prompts[:streams], expected[:streams])
                        found[side].append(figures["server_cpu"] / figures["tokens"] * 1e6 - loop)
            target = AT_MANY if streams >= MANY else AT_ONE if streams == 1 else None
            for side, values in found.items():
                yield Row(
                    part="overhead",
                    side=side,
                    streams=streams,
                    unit="µs of CPU a token",
                    figure=Timing.of(values),
                    most=target if side == "whole" else None,
                )


def throughput(bench: Bench) -> Iterator[Row]:
    """Tokens per second through the server over those of the baseline loop, with one thread and with all;
    next to it those of a program that only steps and sends (see `baseline_server`).
    """
    streams = TOGETHER
    prompts = bench.prompts(streams)
    least = SHARE if bench.config.name == SHARE_SIZE else None
    for threads in sorted({1, bench.threads}):
        bench.progress(f"throughput: {streams} streams, {threads} threads")
        session = bench.session(threads)
        expected = greedy(session, prompts, bench.long)
        rates: dict[str, list[float]] = {"baseline loop": [], "baseline server": [], "server": []}
        with (
            serving(bench.artefact, threads=threads) as served,
            baseline_server(bench.artefact, threads=threads, streams=streams) as baseline,
        ):
            for _ in range(bench.repeats(REPEATS)):
                rates["baseline loop"].append(streams / bench.baseline_loop(session, streams).seconds)
                for side, program in (("baseline server", baseline), ("server", served)):
                    figures = window(program, bench, prompts, expected)
                    rates[side].append(_rate(figures))
        named = f", {threads} thread{'s' * (threads > 1)}"
        for side, values in rates.items():
            yield Row(
                part="throughput",
                side=side + named,
                streams=streams,
                unit="tokens/s",
                figure=Timing.of(values),
            )
        for side in ("baseline server", "server"):
            ratios = [a / b for a, b in zip(rates[side], rates["baseline loop"], strict=True)]
            yield Row(
                part="throughput",
                side=f"{side} over baseline loop{named}",
                streams=streams,
                unit="ratio",
                figure=Timing.of(ratios),
                least=least if side == "server" else None,
            )


def between(bench: Bench) -> Iterator[Row]:
    """The time between tokens while long prompts arrive, and the time to the first token of an idle server.

    Targets: 99 % within two mean steps and a piece of prompt; the prompt's own pieces and two steps.
    """
    segment = bench.config.segment
    session = bench.session(bench.default_threads)
    pieces = -(-PROMPT // segment)
    longs = bench.prompts(ARRIVING + bench.repeats(REPEATS), pieces, seed=1)
    shorts = bench.prompts(bench.repeats(REPEATS), seed=2)
    prompts = bench.prompts(LISTENING, seed=3)
    warm = WARM + bench.config.token_repeats
    length = warm + ARRIVING * pieces + SPARE
    bench.progress("between: what the model says in this process")
    answers = greedy(session, prompts, length)
    long_answers = [greedy(session, [prompt], FIRST_TOKENS)[0] for prompt in longs]
    short_answers = [greedy(session, [prompt], FIRST_TOKENS)[0] for prompt in shorts]
    piece = baseline_steps(session, 1, max(8, bench.config.token_repeats), segment, at=len(longs[0])).seconds
    with serving(bench.artefact, threads=bench.default_threads, options=("--cache", 0)) as served:
        bench.progress(f"between: {ARRIVING} prompts of {len(longs[0]):,} tokens arrive")
        found = served.load(
            "arrivals",
            bodies=[body(prompt, length) for prompt in prompts],
            prompts=[body(prompt, FIRST_TOKENS) for prompt in longs[:ARRIVING]],
            warm=warm,
        )
        check_texts(found["texts"], answers)
        check_texts(found["prompt_texts"], long_answers[:ARRIVING])
        idle, busy = (np.array(found["gaps"][name]) * 1e3 for name in ("idle", "busy"))
        usual = float(np.mean(idle))  # tokens of short steps come several at once
        yield Row(
            part="between",
            side=f"prompts of {len(longs[0]):,} arrive, p99",
            streams=LISTENING,
            unit="ms",
            threads=bench.default_threads,
            figure=replace(Timing.of(busy.tolist()), median=float(np.percentile(busy, 99))),
            most=2 * usual + piece * 1e3,
            note=f"a token of the idle server takes {usual:.3g} ms, a piece of {segment} tokens alone "
            f"{piece * 1e3:.3g} ms",
        )
        for some, right in (
            (shorts, short_answers),
            (longs[ARRIVING:], long_answers[ARRIVING:]),
        ):
            bench.progress(f"between: first token after {len(some[0]):,} tokens")
            seconds = []
            pieces_alone = []
            for prompt, answer in zip(some, right, strict=True):  # in turns, for the machine's pace changes
                first = served.load("first_token", bodies=[body(prompt, FIRST_TOKENS)])
                check_texts(first["texts"], [answer])
                seconds += first["seconds"]
                pieces_alone.append(baseline_prompt(session, prompt, segment))
            own = median(pieces_alone)
            step = baseline_steps(session, 1, bench.config.token_repeats, at=len(some[0])).seconds
            yield Row(
                part="between",
                side=f"first token after {len(some[0]):,} tokens",
                streams=1,
                unit="ms",
                threads=bench.default_threads,
                figure=Timing.of([1e3 * each for each in seconds]),
                most=(own + 2 * step) * 1e3,
                note=f"the pieces alone take {own * 1e3:.3g} ms and a step {step * 1e3:.3g} ms",
            )


def long_stream(bench: Bench) -> Iterator[Row]:
    """Tokens at the end of one long stream beside those near its beginning, in turns, so that both have the
    same machine.
    """
    session = bench.session(bench.default_threads)
    tokens = bench["tokens"]
    block = min(BLOCK, tokens // 4)
    (prompt,) = bench.prompts(1)
    expected = greedy(session, [prompt], 2 * block)
    options = ("--max-tokens", tokens, "--state", bench.folder / "streams")
    with serving(bench.artefact, threads=bench.default_threads, options=options) as served:
        bench.progress(f"long: one stream of {tokens:,} tokens")
        rounds = TURNS * bench.repeats(REPEATS)
        found = served.load("long", prompt=prompt, tokens=tokens, block=block, rounds=rounds)
    check_texts([found["texts"]], expected)
    early, late = ([seconds * 1e3 for seconds in found[side]] for side in ("early", "late"))
    common: dict[str, Any] = {"part": "long", "streams": 1, "threads": bench.default_threads}
    yield Row(side=f"token {block:,} and after", unit="ms", figure=Timing.of(early), **common)
    yield Row(side=f"token {tokens:,} and after", unit="ms", figure=Timing.of(late), **common)
    yield Row(
        side=f"token {tokens:,} over token {block:,}",
        unit="ratio",
        figure=Timing.of([last / first for first, last in zip(early, late, strict=True)]),
        most=LATE,
        note=f"{rounds} turns of {block:,} tokens each",
        **common,
    )


def resident(bench: Bench) -> Iterator[Row]:
    """The server's resident memory under mixed load: at the end over the first tenth."""
    minutes = bench["minutes"]
    session = bench.session(bench.default_threads)
    # Whole segments, so that the same pieces are fed here and there.
    prompts = [prompt for segments in (1, 2, 3) for prompt in bench.prompts(4, segments, seed=4 + segments)]
    lengths = [8 + 5 * at for at in range(len(prompts))]
    known = [
        {"body": body(prompt, length), "texts": [" " + text for text in greedy(session, [prompt], length)[0]]}
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    scores = [{"tokens": p, "log_prob": -evaluate(session, np.array(p)).nats} for p in prompts[::3]]
    options = ("--cache", 16, "--state", bench.folder / "state")
    with serving(bench.artefact, threads=bench.default_threads, options=options) as served:
        bench.progress(f"resident: {minutes:g} minutes of mixed load, {STORED:,} stored streams")
        found = served.load(
            "mixed",
            seconds=minutes * 60,
            streams=STORED,
            clients=CLIENTS,
            segment=bench.config.segment,
            vocabulary=bench.config.model.vocab_size,
            seed=0,
            known=known,
            scores=scores,
        )
    memory = found["resident"]
    tenth = max(1, len(memory) // 10)
    first = median(memory[:tenth])
    last = median(memory[-tenth:])
    done = ", ".join(f"{count:,} {name}" for name, count in sorted(found["done"].items()))
    common: dict[str, Any] = {"part": "resident", "streams": STORED, "threads": bench.default_threads}
    for side, value in (("first tenth", memory[:tenth]), ("end", memory[-tenth:])):
        yield Row(side=side, unit="MB", figure=Timing.of([bytes_ / 1e6 for bytes_ in value]), **common)
    yield Row(
        side=f"end over first tenth of {minutes:g} minutes",
        unit="ratio",
        figure=Timing.of([last / first]),
        most=FLAT,
        note=done,
        **common,
    )


def stall(bench: Bench) -> Iterator[Row]:
    """The longest answer to `/health`, and to a text of 5 KB of another key, during each attack,
    and the memory that the attack takes.

    Targets: 50 ms, and twice the time of an idle server and one step of the model.
    """
    session = open_session(MODEL, threads=1, device="cpu")
    step = baseline_steps(session, 1, 8, session.rule.segment, at=session.rule.mem_len).seconds * 1e3
    keys = bench.folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()), encoding="utf-8")
    for kind in ATTACKS:
        rounds = []
        for _ in range(bench.repeats(REPEATS)):
            bench.progress(f"stall: {kind}")
            # A server of its own each: what an attack has begun may go on after it.
            with serving(MODEL, threads=1, options=("--api-keys", keys)) as served:
                job = {"attack": kind, "at_once": ATTACKERS, "seconds": ATTACKED}
                rounds.append(served.load("stall", **job, keys=list(KEYS.values())))
        common: dict[str, Any] = {"part": "stall", "streams": ATTACKERS, "threads": 1}
        usual = {
            asked: median(median(each["idle"][asked]) for each in rounds) for asked in ("health", "short")
        }
        for asked, title, most in (
            ("health", "/health", HEALTH),
            ("short", "a text of 5 KB", 2 * usual["short"] + step),
        ):
            middle = median(median(each["busy"][asked]) for each in rounds)
            yield Row(
                side=f"{kind}: {title}, longest",
                unit="ms",
                figure=Timing.of([max(each["busy"][asked]) for each in rounds]),
                most=most,
                note=f"median {middle:.3g} ms, of an idle server {usual[asked]:.3g} ms",
                **common,
            )
        yield Row(
            side=f"{kind}: more memory",
            unit="MB",
            figure=Timing.of([each["resident"] / 1e6 for each in rounds]),
            **common,
        )


def others(bench: Bench) -> Iterator[Row]:
    """Tokens per second of each side, in turns, at one stream and at several.

    genai computes the same artefact in this process, without a server, and gives the same tokens. llama.cpp
    serves a Llama of as many bytes, with the same load; its tokens are counted, and are those of another
    model.
    """
    session = bench.session(bench.default_threads)
    assert session.spec is not None, "the model is an artefact"
    num_bytes = 4 * session.spec.model.parameters
    prompts = bench.prompts(TOGETHER)
    expected = greedy(session, prompts, bench.long)
    notes = {RAW: "", OWN: ""}
    if missing := llama.missing():
        bench.progress(f"others: {LLAMA} is skipped: {missing}")
    else:
        notes[LLAMA] = f"xllamacpp {version('xllamacpp')}, a Llama of as many bytes"
    if importlib.util.find_spec("onnxruntime_genai") is None:
        bench.progress(f"others: {GENAI} is skipped: it is not installed; pip install onnxruntime-genai")
    else:
        notes[GENAI] = f"{version('onnxruntime-genai')}, in this process, the same tokens"
    for streams in (1, TOGETHER):
        some = prompts[:streams]
        right = expected[:streams]
        rates: dict[str, list[float]] = {side: [] for side in (RAW, OWN, GENAI, LLAMA) if side in notes}
        bench.progress(f"others: {streams} streams")
        for _ in range(bench.repeats(REPEATS)):
            rates[RAW].append(streams / bench.baseline_loop(session, streams).seconds)
            with serving(bench.artefact, threads=bench.default_threads) as served:
                rates[OWN].append(_rate(window(served, bench, some, right)))
            if GENAI in rates:
                rates[GENAI].append(_genai(bench, some, right))
            if LLAMA in rates:
                rates[LLAMA].append(_llama(bench, some, num_bytes))
        for side, values in rates.items():
            yield Row(
                part="others",
                side=side,
                streams=streams,
                unit="tokens/s",
                figure=Timing.of(values),
                threads=bench.default_threads,
                note=notes[side],
            )


def _rate(figures: dict[str, float]) -> float:
    return figures["tokens"] / figures["seconds"]


def _genai(bench: Bench, prompts: Sequence[Sequence[int]], expected: list[list[str]]) -> float:
    """Tokens per second of genai's own loop over the artefact, with all prompts as one batch."""
    import onnxruntime_genai as og

    config = og.Config(str(bench.artefact))
    options = {"intra_op_num_threads": bench.default_threads}
    # genai always stops at some token; here it is one that does not come.
    drawn = {int(text) for texts in expected for text in texts}
    end = next(token for token in range(bench.config.model.vocab_size) if token not in drawn)
    model = {"eos_token_id": [end], "decoder": {"session_options": options}}
    config.overlay(json.dumps({"model": model}))
    params = og.GeneratorParams(loaded := og.Model(config))
    params.set_search_options(batch_size=len(prompts), chunk_size=0, do_sample=False)
    generator = og.Generator(loaded, params)
    generator.append_tokens(np.array(prompts, np.int32))
    found: list[list[str]] = [[] for _ in prompts]
    began = 0.0
    for step in range(bench.long):
        if step == WARM:
            began = time.perf_counter()
        generator.generate_next_token()
        for texts, token in zip(found, generator.get_next_tokens(), strict=True):
            texts.append(str(token))
    seconds = time.perf_counter() - began
    check_texts(found, expected)
    return len(prompts) * (bench.long - WARM) / seconds


def _llama(bench: Bench, prompts: Sequence[Sequence[int]], num_bytes: int) -> float:
    """Tokens per second of llama.cpp's server; each stream may be as long as it is asked to be."""
    context = len(prompts[0]) + bench.long + 8
    path = bench.folder / f"llama-{context}.gguf"
    if not path.exists():
        llama.write_model(path, bench.config.model, num_bytes, context=context)
    numbers = (bench.default_threads, len(prompts), context)
    command = [sys.executable, "-m", llama.__name__, str(path), *map(str, numbers)]
    with running(command) as served:
        return _rate(window(served, bench, prompts, None, ignore_eos=True))


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "overhead": overhead,
    "throughput": throughput,
    "between": between,
    "long": long_stream,
    "resident": resident,
    "stall": stall,
    "others": others,
}


def body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request for a greedy completion as a stream."""
    return {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0, "stream": True}


def greedy(session: Session, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[str]]:
    """The texts of the tokens with which `generate` continues each prompt, without blanks."""
    texts: list[list[str]] = [[] for _ in prompts]
    for piece in generate(
        session, [list(p) for p in prompts], max_tokens=max_tokens, sampler=GREEDY, text=False
    ):
        texts[piece.row].append(str(piece.token))
    return texts


def check_texts(found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> None:
    """Raises ArtefactError where a stream has other tokens than it should, or another number of them."""
    for stream, (texts, right) in enumerate(zip(found, expected, strict=True)):
        if [text.strip() for text in texts] != list(right):
            raise ArtefactError(
                f"stream {stream} has other tokens through the server than from `generate`; please report "
                "this."
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
    found = served.load(
        "streams",
        bodies=[body(prompt, bench.long) | fields for prompt in prompts],
        warm=WARM,
        until=bench.long - 2,
    )
    if expected is not None:
        check_texts(found["texts"], expected)
    figures: dict[str, float] = found["window"]
    return figures


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Steps of a session in this process: wall and CPU seconds of one."""

    seconds: float
    cpu: float


def baseline_steps(session: Session, rows: int, count: int, width: int = 1, *, at: int) -> Baseline:
    """The time of one `predict` step of `rows` rows of `width` tokens, in a loop of `count` steps.

    at: the stream position of the first timed token. A token at a later position attends to more memory, so
    the loop has to be where the streams are that it is compared with.
    """
    warm = min(5, at // width)
    memory = session.start(rows)
    for array in memory.tensors.values():
        array.fill(0)  # memory that was never written would be read from the cache
    memory.positions[:] = at - warm * width
    tokens = np.random.default_rng(0).integers(session.vocab.size, size=(count + warm, rows, width))
    for step in range(warm):
        session.predict(tokens[step], memory)
    seconds = time.perf_counter()
    cpu = time.process_time()
    for step in range(warm, count + warm):
        session.predict(tokens[step], memory)
    return Baseline(seconds=(time.perf_counter() - seconds) / count, cpu=(time.process_time() - cpu) / count)


def baseline_prompt(session: Session, prompt: Sequence[int], width: int) -> float:
    """The seconds in which `predict` alone feeds a prompt to a new stream, in pieces of `width` tokens."""
    memory = session.start(1)
    tokens = np.array([prompt])
    for array in memory.tensors.values():
        array.fill(0)  # a server's rows were written before
    began = time.perf_counter()
    for first in range(0, len(prompt), width):
        session.predict(tokens[:, first : first + width], memory)
    return time.perf_counter() - began


def unavailable() -> str | None:
    """Why this machine cannot measure the case; None where it can."""
    if not sys.platform.startswith("linux"):
        return "the CPU time and the memory of another process are read from Linux"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is missing; install '.[cpu,serve]'" if missing else None


def published(history: History) -> list[Run]:
    """For each part and size the newest run that may be published, with its figures that have a target.

    The CPU time of the baseline server is shown too. Of the attacks of `stall` only the worst is shown."""
    found = []
    for part in PARTS:
        for size in SIZES_SHOWN:
            with contextlib.suppress(ArtefactError):  # not measured yet at this size
                run = history.newest("serve", size, rows=("part", (part,)))
                rows = [row for row in run.rows if row["part"] == part]
                judged = [row for row in rows if _target(row, run)]
                streams = {row["streams"] for row in judged}
                baseline = [
                    row for row in rows if row["side"] == "baseline server" and row["streams"] in streams
                ]
                rows = judged + (baseline if part == "overhead" else [])
                found.append(Run({**run.document, "rows": _worst(rows) if part == "stall" else rows}))
    return [run for run in found if run.rows]


def _worst(rows: Sequence[Figures]) -> list[Figures]:
    """For each figure of the other client, the attack that makes it largest."""
    worst: dict[str, Figures] = {}
    for row in rows:
        figure = row["side"].rpartition(": ")[2]
        if figure not in worst or row["figure"]["median"] > worst[figure]["figure"]["median"]:
            worst[figure] = row
    return list(worst.values())


def _target(row: Figures, run: Run) -> str:
    median = row["figure"]["median"]
    most = row["most"]
    least = row["least"]
    if most is not None:
        return f"at most {number(most)}: {'holds' if median <= most else '**MISSED**'}"
    if least is not None:
        return f"at least {number(least)}: {'holds' if median >= least else '**MISSED**'}"
    return ""


def _note(row: Figures, run: Run) -> str:
    """What belongs to a figure, with its threads."""
    threads = row.get("threads")  # rows of earlier versions do not say it
    named = f"{threads} thread{'s' * (threads > 1)}" if threads else ""
    return "; ".join(note for note in (row["note"], named) if note)


CASE = Case(
    name="serve",
    run=run,
    keys=("part", "side", "streams", "threads"),
    columns=(
        Column("part", "part"),
        Column("model", lambda row, run: run.document["config"]),
        Column("what", "side"),
        Column("streams", "streams"),
        Column("median", "figure.median"),
        Column("from", "figure.fastest", detail=True),
        Column("to", "figure.slowest", detail=True),
        Column("unit", "unit"),
        Column("target", _target),
        Column("note", _note, detail=True),
    ),
    options=(
        "config",
        "repeats",
        only_option(PARTS, "Measure this part only"),
        minutes_option("Minutes of mixed load; 2 by default.", 2.0),
        option(
            "--tokens",
            "Tokens of the longest stream; 20,000 by default.",
            type=click.IntRange(1000, 1 << 24),
            default=20_000,
        ),
    ),
    published=published,
    unavailable=unavailable,
)
