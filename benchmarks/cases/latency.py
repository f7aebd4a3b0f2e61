"""Consecutive tokens one by one: percentiles with memory of a fixed length and with a growing cache.

The claim is that after a warm-up no token costs more than three times the median, because the cost is
constant. Before the timed tokens, both sides are fed as many tokens as the memory holds, so that both begin
with the same length. The sides take turns of a hundred tokens.

The growing side is the same model with a key/value cache to which every token is added and none dropped. It
uses the best of the engine for one token at a time. All of the cache is visible, so there is no mask. The
position scores are one product with the needed rows of the table, which are stored from the furthest to the
nearest, so that no shift is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from benchmarks.case import Case, Claim, Column, Job, Line, number
from benchmarks.checked_sessions import Operators, agreed, nats_apart, open_graph
from benchmarks.measure import Timing, in_turns, milliseconds
from benchmarks.models import Weights, random_artefact, random_weights
from runtimes import open_session
from runtimes.contract.precision import PRESETS
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH
from runtimes.contract.tensors import TensorSpec
from trainer.model.config import ModelConfig
from trainer.model.model import LanguageModel
from trainer.model.terms import ModelTerms
from xl_export.graph.head import all_logits, embed
from xl_export.graph.layers import Layers
from xl_export.graph.ops import graph_input, save_model
from xl_export.graph.tables import position_table, query_bias

WARM = 20  # untimed tokens before the timed ones
CHECKED = 32  # tokens of the growing cache that are compared with PyTorch before anything is timed
PART = 100  # tokens of one turn, whose median is kept in the history
SETTLE = 3  # untimed tokens before each turn
OPSET = 23
TOLERANCE = PRESETS["fp32"].tolerance  # nats


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side."""

    side: str
    mem_len: int
    #: Of ONNX Runtime.
    operators: Operators = "standard"
    #: Of all tokens.
    token: Timing
    #: A percentile of all tokens, and the median of each hundred in order, in milliseconds.
    p99: float
    medians: list[float]


