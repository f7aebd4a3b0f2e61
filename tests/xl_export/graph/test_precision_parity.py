"""Every preset, in every form of memory, of every architecture computes what PyTorch computes with weights
rounded alike.

The tolerances are stated beside what they must find, which the fixture's answers tell: what rounding the
weights changes, and what a memory of 4 tokens changes.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from runtimes.contract.precision import PRESETS, QUANTISED, MemoryPrecision, Precision
from runtimes.contract.tensors import Form
from tests.architectures import ARCHITECTURES
from tests.streams import answers_with_padding
from tests.xl_export.graph import rounding
from tests.xl_export.graph.rounding import rounded
from trainer.run.checkpoint import Run, load_run
from trainer.run.session import TorchSession
from xl_export.artefact.export import make_spec, write_graphs
from xl_export.cli.main import main
from xl_export.graph import quantise

SIZES: dict[str, Any] = {
    "d_model": 48,
    "heads": 2,
    "head_dim": 20,
    "d_ff": 64,
}  # 48: a last block that is half full
# How far answers may be from those of rounded weights in PyTorch, as a share of the largest (fp16) or mean
# change (int8, int4) that rounding makes. Activations are int8 besides, in the second case.
ALIKE = 0.25
IN_INT8 = 0.2
WORST_IN_INT8 = 1.2  # the same of single values, as a share of the mean
IN_HALF = 3e-4  # nats that float16 memory changes at most
ON_ONNX_RUNTIME: tuple[Precision, ...] = ("fp32", "fp16", "int8-stored", "int8", "int4")  # fp8 is for engines
# Memory in int8 is computed otherwise in PyTorch too: see test_bytes_memory.py.
MEMORIES: tuple[MemoryPrecision, ...] = ("fp32", "fp16")
PAIRS = [pair for pair in itertools.product(ON_ONNX_RUNTIME, MEMORIES) if pair != ("fp32", "fp32")]
Truths = Callable[[str], tuple[Run, dict[str, np.ndarray]]]


def _cases() -> Iterator[Any]:
    """All architectures in all forms with all presets.

    By default each architecture runs in each form with another precision. So all pairs of architecture and
    form, of architecture and precision, and of form and preset are run: the graph of an architecture is
    written for its form, and then lowered tensor by tensor. The other cases are slow tests.
    """
    for (k, kind), (f, form), (precision, memory) in itertools.product(
        enumerate(ARCHITECTURES), enumerate(get_args(Form)), PAIRS
    ):
        turn = k + f
        chosen = (precision, memory) == (("fp16", "int8", "int4")[turn % 3], ("fp32", "fp16")[turn // 3 % 2])
        chosen |= precision == "fp32" and k < 3 and turn % 3 == 0
        # In one form of each architecture, and with either memory.
        chosen |= precision == "int8-stored" and turn % 3 == k // 3 % 3 and (memory == "fp16") == bool(k % 2)
        yield pytest.param(kind, form, precision, memory, marks=() if chosen else pytest.mark.slow)


@pytest.fixture(scope="module")
def truths(make_run: Callable[..., Path], tokens: np.ndarray) -> Truths:
    """`truths(architecture)`: a run with weights as small as trained ones, and PyTorch's answers [2, N, V] in
    each precision.
    """
    found: dict[str, tuple[Run, dict[str, np.ndarray]]] = {}

    def of(kind: str) -> tuple[Run, dict[str, np.ndarray]]:
        if kind not in found:
            sizes = SIZES | {
                name: size for name, size in ARCHITECTURES[kind].items() if name != "d_ff" or not size
            }
            folder = make_run(**sizes)
            file = folder / "model.safetensors"
            save_file({name: 0.4 * tensor for name, tensor in load_file(file).items()}, file)
            run = load_run(folder)
            run.model.eval()
            spec = make_spec(run, run.config.evaluation, "hidden", "onnxruntime", "fp32", "fp32")
            answers = {}
            for precision in ON_ONNX_RUNTIME:
                with pytest.MonkeyPatch.context() as patch:
                    if precision == "int8-stored":  # see the test below
                        patch.setattr(rounding, "SMALL", 1 << 30)
                    model = rounded(run.model, precision, spec)
                answers[precision] = answers_with_padding(
                    TorchSession(model, run.vocab, spec.rule, identity=precision), tokens
                )
            found[kind] = run, answers
        return found[kind]

    return of


@pytest.mark.parametrize(("kind", "form", "precision", "memory"), list(_cases()))
def test_a_preset_computes_what_its_rounded_weights_do(
    kind: str,
    form: Form,
    precision: Precision,
    memory: MemoryPrecision,
    truths: Truths,
    tokens: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, answers = truths(kind)
    spec = make_spec(run, run.config.evaluation, form, "onnxruntime", precision, memory)
    if precision == "int8-stored":  # then only matrices are stored in bytes, which `rounded` rounds exactly
        monkeypatch.setattr(quantise, "SMALL", 1 << 30)
    answer = answers_with_padding(write_graphs(spec, run, tmp_path, "plugin"), tokens)
    difference = np.abs(answer - answers[precision])
    if precision in QUANTISED:
        sensitivity = np.abs(answers["int4"] - answers["fp32"]).mean()
        assert difference.mean() < IN_INT8 * sensitivity
        assert difference.max() < WORST_IN_INT8 * sensitivity + (IN_HALF if memory == "fp16" else 0)
    else:
        effect = np.abs(answers[precision] - answers["fp32"]).max()
        assert difference.max() < ALIKE * effect + (IN_HALF if memory == "fp16" else 0)
    if precision == "int8-stored":
        assert difference.max() < PRESETS["int8-stored"].tolerance + (IN_HALF if memory == "fp16" else 0)
        assert np.abs(answer - answers["fp32"]).max() > 2 * IN_HALF
    if memory == "fp16":
        assert {tensor.dtype for tensor in spec.state} == {"float16"}
    if (precision, memory) == ("fp32", "fp16"):
        assert difference.max() > 2e-6  # it is in use
    assert difference.max() < spec.tolerance
    assert difference.mean() < spec.mean_tolerance


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_these_tolerances_must_find_is_there(kind: str, truths: Truths, tokens: np.ndarray) -> None:
    run, answers = truths(kind)
    assert (
        0
        < np.abs(answers["fp16"] - answers["fp32"]).mean()
        < np.abs(answers["int8"] - answers["fp32"]).mean()
    )
    assert (
        4 * np.abs(answers["int8"] - answers["fp32"]).mean()
        < np.abs(answers["int4"] - answers["fp32"]).mean()
    )
    rule = run.config.evaluation
    if rule.mem_len:
        short = TorchSession(run.model, run.vocab, dataclasses.replace(rule, mem_len=4), identity=kind)
        found = np.abs(answers_with_padding(short, tokens) - answers["fp32"]).max()
        assert found > 40 * IN_HALF
        assert found > WORST_IN_INT8 * np.abs(answers["int4"] - answers["fp32"]).mean()


REFUSED = [
    ["--precision", "fp8"],
    ["--target", "tensorrt", "--precision", "int8-stored"],
    *(
        ["--target", "tensorrt", "--memory-precision", "fp16", *more]
        for more in ([], ["--precision", "fp16"])
    ),
    ["--target", "tensorrt", "--memory", "hidden"],
    ["--target", "tensorrt", "--memory", "ring", "--mask", "full"],
    ["--text", "config.json"],
]


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_presets_that_cannot_be_are_refused_with_one_sentence(
    options: list[str], run: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(main, ["export", str(run), "--out", str(tmp_path / "artefact"), *options])
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: [^\n]*leave [^\n]*\.\n", result.output)
    assert list(tmp_path.iterdir()) == []
