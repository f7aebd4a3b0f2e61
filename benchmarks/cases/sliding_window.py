"""Segments with memory against a vanilla Transformer that recomputes its window for every token.

This is section 4.5 of Dai et al. (2019). Both sides have the same sizes, engine, threads and precision, and
are compared with PyTorch before they are timed. A token of the segment side sees M
tokens and itself; a token of the window side sees M tokens, itself included.

The window side has the sizes and weights of the Transformer-XL except its position terms, absolute positions,
and no memory. This is the evaluation of Al-Rfou et al. as section 3.1 describes it. It uses the best of the
engine: packed projections, the Attention operator (or the fused operator, if the other side has it), queries
in blocks that never touch later keys, and a last layer that computes only the last position.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from benchmarks.checked_sessions import (
    agreed,
    filled,
    fused_library,
    nats_apart,
    open_checked,
    open_graph,
)
from benchmarks.harness import OPERATORS, Document, Job, Row, lengths_option, number, ratio
from benchmarks.measure import take_turns, timing
from benchmarks.models import artefact_of, random_weights
from benchmarks.plots import line
from runtimes.base.errors import ConfigError
from runtimes.contract.precision import PRESETS
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH
from runtimes.contract.tensors import TensorSpec
from trainer.model.arithmetic import step_multiply_adds
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel
from trainer.model.positions import sinusoids
from xl_export.graph.fused_cpu import ATTENTION, DOMAIN
from xl_export.graph.head import all_logits, embed
from xl_export.graph.layers import Layers, Weights
from xl_export.graph.ops import graph_input, save_model

# By attention length: how many times slower the model of Al-Rfou et al. is, on one GPU.
TABLE_9 = {3800: 1874, 2800: 1409, 1800: 773, 800: 363}
QUERIES_PER_BLOCK = 256  # of a recomputed window; faster than 128, 512 and all at once
OPSET = 23
TOLERANCE_NATS = PRESETS["fp32"].tolerance
OPTIONS = (
    lengths_option("Attention lengths in tokens, such as 64,128,256; the default depends on the model."),
    OPERATORS,
)


def run(job: Job) -> Iterator[Row]:
    """A row for each attention length, the shortest first."""
    config = job.config
    if config.model.pre_norm or config.model.vocabulary.cutoffs:
        raise ConfigError(
            f"{config.name} is pre-norm or has an adaptive softmax, which the window model does not have; "
            "give another --config."
        )
    repeats = job.repeats(config.repeats)
    weights = random_weights(config.model)
    longest = max(config.segment, *job.lengths)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, longest)
    for length in job.lengths:
        job.say(f"attention length {length}: building the window, comparing it with PyTorch")
        at = replace(job.with_memory(length), config=replace(config, mem_len=length, run=None))
        window = Window(
            at.folder / "window",
            weights,
            config.model,
            length,
            threads=job.threads,
            library=fused_library(job.operators),
        )
        check_window(window, weights, config.model, tokens[:length])
        session = open_checked(artefact_of(at), threads=job.threads, operators=job.operators)
        memory = filled(session)
        segment = tokens[None, : config.segment]
        sides = {
            "window_ms": functools.partial(window.next_logits, tokens[:length]),
            "segment_ms": functools.partial(session.step, segment, memory),
        }
        job.say(f"attention length {length}: timing {repeats} calls of each side")
        times = take_turns(sides, repeats=repeats)
        segment_count = step_multiply_adds(config.model, at.rule, "ring", config.segment) / config.segment
        yield {
            "attention_length": length,
            "operators": job.operators,
            "window_ms": timing(times["window_ms"]),
            "segment_ms": timing(times["segment_ms"], per=config.segment),
            "predicted_ratio": window_multiply_adds(config.model, length) / segment_count,
        }


class Window:
    """The window model on ONNX Runtime: one prediction per call. library: of the fused operator, if used."""

    def __init__(
        self,
        folder: Path,
        weights: Weights,
        model: ModelConfig,
        window: int,
        *,
        threads: int,
        library: Path | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        graph = FusedWindowGraph if library else WindowGraph
        save_model(graph(weights, model, window).build(), folder)
        self._session = open_graph(folder / GRAPH, threads=threads, library=library)

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [V] of the token after tokens int64 [W]."""
        logits: np.ndarray = self._session.run(["logits"], {"input_ids": tokens[None]})[0][0]
        return logits


