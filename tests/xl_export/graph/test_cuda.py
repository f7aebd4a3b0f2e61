"""The graph whose attention is one node on `cuda`, with the naive operator in the place of the node, and with
the node's library over a stub driver.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import ConfigError
from runtimes.contract.precision import Measured
from runtimes.contract.spec import CUDA_GRAPH, load_spec
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import OrtSession
from tests import host_gpu
from tests.architectures import ARCHITECTURES
from tests.cuda.node import emulated, library_for_cpu
from tests.cuda.stubs import A100, Stubs, built_driver
from tests.nightly import every
from tests.ptx.product import product_node
from tests.ptx.ring import naive_node
from xl_export.artefact.export import export, in_halves_here
from xl_export.graph.fused_cpu import DOMAIN

SIZES = {"head_dim": 8, "d_ff": 24}  # for products in halves
LENGTHS = (3, 8, 1, 1, 8, 5, 8)  # beyond the end of the ring
GATED = {name for name, sizes in ARCHITECTURES.items() if (span := sizes.get("span")) and span.epsilon}
SERVED = tuple(sorted(set(ARCHITECTURES) - GATED))


def evaluator(graph: Path) -> Any:
    """ONNX's own evaluator for a graph with the node."""
    import onnx
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class Node(OpRun):
        op_domain = DOMAIN

        def _run(self, *inputs: Any, **attributes: int) -> Any:
            assert inputs[4].dtype == inputs[2].dtype, "the table has the type of the ring"
            answer, keys, values = naive_node(*inputs, **attributes)
            return answer.astype(inputs[0].dtype), keys, values

    class Product(OpRun):
        op_domain = DOMAIN

        def _run(self, *inputs: Any, relu: int, epsilon: float) -> Any:
            return product_node(*inputs, relu=bool(relu), epsilon=epsilon)

    class ProductOnCuda(Product):
        pass

    class RingRelativeAttentionOnCuda(Node):
        pass

    class RingRelativeAttentionOnCudaOverHalves(Node):
        pass

    class RingRelativeAttentionOnCudaInHalves(Node):
        pass

    class ProductOnCudaInHalves(Product):
        pass

    nodes = [
        RingRelativeAttentionOnCuda,
        RingRelativeAttentionOnCudaOverHalves,
        RingRelativeAttentionOnCudaInHalves,
        ProductOnCuda,
        ProductOnCudaInHalves,
    ]
    return ReferenceEvaluator(onnx.load(graph), new_ops=nodes)


def apart(artefact: Path) -> float:
    """How far the graph's log-probabilities are from those of the graph of standard operators."""
    session = OrtSession.open(artefact, threads=1, kernel="standard")
    graph = evaluator(artefact / CUDA_GRAPH)
    memory = session.start(2)
    memory.positions[1] = -4  # a row that begins with padding
    tensors = {fact.name: np.array(memory.tensors[fact.name]) for fact in session.spec.state}
    draw = np.random.default_rng(0)
    most = 0.0
    for length in LENGTHS:
        tokens = draw.integers(0, session.vocab.size, (2, length))
        positions = memory.positions[:, None] + np.arange(length)
        inputs = {"input_ids": tokens, "position_ids": positions} | tensors
        if session.spec.model.selective:
            rows = np.arange(2 * length)
            inputs |= {"targets": np.zeros((2, length), np.int64), "logit_rows": rows}
        outputs = dict(zip(graph.output_names, graph.run(None, inputs), strict=True))
        tensors = {fact.name: outputs[str(fact.present)] for fact in session.spec.state}
        logits = outputs["logits"].reshape(2, length, -1)
        expected, memory = session.step(tokens, memory)
        seen = positions >= 0
        most = max(most, np.abs(logits - expected)[seen].max())
    return most


