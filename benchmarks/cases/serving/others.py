"""The part `others`: tokens per second of other programs in the same run, with weights of equal bytes."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import numpy as np

from benchmarks.cases.serving import llama
from benchmarks.cases.serving.bench import Bench, Row, check_texts, greedy, window
from benchmarks.cases.serving.server import running, serving
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
        missing = {LLAMA: llama.missing(), GENAI: _missing_genai(bench, right)}
        rates: dict[str, list[float]] = {
            side: [] for side in (RAW, OWN, GENAI, LLAMA) if not missing.get(side)
        }
        bench.progress(f"others: {streams} streams")
        for _ in range(bench.repeats):
            rates[RAW].append(streams / bench.baseline_loop(session, streams).seconds)
            with serving(bench.artefact, threads=bench.default_threads) as served:
                rates[OWN].append(_rate(window(served, bench, some, right)))
            if GENAI in rates:
                rates[GENAI].append(_genai(bench, some, right))
            if LLAMA in rates:
                rates[LLAMA].append(_llama(bench, some, num_bytes))
        notes = dict(missing)
        if GENAI in rates:
            notes[GENAI] = f"{version('onnxruntime-genai')}, in this process, the same tokens"
        if LLAMA in rates:
            notes[LLAMA] = f"xllamacpp {version('xllamacpp')}, a Llama of as many bytes"
        for side in (RAW, OWN, GENAI, LLAMA):
            yield Row(
                part="others",
                side=side,
                streams=streams,
                unit=UNIT,
                figure=Timing.of(rates[side]) if side in rates else None,
                threads=bench.default_threads,
                note=notes.get(side) or "",
            )


def _rate(figures: dict[str, float]) -> float:
    return figures["tokens"] / figures["seconds"]


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