def run(job: Job) -> list[Row]:
    """A row of the artefact and a row of the growing cache; repeats are timed tokens.

    The artefact uses the fused operator if it is built.
    """
    tokens = job.repeats(job.config.consecutive)
    rule = job.rule
    turns = -(-tokens // PART)
    before = rule.slots + WARM
    size = before + SETTLE * turns + tokens + 1
    stream = np.random.default_rng(0).integers(0, job.config.model.vocab_size, size).tolist()
    session = open_session(random_artefact(job), threads=job.threads, device="cpu")
    job.progress("building the graph of the growing cache, and comparing it with PyTorch")
    weights = random_weights(job.config.model)
    growing = Growing(job.folder / "growing", weights, job.config.model, size, threads=job.threads)
    expected = pytorch_logits(weights, job.config.model, np.array(stream))
    first = np.stack([growing.next_logits(token) for token in stream[:CHECKED]])
    compared(first, expected[:CHECKED])
    memory = session.start(1)
    of_fixed = iter(stream)
    of_growing = iter(stream[CHECKED:])
    sides: dict[str, Callable[[], Any]] = {
        "fixed memory": lambda: session.step(np.array([[next(of_fixed)]]), memory),
        "growing cache": lambda: growing.next_logits(next(of_growing)),
    }
    job.progress(
        f"memory of {rule.mem_len} tokens: feeding {before} tokens, then timing {tokens} on each side in "
        f"turns of {PART}"
    )
    milliseconds(sides["fixed memory"], repeats=0, warmup=before)
    milliseconds(sides["growing cache"], repeats=0, warmup=before - CHECKED)
    times = in_turns(sides, repeats=tokens, turns=turns, warmup=SETTLE)
    compared(growing.next_logits(stream[-1])[None], expected[-1:])
    operators: dict[str, Operators] = {"fixed memory": "fused" if session.kernel == "fused" else "standard"}
    return [
        Row(
            side=side,
            mem_len=rule.mem_len,
            operators=operators.get(side, "standard"),
            token=Timing.of(ms),
            p99=float(np.percentile(ms, 99)),
            medians=[float(np.median(ms[at : at + PART])) for at in range(0, tokens, PART)],
        )
        for side, ms in times.items()
    ]


class Growing:
    """One stream on ONNX Runtime that remembers all of its tokens, up to `longest`."""

    def __init__(
        self, folder: Path, weights: Weights, model: ModelConfig, longest: int, *, threads: int
    ) -> None:
        folder.mkdir(parents=True)
        save_model(GrowingGraph(weights, model, longest).build(), folder)
        self._session = open_graph(folder / GRAPH, threads=threads)
        empty = np.zeros((1, model.heads, 0, model.head_dim), np.float32)
        self._cache = [onnxruntime.OrtValue.ortvalue_from_numpy(empty) for _ in range(2 * model.layers)]

    def next_logits(self, token: int) -> np.ndarray:
        """Logits [V] after one more token."""
        io = self._session.io_binding()
        io.bind_cpu_input("input_ids", np.array([[token]]))
        for at, value in enumerate(self._cache):
            io.bind_ortvalue_input(f"past.{at}", value)
        for output in self._session.get_outputs():
            io.bind_output(output.name)
        self._session.run_with_iobinding(io)
        logits, *self._cache = io.get_outputs()
        answer: np.ndarray = logits.numpy()[0, -1]
        return answer


def pytorch_logits(weights: Weights, model: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    """Logits [N, V] after each of tokens [N] in PyTorch, in one segment without memory, as in training."""
    network = LanguageModel(model).eval()
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    rule = MemoryRule(mem_len=0, segment=len(tokens), mask="full")
    with torch.inference_mode():
        logits, _ = network(
            torch.from_numpy(tokens[None]), network.start(1, rule), torch.zeros(1, dtype=torch.int64), rule
        )
    answer: np.ndarray = logits[0].numpy()
    return answer


class GrowingGraph(Layers):
    """The graph of one token. Inputs: input_ids int64 [1, 1], and keys and values [1, H, P, K] of all before.

    Outputs: logits [1, 1, V], and keys and values [1, H, P + 1, K].
    """

    def __init__(self, weights: Weights, model: ModelConfig, longest: int) -> None:
        assert (model.positions, model.sublayers, model.pre_norm) == ("relative", "feed-forward", False)
        super().__init__(model, weights)
        self.longest = longest
        self.terms = ModelTerms(model, weights, MemoryRule(mem_len=longest, segment=1))

    def build(self) -> ir.Model:
        op = self.op
        model = self.config
        ids = graph_input(TensorSpec(name="input_ids", dtype="int64", shape=(1, 1)))
        shape = (1, model.heads, "past", model.head_dim)
        past = [
            graph_input(TensorSpec(name=f"past.{at}", dtype="float32", shape=shape))
            for at in range(2 * model.layers)
        ]
        x = embed(self, ids)
        present = []
        for layer in range(model.layers):
            answers, cache = self.attention(layer, x, past[2 * layer : 2 * layer + 2])
            present += cache
            name = f"blocks.{layer}."
            out = op.MatMul(answers, self.weight(name + "out.weight", transpose=True))
            x = self.norm(name + "attention_norm", op.Add(x, out))
            x = self.norm(name + "feed_forward_norm", op.Add(x, self.feed_forward(layer, x)))
        facts = [TensorSpec(name="logits", dtype="float32", shape=(1, 1, model.vocab_size))]
        longer = (*shape[:2], "present", shape[3])
        facts += [
            TensorSpec(name=f"present.{at}", dtype="float32", shape=longer) for at in range(2 * model.layers)
        ]
        return op.model([ids, *past], [all_logits(self, x), *present], tuple(facts), opset=OPSET)

    def attention(self, layer: int, x: ir.Value, past: list[ir.Value]) -> tuple[ir.Value, list[ir.Value]]:
        """The answers of all heads [1, 1, H·K] to the token, and the longer cache."""
        op = self.op
        name = f"blocks.{layer}."
        heads = range(self.config.heads)
        width = self.config.heads * self.config.head_dim
        matrices = [self.projection(layer, kind) for kind in ("query", "key", "value")]
        packed = op.MatMul(x, op.constant(np.concatenate(matrices, axis=1), name + "query_key_value"))
        query, *own = (self.split_heads(y) for y in op.split(packed, [width] * 3, axis=2))
        keys, values = (op.Concat(before, new, axis=2) for before, new in zip(past, own, strict=True))
        terms = self.terms.layer(layer)
        table = position_table(terms, heads, self.longest + 1)
        assert table is not None
        rows = op.constant(np.array([self.longest + 1]))
        first = op.Sub(rows, op.Shape(keys, start=2, end=3))
        backwards = op.constant(np.ascontiguousarray(table[:, :, ::-1]), name + "positions")  # furthest first
        needed = op.Slice(backwards, first, rows, op.constant(np.array([2])))  # [H, K, P + 1]
        u, v = (query_bias(vector, heads) for vector in (terms.u, terms.v))
        scores = op.MatMul(op.Add(query, op.constant(v, name + "v")), needed)  # [1, H, 1, P + 1]
        answers = op.Attention(op.Add(query, op.constant(u, name + "u")), keys, values, scores, scale=1.0)
        return self.join_heads(answers), [keys, values]


def compared(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of the growing cache from PyTorch; raises ArtefactError if it is wrong."""
    return agreed(nats_apart(logits, expected), TOLERANCE, "the growing cache differs from PyTorch")


def _notes(lines: Sequence[Line]) -> list[str]:
    row = lines[0].row
    return [
        f"{row['token']['repeats']:,} consecutive tokens on each side, after {row['mem_len']:,} tokens of "
        "memory."
    ]


def _slowest(lines: Sequence[Line]) -> float:
    token = lines[0].row["token"]
    return float(token["slowest"] / token["median"])


CASE = Case(
    name="latency",
    run=run,
    keys=("side",),
    columns=(
        Column("side", "side"),
        Column("median, ms", "token.median"),
        Column("99 % within, ms", "p99"),
        Column("slowest, ms", "token.slowest"),
        Column("median of the first 100", lambda row, run: number(row["medians"][0])),
        Column("median of the last 100", lambda row, run: number(row["medians"][-1])),
    ),
    notes=_notes,
    claims=(
        Claim(
            limit=3.0,
            text="with fixed memory no token takes more than {limit:g} times the median",
            found="the slowest took {value:.2f} times the median",
            value=_slowest,
        ),
    ),
    options=("config", "repeats", "mem-len"),
    published=lambda history: [history.newest("latency", "enwik8-base")],
)
