"""The parts of the case that measure the server itself. Each gives rows, and checks all tokens first."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cases.serving.attacks import ATTACKS
from benchmarks.cases.serving.baseline_server import baseline_server
from benchmarks.cases.serving.bench import (
    Bench,
    Row,
    baseline_between,
    baseline_prompt,
    baseline_steps,
    body,
    check_scores,
    check_texts,
    greedy,
    window,
)
from benchmarks.cases.serving.server import ROOT, Served, serving
from benchmarks.measure import Timing
from runtimes.base.errors import ArtefactError
from runtimes.sessions.open import open_session
from runtimes.tasks.evaluate import evaluate

MICROSECONDS = "µs of CPU a token"
MILLISECONDS = "ms"
RATIO = "ratio"
SIDES = ("whole", "engine", "HTTP", "engine's clock", "baseline server")  # of the overhead
OUTSIDE = ("engine_other_seconds_total", "engine_tokens_drawn_total")
MANY = 16  # streams from which the target AT_MANY holds
AT_MANY = 15.0
AT_ONE = 80.0
SHARE = 0.97
SHARE_STREAMS = 8
SHARE_SIZE = "enwik8-base"
LATE = 1.05  # of tokens at the end of a long stream over those near its beginning
BLOCK = 1000  # tokens that are one figure of a long stream
TURNS = 20  # of the part `long`, for each repeat: single turns differ by a third on a busy host
FLAT = 1.02  # of the resident memory
FIRST_TOKENS = 4  # that are checked after each long prompt

MODEL = ROOT / "examples" / "stories" / "tales"  # its tokens are parts of words, which cost most to encode
TENANTS = {"attacker": "attacker-0123456789abcdef", "other": "other-0123456789abcdef"}
HEALTH = 50.0  # milliseconds
KINDS = (*ATTACKS, "snapshots", "headers of 60 MB")
ATTACKERS = 8  # requests of the attacker


def overhead(bench: Bench) -> Iterator[Row]:
    """CPU time of the server's process beyond that of the same steps, per token, with one thread.

    The main thread of the server runs the event loop, so its CPU time is that of HTTP; the engine has a
    thread of its own. `engine's clock` is what the engine itself says of its time outside of steps. `baseline
    server` is a program that only steps and sends (see `baseline_server`), measured in the same way.
    """
    session = bench.session(1)
    prompts = bench.prompts(max(bench.sizes.streams))
    expected = greedy(session, prompts, bench.long)
    with serving(bench.artefact, threads=1, options=("--rows", max(bench.sizes.streams))) as served:
        check_scores(served, session, prompts[:4])
        for streams in bench.sizes.streams:
            bench.progress(f"overhead: {streams} streams")
            found: dict[str, list[float]] = {side: [] for side in (*SIDES, "client")}
            some = prompts[:streams]
            right = expected[:streams]
            with baseline_server(bench.artefact, threads=1, streams=streams) as baseline:
                for _ in range(bench.repeats):
                    loop = bench.baseline_loop(session, streams).cpu / streams * 1e6
                    before = served.metrics()
                    figures = window(served, bench, some, right)
                    outside, drawn = (served.metrics()[name] - before[name] for name in OUTSIDE)
                    per_token = 1e6 / figures["tokens"]
                    whole = figures["server_cpu"] * per_token - loop
                    http = figures["server_main_cpu"] * per_token
                    found["whole"].append(whole)
                    found["HTTP"].append(http)
                    found["engine"].append(whole - http)
                    found["engine's clock"].append(outside / drawn * 1e6)
                    found["client"].append(figures["client_cpu"] / figures["seconds"])
                    figures = window(baseline, bench, some, right)
                    found["baseline server"].append(figures["server_cpu"] / figures["tokens"] * 1e6 - loop)
            target = AT_MANY if streams >= MANY else AT_ONE if streams == 1 else None
            note = f"the client used {median(found['client']):.0%} of a CPU"
            for side in SIDES:
                yield Row(
                    part="overhead",
                    side=side,
                    streams=streams,
                    unit="µs a token" if side == "engine's clock" else MICROSECONDS,
                    figure=Timing.of(found[side]),
                    most=target if side == "whole" else None,
                    note=note if side == "whole" else "",
                )


def throughput(bench: Bench) -> Iterator[Row]:
    """Tokens per second through the server over those of the baseline loop, with one thread and with all;
    next to it those of a program that only steps and sends (see `baseline_server`).
    """
    streams = bench.sizes.together
    prompts = bench.prompts(streams)
    for threads in sorted({1, bench.threads}):
        bench.progress(f"throughput: {streams} streams, {threads} threads")
        session = bench.session(threads)
        expected = greedy(session, prompts, bench.long)
        rates: dict[str, list[float]] = {"baseline loop": [], "baseline server": [], "server": []}
        with (
            serving(bench.artefact, threads=threads) as served,
            baseline_server(bench.artefact, threads=threads, streams=streams) as baseline,
        ):
            for _ in range(bench.repeats):
                rates["baseline loop"].append(streams / bench.baseline_loop(session, streams).seconds)
                for side, program in (("baseline server", baseline), ("server", served)):
                    figures = window(program, bench, prompts, expected)
                    rates[side].append(figures["tokens"] / figures["seconds"])
        named = f", {threads} thread{'s' * (threads > 1)}"
        for side, values in rates.items():
            yield Row(
                part="throughput",
                side=side + named,
                streams=streams,
                unit="tokens/s",
                figure=Timing.of(values),
            )
        claimed = bench.config.name == SHARE_SIZE and streams == SHARE_STREAMS
        for side in ("baseline server", "server"):
            ratios = [a / b for a, b in zip(rates[side], rates["baseline loop"], strict=True)]
            yield Row(
                part="throughput",
                side=f"{side} over baseline loop{named}",
                streams=streams,
                unit=RATIO,
                figure=Timing.of(ratios),
                least=SHARE if claimed and side == "server" else None,
            )


def between(bench: Bench) -> Iterator[Row]:
    """The time between tokens while long prompts arrive, and the time to the first token of an idle server.

    Targets: 99 % within two median steps and a piece of prompt; the prompt's own pieces and two steps.
    """
    sizes = bench.sizes
    segment = bench.config.segment
    session = bench.session(bench.default_threads)
    pieces = -(-sizes.prompt // segment)
    longs = bench.prompts(sizes.arriving + bench.repeats, pieces, seed=1)
    shorts = bench.prompts(bench.repeats, seed=2)
    prompts = bench.prompts(sizes.listening, seed=3)
    warm = sizes.warm + bench.config.token_repeats
    length = warm + sizes.arriving * pieces + sizes.spare
    bench.progress("between: what the model says in this process")
    answers = greedy(session, prompts, length)
    long_answers = [greedy(session, [prompt], FIRST_TOKENS)[0] for prompt in longs]
    short_answers = [greedy(session, [prompt], FIRST_TOKENS)[0] for prompt in shorts]
    piece = baseline_steps(session, 1, max(8, bench.config.token_repeats), segment, at=len(longs[0])).seconds
    rounds = baseline_between(
        session, sizes.listening, segment, at=segment + warm, prompts=sizes.arriving, pieces=pieces
    )
    with serving(bench.artefact, threads=bench.default_threads, options=("--cache", 0)) as served:
        bench.progress(f"between: {sizes.arriving} prompts of {len(longs[0]):,} tokens arrive")
        found = served.load(
            "arrivals",
            bodies=[body(prompt, length) for prompt in prompts],
            prompts=[body(prompt, FIRST_TOKENS) for prompt in longs[: sizes.arriving]],
            warm=warm,
        )
        check_texts(found["texts"], answers)
        check_texts(found["prompt_texts"], long_answers[: sizes.arriving])
        idle, busy = (np.array(found["gaps"][name]) * 1e3 for name in ("idle", "busy"))
        middle = float(np.median(idle))
        common: dict[str, Any] = {
            "part": "between",
            "streams": sizes.listening,
            "unit": MILLISECONDS,
            "threads": bench.default_threads,
        }
        yield Row(side="idle, p50", figure=_percentile(idle, 50), **common)
        yield Row(side="idle, p99", figure=_percentile(idle, 99), **common)
        yield Row(side=f"prompts of {len(longs[0]):,} arrive, p50", figure=_percentile(busy, 50), **common)
        yield Row(
            side=f"prompts of {len(longs[0]):,} arrive, p99",
            figure=_percentile(busy, 99),
            most=2 * middle + piece * 1e3,
            note=f"a piece of {segment} tokens alone takes {piece * 1e3:.3g} ms",
            **common,
        )
        yield Row(
            side="the same rounds in a loop, p99",
            figure=_percentile(np.array(rounds) * 1e3, 99),
            note="a step of the streams and a piece of a prompt, by `Session.predict` alone",
            **common,
        )
        for some, right in (
            (shorts, short_answers),
            (longs[sizes.arriving :], long_answers[sizes.arriving :]),
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
                unit=MILLISECONDS,
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
    block = min(BLOCK, bench.tokens // 4)
    (prompt,) = bench.prompts(1)
    expected = greedy(session, [prompt], 2 * block)
    options = ("--max-tokens", bench.tokens, "--state", bench.folder / "streams")
    with serving(bench.artefact, threads=bench.default_threads, options=options) as served:
        bench.progress(f"long: one stream of {bench.tokens:,} tokens")
        rounds = TURNS * bench.repeats
        found = served.load("long", prompt=prompt, tokens=bench.tokens, block=block, rounds=rounds)
    check_texts([found["texts"]], expected)
    early, late = ([seconds * 1e3 for seconds in found[side]] for side in ("early", "late"))
    common: dict[str, Any] = {"part": "long", "streams": 1, "threads": bench.default_threads}
    yield Row(side=f"token {block:,} and after", unit=MILLISECONDS, figure=Timing.of(early), **common)
    yield Row(side=f"token {bench.tokens:,} and after", unit=MILLISECONDS, figure=Timing.of(late), **common)
    yield Row(
        side=f"token {bench.tokens:,} over token {block:,}",
        unit=RATIO,
        figure=Timing.of([last / first for first, last in zip(early, late, strict=True)]),
        most=LATE,
        note=f"{rounds} turns of {block:,} tokens each",
        **common,
    )


def resident(bench: Bench) -> Iterator[Row]:
    """The server's resident memory under mixed load: at the end over the first tenth."""
    sizes = bench.sizes
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
        stored = sizes.stored if served.asked("GET", "/v1/streams").status == 200 else 0
        what = f"{stored:,} stored streams" if stored else "completions and scores; the server stores none"
        bench.progress(f"resident: {bench.minutes:g} minutes of mixed load, {what}")
        found = served.load(
            "mixed",
            seconds=bench.minutes * 60,
            streams=stored,
            clients=sizes.clients,
            segment=bench.config.segment,
            vocabulary=bench.config.model.vocab_size,
            seed=0,
            known=known,
            scores=scores,
        )
        _check_all_rows_are_free(served)
    memory = found["resident"]
    tenth = max(1, len(memory) // 10)
    first = median(memory[:tenth])
    last = median(memory[-tenth:])
    done = ", ".join(f"{count:,} {name}" for name, count in sorted(found["done"].items()))
    common: dict[str, Any] = {"part": "resident", "streams": stored, "threads": bench.default_threads}
    for side, value in (("first tenth", memory[:tenth]), ("end", memory[-tenth:])):
        yield Row(side=side, unit="MB", figure=Timing.of([bytes_ / 1e6 for bytes_ in value]), **common)
    yield Row(
        side=f"end over first tenth of {bench.minutes:g} minutes",
        unit=RATIO,
        figure=Timing.of([last / first]),
        most=FLAT,
        note=f"{what}; {done}",
        **common,
    )


def stall(bench: Bench) -> Iterator[Row]:
    """The longest answer to `/health`, and to a text of 5 KB that another tenant encodes, during each attack,
    and the memory that the attack takes. This server and the one of `bench.before` take turns.

    Targets: 50 ms, and twice the time of an idle server and one step of the model.
    """
    if not MODEL.is_dir():
        yield Row(
            part="stall",
            side="all",
            streams=ATTACKERS,
            unit="ms",
            figure=None,
            note=f"{MODEL.name} is missing",
        )
        return
    session = open_session(MODEL, threads=1, device="cpu")
    step = baseline_steps(session, 1, 8, session.rule.segment, at=session.rule.mem_len).seconds * 1e3
    versions = {"now": ROOT} | ({} if bench.before is None else {"before": bench.before})
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name) / "keys"
        keys.touch(mode=0o600)
        keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in TENANTS.items()), encoding="utf-8")
        for kind in KINDS[: bench.sizes.attacks]:
            found: dict[str, list[dict[str, Any]]] = {version: [] for version in versions}
            for at in range(bench.repeats):
                for version, root in versions.items():
                    bench.progress(f"stall: {kind}, {version}")
                    # A server of its own each: what an attack has begun may go on after it.
                    state = Path(name) / f"{kind} {version} {at}"
                    options = ("--api-keys", keys, "--state", state)
                    with serving(MODEL, threads=1, options=options, root=root) as served:
                        job = {"attack": kind, "at_once": ATTACKERS, "seconds": bench.sizes.attacked}
                        found[version].append(served.load("stall", **job, keys=list(TENANTS.values())))
            for version, rounds in found.items():
                yield from _stalled(kind, version, rounds, step)