def check_window(window: Window, weights: Weights, model: ModelConfig, tokens: np.ndarray) -> float:
    """The largest difference from PyTorch, in nats; raises ArtefactError beyond the tolerance."""
    difference = nats_apart(window.next_logits(tokens), exact_next_logits(weights, model, tokens))
    return agreed(difference, TOLERANCE_NATS, f"the window of {len(tokens)} tokens differs from PyTorch")


class WindowGraph(Layers):
    """input_ids int64 [1, W] → logits float32 [1, V] of the next token."""

    domains: Mapping[str, int] = MappingProxyType({})

    def __init__(self, weights: Weights, model: ModelConfig, window: int) -> None:
        assert not model.pre_norm, "the model of the comparison is post-norm"
        super().__init__(model, weights)
        self.window = window

    def build(self) -> ir.Model:
        op = self.op
        model = self.config
        ids = graph_input(TensorSpec(name="input_ids", dtype="int64", shape=(1, self.window)))
        positions = sinusoids(torch.arange(self.window), model.d_model).float().numpy()
        x = op.Add(embed(self, ids), op.constant(positions, "positions"))
        for layer in range(model.layers - 1):
            x = self.rest_of_block(layer, x, self.attention(layer, x))
        last = self.slice(x, self.window - 1, self.window, axis=1)
        last = self.rest_of_block(model.layers - 1, last, self.attention_of_last(model.layers - 1, x, last))
        logits = all_logits(self, op.Squeeze(last, op.constant(np.array([1]))))
        facts = TensorSpec(name="logits", dtype="float32", shape=(1, model.vocab_size))
        return op.model([ids], [logits], (facts,), opset=OPSET, domains=self.domains)

    def attention(self, layer: int, x: ir.Value) -> ir.Value:
        """The answers of all heads [1, W, H·K] at every position, one block of queries after the other."""
        op = self.op
        width = self.config.heads * self.config.head_dim
        packed = op.MatMul(x, self.packed(layer, "query", "key", "value"))
        query, key, value = (self.split_heads(y) for y in op.split(packed, [width] * 3, axis=2))
        answers = []
        for first, end in query_blocks(self.window):
            seen = np.arange(end) <= np.arange(first, end)[:, None]
            mask = op.constant(np.where(seen, np.float32(0), np.float32(-np.inf)), f"mask.{first}")
            keys, values = (self.slice(y, 0, end, axis=2) for y in (key, value))
            answers.append(op.Attention(self.slice(query, first, end, axis=2), keys, values, mask, scale=1.0))
        return self.join_heads(op.Concat(*answers, axis=2))

    def attention_of_last(self, layer: int, x: ir.Value, last: ir.Value) -> ir.Value:
        """The answers of all heads [1, 1, H·K] at the last position, to which the whole window is visible."""
        op = self.op
        width = self.config.heads * self.config.head_dim
        key, value = op.split(op.MatMul(x, self.packed(layer, "key", "value")), [width] * 2, axis=2)
        query = op.MatMul(last, self.packed(layer, "query"))
        return self.join_heads(op.Attention(*(self.split_heads(y) for y in (query, key, value)), scale=1.0))

    def rest_of_block(self, layer: int, x: ir.Value, answers: ir.Value) -> ir.Value:
        """Output projection, residuals, norms and the feed-forward network."""
        op = self.op
        name = f"blocks.{layer}."
        out = op.MatMul(answers, self.weight(name + "out.weight", transpose=True))
        x = self.norm(name + "attention_norm", op.Add(x, out))
        return self.norm(name + "feed_forward_norm", op.Add(x, self.feed_forward(layer, x)))

    def slice(self, x: ir.Value, first: int, end: int, *, axis: int) -> ir.Value:
        return self.op.Slice(x, *(self.op.constant(np.array([at])) for at in (first, end, axis)))

    def packed(self, layer: int, *kinds: str) -> ir.Value:
        """Projections [D, …] side by side, as one matrix."""
        matrices = [self.projection(layer, kind) for kind in kinds]
        return self.op.constant(np.concatenate(matrices, axis=1), f"blocks.{layer}.{'_'.join(kinds)}")


