"""Every preset, in every form of memory, of every architecture computes what PyTorch computes with weights
rounded alike.

Each tolerance is compared with what it must find: the change that rounding makes, and that a memory of 4
tokens makes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from runtimes.contract.precision import PRESETS, QUANTISED, MemoryPrecision, Precision
from runtimes.contract.spec import GRAPH
from runtimes.contract.tensors import Form
from tests.architectures import ARCHITECTURES
from tests.nightly import matrix
from tests.streams import PADDING, answers_with_padding
from tests.xl_export.graph import rounding
from tests.xl_export.graph.rounding import rounded
from trainer.run.checkpoint import Run, load_run
from trainer.run.session import TorchSession
from xl_export.artefact.export import make_spec, write_graphs
from xl_export.graph import quantise

# How far answers may be from those of rounded weights in PyTorch, as a share of the largest (fp16) or mean
# change (int8, int4) that rounding makes. Activations are int8 besides, in the second case.
ALIKE = 0.25
IN_INT8 = 0.2
WORST_IN_INT8 = 1.2  # the same of single values, as a share of the mean
IN_HALF = 3e-4  # nats that float16 memory changes at most
# Memory in int8 is computed otherwise in PyTorch too: see test_bytes_memory.py.
MEMORIES: tuple[MemoryPrecision, ...] = ("fp32", "fp16")
PAIRS = [pair for pair in itertools.product(get_args(Precision), MEMORIES) if pair != ("fp32", "fp32")]
# Every form with every preset is in the default suite, and every architecture.
CASES = matrix(tuple(ARCHITECTURES), tuple(itertools.product(get_args(Form), PAIRS)), together=1)
Truth = Callable[[str, Precision], np.ndarray]


@pytest.fixture(scope="module")
def runs(calm_run: Callable[..., Path]) -> Callable[[str], Run]:
    """`runs(architecture)`: a run with weights as small as trained ones."""

    @functools.cache
    def of(kind: str) -> Run:
        run = load_run(calm_run(kind))
        run.model.eval()
        return run

    return of


@pytest.fixture(scope="module")
def truth(runs: Callable[[str], Run], tokens: np.ndarray) -> Truth:
    """`truth(architecture, precision)`: PyTorch's answers [2, N, V] with weights rounded alike."""

    @functools.cache
    def of(kind: str, precision: Precision) -> np.ndarray:
        run = runs(kind)
        spec = make_spec(run, run.config.evaluation, "hidden", "onnxruntime", "fp32", "fp32")
        with pytest.MonkeyPatch.context() as patch:
            if precision == "int8-stored":  # see the test below
                patch.setattr(rounding, "MIN_VALUES", 1 << 30)
            model = rounded(run.model, precision, spec)
        session = TorchSession(model, run.vocab, spec.rule, weights=precision)
        return answers_with_padding(session, tokens)

    return of


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_preset_computes_what_its_rounded_weights_do(
    kind: str,
    case: tuple[Form, tuple[Precision, MemoryPrecision]],
    runs: Callable[[str], Run],
    truth: Truth,
    tokens: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form, (precision, memory) = case
    run, exact = runs(kind), truth(kind, "fp32")
    spec = make_spec(run, run.config.evaluation, form, "onnxruntime", precision, memory)
    if precision == "int8-stored":  # then only matrices are stored in bytes, which `rounded` rounds exactly
        monkeypatch.setattr(quantise, "MIN_VALUES", 1 << 30)
    answer = answers_with_padding(write_graphs(spec, tmp_path, run, "plugin")[GRAPH], tokens)
    difference = np.abs(answer - truth(kind, precision))
    if precision in QUANTISED:
        sensitivity = np.abs(truth(kind, "int4") - exact).mean()
        assert difference.mean() < IN_INT8 * sensitivity
        assert difference.max() < WORST_IN_INT8 * sensitivity + (IN_HALF if memory == "fp16" else 0)
    else:
        effect = np.abs(truth(kind, precision) - exact).max()
        assert difference.max() < ALIKE * effect + (IN_HALF if memory == "fp16" else 0)
    if precision == "int8-stored":
        if run.config.model.pre_norm and spec.rule.initial_memory == "zeros" and form != "hidden":
            # What precedes a text, W·beta of each layer, is a constant of the graph that no preset rounds.
            difference = difference[:, run.config.model.layers * spec.rule.mem_len + PADDING :]
            assert difference.size
        assert difference.max() < PRESETS["int8-stored"].tolerance + (IN_HALF if memory == "fp16" else 0)
        assert np.abs(answer - exact).max() > 2 * IN_HALF
    if memory == "fp16":
        assert {tensor.dtype for tensor in spec.state} == {"float16"}
    if (precision, memory) == ("fp32", "fp16"):
        assert difference.max() > 2e-6  # it is in use
    assert difference.max() < spec.tolerance
    assert difference.mean() < spec.mean_tolerance
