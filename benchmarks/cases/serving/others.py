"""The part `others`: tokens per second of other programs in the same run, with weights of equal bytes."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.cases.serving import llama
from benchmarks.cases.serving.bench import Bench, Row, body, check_texts, greedy
from benchmarks.cases.serving.server import Served, running, serving
from benchmarks.measure import Timing

UNIT = "tokens/s"
RAW = "loop over Session"
OWN = "xl-export serve"
GENAI = "onnxruntime-genai"
LLAMA = "llama.cpp's server"


def others(bench: Bench) -> Iterator[Row]:
    """Tokens per second of each side, in turns, at one stream and at several.

    genai computes the same artefact in this process, without a server, and gives the same tokens. llama.cpp
    serves a Llama of as many bytes, with the same load; its tokens are counted, and are those of another
    model.
    """
    session = bench.session(bench.default_threads)
    assert session.spec is not None, "the model is an artefact"
    num_bytes = 4 * session.spec.model.parameters
    prompts = bench.prompts(bench.sizes.together)
    expected = greedy(session, prompts, bench.long)
    for streams in sorted({1, bench.sizes.together}):
        some = prompts[:streams]
        right = expected[:streams]
        rates: dict[str, list[float]] = {}
        notes = {LLAMA: llama.missing() or "", GENAI: _missing_genai(bench, right) or ""}

        def measure(side: str, rate: Callable[[], float], found: dict[str, list[float]] = rates) -> None:
            found.setdefault(side, []).append(rate())

        bench.progress(f"others: {streams} streams")
        for _ in range(bench.repeats):
            measure(RAW, lambda n=streams: n / bench.baseline_loop(session, n).seconds)  # type: ignore[misc]
            with serving(bench.artefact, threads=bench.default_threads) as served:
                measure(OWN, lambda at=served, p=some, r=right: _served(at, bench, p, r))  # type: ignore[misc]
            if not notes[GENAI]:
                measure(GENAI, lambda p=some, r=right: _genai(bench, p, r))  # type: ignore[misc]
            if not notes[LLAMA]:
                measure(LLAMA, lambda n=streams, p=some: _llama(bench, n, p, num_bytes))  # type: ignore[misc]
        if not notes[GENAI]:
            notes[GENAI] = f"{version('onnxruntime-genai')}, in this process, the same tokens"
        if not notes[LLAMA]:
            notes[LLAMA] = f"xllamacpp {version('xllamacpp')}, a Llama of as many bytes"
        for side in (RAW, OWN, GENAI, LLAMA):
            figure = Timing.of(rates[side]) if side in rates else None
            yield Row(
                part="others",
                side=side,
                streams=streams,
                unit=UNIT,
                figure=figure,
                threads=bench.default_threads,
                note=notes.get(side, ""),
            )


def _served(
    served: Served, bench: Bench, prompts: Sequence[Sequence[int]], expected: list[list[str]]
) -> float:
    """Tokens per second of streams through our server."""
    texts, rate = _rate(served, bench, [body(prompt, bench.long) for prompt in prompts])
    check_texts(texts, expected)
    return rate


def _rate(served: Served, bench: Bench, bodies: list[dict[str, Any]]) -> tuple[list[list[str]], float]:
    found = served.load("streams", bodies=bodies, warm=bench.sizes.warm, until=bench.long - 2)
    return found["texts"], found["window"]["tokens"] / found["window"]["seconds"]


def _missing_genai(bench: Bench, expected: list[list[str]]) -> str | None:
    if len({text for texts in expected for text in texts}) == bench.config.model.vocab_size:
        return "every token is drawn, and genai would end a text at one of them"
    if importlib.util.find_spec("onnxruntime_genai") is None:
        return "onnxruntime-genai is not installed; pip install onnxruntime-genai"
    return None


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
    params.set_search_options(batch_size=len(prompts), chunk_size=0)
    generator = og.Generator(loaded, params)
    generator.append_tokens(np.array(prompts, np.int32))
    found: list[list[str]] = [[] for _ in prompts]
    began = 0.0
    for step in range(bench.long):
        if step == bench.sizes.warm:
            began = time.perf_counter()
        generator.generate_next_token()
        for texts, token in zip(found, generator.get_next_tokens(), strict=True):
            texts.append(str(token))
    seconds = time.perf_counter() - began
    check_texts(found, expected)
    return len(prompts) * (bench.long - bench.sizes.warm) / seconds


def _llama(bench: Bench, streams: int, prompts: Sequence[Sequence[int]], num_bytes: int) -> float:
    """Tokens per second of llama.cpp's server; each stream may be as long as it is asked to be."""
    context = len(prompts[0]) + bench.long + 8
    path = bench.folder / f"llama-{context}.gguf"
    if not path.exists():
        llama.write_model(path, bench.config.model, num_bytes, context=context)
    numbers = (bench.default_threads, streams, context)
    command = [sys.executable, "-m", llama.__name__, str(path), *map(str, numbers)]
    with running(command) as served:
        bodies = [{**body(prompt, bench.long), "ignore_eos": True} for prompt in prompts]
        return _rate(served, bench, bodies)[1]
