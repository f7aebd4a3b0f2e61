"""Memory in int8: the graph of standard operators against the naive memory in PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from runtimes import check, open_session
from runtimes.base.errors import ArtefactError
from runtimes.contract.spec import load_spec
from runtimes.contract.tensors import TensorSpec
from tests.architectures import ARCHITECTURES
from tests.commands import xl
from tests.streams import feed, rows
from trainer.model.projected import append_in_bytes, through_bytes
from trainer.run.checkpoint import load_run
from trainer.run.session import ProjectedTorchSession
from xl_export.artefact.export import export
from xl_export.graph.memory import bytes_and_scales, widened
from xl_export.graph.ops import Ops, graph_input


def quantiser() -> onnxruntime.InferenceSession:
    """Vectors [B, h, T, K] → their bytes, their scales, and the vectors as they are read again."""
    op, fact = Ops(), TensorSpec(name="x", dtype="float32", shape=("batch", 2, "tokens", 16))
    stored, scales = bytes_and_scales(op, x := graph_input(fact))
    facts = (
        dataclasses.replace(fact, name="bytes", dtype="int8"),
        dataclasses.replace(fact, name="scales", shape=(*fact.shape[:-1], "1")),
        dataclasses.replace(fact, name="again"),
    )
    model = op.model([x], [stored, scales, widened(op, stored, scales)], facts, opset=24)
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())


def test_the_graph_stores_what_the_naive_memory_stores() -> None:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(2, 2, 400, 16)).astype(np.float32)
    x *= (10.0 ** draw.uniform(-44, 37, (2, 2, 400, 1))).astype(np.float32)  # also below the normal numbers
    x[0, 0, 0] = 0
    x[0, 0, 1] = [127, -127, 0.5, 1.5, -0.5, -1.5, 2.5, *[0] * 9]  # two integers are equally near
    stored, scales, again = quantiser().run(None, {"x": x})
    assert np.array_equal(again, through_bytes(torch.from_numpy(x)).numpy())
    assert stored.min() == -127
    assert scales[0, 0, 0] == 0
    assert stored[0, 0, 1, :7].tolist() == [127, -127, 0, 2, 0, -2, 2]
    normal = (scales > 1e-37)[..., 0]
    assert (np.abs(again - x) <= 0.5001 * scales)[normal].all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_lost_in_the_bytes(wrong: float) -> None:
    x = np.ones((1, 2, 3, 16), np.float32)
    x[0, 1, 2, 7] = wrong
    _, scales, again = quantiser().run(None, {"x": x})
    assert np.isnan(again[0, 1, 2]).all()
    assert np.isfinite(scales[0, 0]).all()
    assert np.isfinite(again[0, 1, :2]).all()


def test_large_finite_numbers_whose_sum_is_infinite_are_kept() -> None:
    x = np.full((1, 2, 3, 16), 1e38, np.float32)
    _, scales, again = quantiser().run(None, {"x": x})
    assert np.isfinite(scales).all()
    assert np.abs(again / x - 1).max() < 1e-6


RULES: dict[str, dict[str, Any]] = {
    "same-length": {},
    "full": {"mask": "full"},
    "zeros": {"initial_memory": "zeros"},
}
# Persistent vectors, and two memories in a layer; a large vocabulary.
CHOSEN = [("transformer-xl", "full"), ("all-attention-groups", "same-length"), ("adaptive-softmax", "zeros")]
CASES = [
    pytest.param(name, rule, marks=() if (name, rule) in CHOSEN else pytest.mark.slow)
    for name in ARCHITECTURES
    for rule in RULES
]


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_it_computes_what_the_naive_memory_computes(
    name: str, rule: str, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    """Over several lengths of the memory; a row starts a new text on the way."""
    run = make_run(**ARCHITECTURES[name])
    own = dataclasses.replace(load_run(run).config.evaluation, **RULES[rule])
    session = open_session(export(run, tmp_path / "artefact", rule=own, memory_precision="int8"))
    trained = load_run(run)
    naive = ProjectedTorchSession(
        trained.model.eval(), trained.vocab, own, weights="naive", write=append_in_bytes
    )
    exact = ProjectedTorchSession(trained.model.eval(), trained.vocab, own, weights="exact")
    cut, answers = [own.segment, 1, min(3, own.segment), own.segment, 1, own.segment], []
    cut *= 2 + 2 * own.mem_len // sum(cut)
    stream, half = rows(tokens, 2, sum(cut)), len(cut) // 2
    for side in (session, naive, exact):
        before, memory = feed(side, stream[:, : sum(cut[:half])], cut[:half], side.start(2))
        memory.positions[0] = 0
        answers.append(
            np.concatenate([before, feed(side, stream[:, sum(cut[:half]) :], cut[half:], memory)[0]], axis=1)
        )
    apart, lost = (np.abs(answers[0] - answers[at]) for at in (1, 2))
    assert apart.max() < 2e-3  # a value on the edge between two bytes may go either way
    if own.mem_len and "per-layer" not in name:
        assert lost.mean() > 10 * apart.mean()  # so what is equal is the memory in bytes


def test_int8_memory_takes_half_of_fp16_memory(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(head_dim=32)
    result = xl("export", run, "--out", tmp_path / "int8", "--memory-precision", "int8")
    spec = load_spec(tmp_path / "int8")
    half = dataclasses.replace(spec, memory_precision="fp16").completed()
    taken = f"{spec.bytes_per_stream:,} bytes per stream for {spec.fp32_bytes_per_stream:,}"
    assert taken in result.output
    named = [(state.name, state.dtype, state.shape[2:]) for state in spec.state[:2]]
    assert named == [
        ("past_key_values.0.key", "int8", (spec.rule.slots, 32)),
        ("past_key_values.0.key_scale", "float32", (spec.rule.slots, 1)),
    ]
    assert (spec.bytes_per_stream - 8) / (half.bytes_per_stream - 8) == (32 + 4) / 64
    report = check(tmp_path / "int8")
    assert report.passed
    assert (report.tolerance, report.mean_tolerance) == (0.02, 0.002)
    assert report.against == "PyTorch with int8 memory"


def test_export_and_check_find_a_wrong_int8_memory(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(d_model=48, heads=2, head_dim=20, d_ff=64)

    def too_large(op: Ops, stored: ir.Value, scales: ir.Value) -> ir.Value:
        return op.Mul(widened(op, stored, scales), op.constant(np.float32(1.1)))

    monkeypatch.setattr("xl_export.graph.memory.widened", too_large)
    with pytest.raises(ArtefactError, match=r"with int8 memory.* nothing was written"):
        export(run, tmp_path / "refused", memory_precision="int8")
    monkeypatch.setattr("xl_export.artefact.write.check_lowered", lambda low, stored, right: (right, right))
    report = check(export(run, tmp_path / "wrong", memory_precision="int8"))
    assert not report.passed, report.sentence
    assert report.max_difference < 0.5, "so the limits of int8 weights would let it pass"