@pytest.mark.parametrize("name", every(3, SERVED))
def test_the_graph_equals_the_one_of_standard_operators(
    name: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(**SIZES | ARCHITECTURES[name])
    assert apart(export(run, tmp_path / "artefact", attention="plugin", memory="ring")) < 1e-4


def test_memory_in_halves_is_the_same_step(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(head_dim=8, pre_norm=True, query_norm=False, norm_epsilon=0.1)
    artefact = export(run, tmp_path / "artefact", attention="plugin", memory_precision="fp16")
    assert apart(artefact) < 1e-3


@pytest.mark.parametrize("name", every(3, SERVED))
def test_with_weights_in_halves_everything_is_in_halves(
    name: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    import onnx

    run = make_run(**SIZES | ARCHITECTURES[name])
    artefact = export(run, tmp_path / "artefact", attention="plugin", memory="ring", precision="fp16")
    assert load_spec(artefact).memory_precision == "fp16"
    assert 1e-6 < apart(artefact) < 1e-2
    graph = onnx.load(artefact / CUDA_GRAPH).graph
    assert not [x.name for x in graph.initializer if x.data_type == onnx.TensorProto.FLOAT and len(x.dims)]


def test_the_stated_loss_is_of_the_step_in_halves(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of `step.onnx`, which computes in fp32, is not what a GPU loses. A CPU would compute the graph
    of a GPU in fp32 too, so its results are rounded explicitly.
    """

    def flattened(*arguments: Any) -> OrtSession:
        session = in_halves_here(*arguments)
        step = session.step

        def half_the_logits(*inputs: Any) -> Any:
            logits, memory = step(*inputs)
            for array in (logits, *memory.tensors.values()):
                np.testing.assert_array_equal(array, array.astype(np.float16))
            return logits / 2, memory

        monkeypatch.setattr(session, "step", half_the_logits)
        return session

    monkeypatch.setattr("xl_export.artefact.export.in_halves_here", flattened)
    artefact = export(make_run(head_dim=8), tmp_path / "artefact", attention="plugin", precision="fp16")
    measured = load_spec(artefact).measured
    assert isinstance(measured, Measured)
    assert measured.kl_nats > 1e-3


@pytest.mark.parametrize(
    ("precision", "d_ff", "ours"),
    [("fp32", 20, True), ("fp32", 22, False), ("fp16", 24, True), ("fp16", 20, False), ("int8", 24, False)],
)
def test_products_are_ours_if_their_kernels_can_read_the_weights(
    precision: Any, d_ff: int, ours: bool, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    import onnx

    run = make_run(head_dim=8, d_ff=d_ff)
    artefact = export(run, tmp_path / "artefact", attention="plugin", precision=precision)
    kinds = {node.op_type for node in onnx.load(artefact / CUDA_GRAPH).graph.node}
    assert any(kind.startswith("ProductOnCuda") for kind in kinds) == ours


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("name", "precision", "tolerance"),
    [
        ("transformer-xl", "fp32", 1e-4),
        ("transformer-xl-untied-pre-norm", "fp32", 1e-4),
        ("all-attention", "fp32", 1e-4),
        ("all-attention", "fp16", 1e-2),
    ],
)
def test_the_kernels_compute_what_the_graph_gives_them(
    name: str,
    precision: Any,
    tolerance: float,
    make_run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    run = make_run(**SIZES | ARCHITECTURES[name])
    artefact = export(run, tmp_path / "artefact", attention="plugin", memory="ring", precision=precision)
    library = library_for_cpu(tmp_path)
    monkeypatch.setattr(fused_cpu, "built", lambda: library)
    host_gpu.install(monkeypatch)
    draw = np.random.default_rng(0)
    stubs = Stubs(built_driver())
    stubs.set_gpu(replace(A100, multiprocessors=1))  # where tiles read less even for few tokens
    request.addfinalizer(lambda: stubs.set_gpu(A100))
    stubs.forget()
    with emulated(stubs):
        standard, session = OrtSession.open(artefact, threads=1, kernel="standard"), host_gpu.opened(artefact)
        assert "attention as one node" in session.computed_by
        memories = [one.start(2) for one in (standard, session)]
        for memory in memories:
            memory.positions[1] = -2  # a row that begins with padding
        for length in (5, 1):
            tokens = draw.integers(0, session.vocab.size, (2, length))
            seen = (memories[0].positions[:, None] + np.arange(length)) >= 0
            expected, memories[0] = standard.step(tokens, memories[0])
            logits, memories[1] = session.step(tokens, memories[1])
            assert np.abs(logits - expected)[seen].max() < tolerance
    # For the segment and for the token.
    attention = {"ring_segment_attention", "ring_attention"}
    kernels = {event.name for event in stubs.events() if event.kind == "kernel"}
    assert kernels == attention | {"product_end", "product_of_few_rows"}


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ({}, {}, "heads are 6 wide, expected a multiple of 4 up to 128"),
        ({**ARCHITECTURES["adaptive-span-gated-full"], "head_dim": 8}, {}, "the spans have an epsilon"),
        ({"head_dim": 8}, {"precision": "fp16", "memory_precision": "fp32"}, "memory is in fp32"),
    ],
    ids=["width", "epsilon", "memory"],
)
def test_what_the_node_does_not_compute_is_refused(
    sizes: dict[str, Any],
    options: dict[str, Any],
    words: str,
    make_run: Callable[..., Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=words):
        export(make_run(**sizes), tmp_path / "artefact", attention="plugin", **options)
    assert not (tmp_path / "artefact").exists()


def test_without_the_library_cuda_runs_standard_operators(
    make_run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    artefact = export(make_run(head_dim=8), tmp_path / "artefact", attention="plugin")
    host_gpu.install(monkeypatch)
    session = host_gpu.opened(artefact)
    assert session.computed_by == "ONNX Runtime, CUDA on cuda"
    assert "cuda.onnx is not used: its library is not built; run `xl-export" in capsys.readouterr().err