def _stalled(kind: str, version: str, rounds: list[dict[str, Any]], step: float) -> Iterator[Row]:
    common: dict[str, Any] = {"part": "stall", "streams": ATTACKERS, "threads": 1}
    idle = median(median(each["idle"]["short"]) for each in rounds)
    for asked, title, most in (
        ("health", "/health", HEALTH),
        ("short", "a text of 5 KB", 2 * idle + step),
    ):
        middle = median(median(each["busy"][asked]) for each in rounds)
        usual = median(median(each["idle"][asked]) for each in rounds)
        yield Row(
            side=f"{kind}, {version}: {title}, longest",
            unit="ms",
            figure=Timing.of([max(each["busy"][asked]) for each in rounds]),
            most=most if version == "now" else None,
            note=f"median {middle:.3g} ms, of an idle server {usual:.3g} ms",
            **common,
        )
    yield Row(
        side=f"{kind}, {version}: more memory",
        unit="MB",
        figure=Timing.of([each["resident"] / 1e6 for each in rounds]),
        **common,
    )


def _percentile(values: np.ndarray, which: int) -> Timing:
    """A percentile as a figure, with the smallest and the largest of all values."""
    found = Timing.of(values.tolist())
    return replace(found, median=float(np.percentile(values, which)))


def _check_all_rows_are_free(served: Served) -> None:
    """Raises ArtefactError where tasks that have ended still hold rows."""
    for _ in range(100):
        figures = served.metrics()
        if figures["rows_decoding"] + figures["rows_prompt"] == 0:
            return
        time.sleep(0.1)
    raise ArtefactError("rows of the server are not free although no client is left; please report this.")