class FusedWindowGraph(WindowGraph):
    """The same with the fused operator, which is causal attention with mem_len 0 and the full mask."""

    domains: Mapping[str, int] = MappingProxyType({DOMAIN: 1})

    def attention(self, layer: int, x: ir.Value) -> ir.Value:
        op = self.op
        width = self.config.heads * self.config.head_dim
        packed = op.MatMul(x, self.packed(layer, "query", "key", "value"))
        positions = op.constant(np.arange(self.window)[None])
        attributes = {
            "heads": self.config.heads,
            "head_dim": self.config.head_dim,
            "mem_len": 0,
            "nearest": 0,
            "full": 1,
            "query_at": 0,
            "key_at": width,
            "value_at": 2 * width,
        }
        inputs = [packed, packed, None, None, None, positions]
        return op.custom(DOMAIN, ATTENTION, inputs, attributes, outputs=1)[0]


def query_blocks(window: int) -> list[tuple[int, int]]:
    """(first, end) of each block of queries; the block's scores are computed against keys 0 … end - 1."""
    return [(first, min(first + QUERIES_PER_BLOCK, window)) for first in range(0, window, QUERIES_PER_BLOCK)]


def window_multiply_adds(model: ModelConfig, window: int) -> int:
    """For one prediction of the vanilla model over a window of W tokens, all recomputed.

        layers but the last   W (4 D A + 2 D F) + 2 A Σ_blocks (end - first) end
        last layer            W 2 D A (keys, values) + 2 D A (query, out) + 2 D F + 2 A W
        output                D V

    The sum over blocks is W² for one block and nears W²/2 for many: keys after a block are never touched.
    The last layer answers only for the last position.
    """
    D = model.d_model
    A = model.heads * model.head_dim
    F = model.d_ff
    pairs = sum((end - first) * end for first, end in query_blocks(window))
    full = window * (4 * D * A + 2 * D * F) + 2 * A * pairs
    last = window * 2 * D * A + 2 * D * A + 2 * D * F + 2 * A * window
    return (model.layers - 1) * full + last + D * model.vocab_size


def exact_next_logits(weights: Weights, model: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits [V] of the token after tokens [W]: the window model in PyTorch, in float64."""
    W = len(tokens)
    vanilla = LanguageModel(replace(model, positions="absolute", context=W)).double().eval()
    vanilla.load_state_dict({name: torch.from_numpy(weights[name]) for name in vanilla.state_dict()})
    rule = MemoryRule(mem_len=0, segment=W, mask="full")
    start = torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        logits, _ = vanilla(torch.from_numpy(tokens[None]), vanilla.start(1, rule), start, rule)
    answer: np.ndarray = logits[0, -1].numpy()
    return answer


def draw(figure: Any, rows: Sequence[Row]) -> str:
    """Draws how many times slower the window is, here and in the paper; returns the title."""
    axes = figure.subplots()
    lengths = [row["attention_length"] for row in rows]
    ratios = [ratio(row, "window_ms", "segment_ms") for row in rows]
    line(axes, lengths, ratios, "measured here, on a CPU", ours=True)
    paper = [length for length in lengths if length in TABLE_9]
    if paper:
        line(axes, paper, [TABLE_9[at] for at in paper], "Dai et al., Table 9, on a GPU", ours=False)
    for length, value in zip(lengths, ratios, strict=True):
        axes.annotate(
            number(value), (length, value), (-8, 6), textcoords="offset points", fontsize=9, ha="right"
        )
    axes.set_xlabel("tokens that each token attends to", fontsize=9)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    return "How many times slower a recomputed window is than memory"


def _paper(row: Row, document: Document) -> int | None:
    return TABLE_9.get(row["attention_length"])


KEYS = ("attention_length", "operators")
COLUMNS = {
    "attention length": "attention_length",
    "operators": "operators",
    "window, ms per token": "window_ms",
    "segments, ms per token": "segment_ms",
    "times slower": lambda row, _: f"{ratio(row, 'window_ms', 'segment_ms'):,.0f}",
    "by arithmetic only": lambda row, _: f"{row['predicted_ratio']:,.0f}",
    "Table 9 (GPU)": _paper,
}
