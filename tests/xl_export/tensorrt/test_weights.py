"""Weights of engines in 8 and 4 bits: run on ONNX Runtime, and built, not run, by TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from runtimes import check, open_session
from runtimes.base.errors import ConfigError
from runtimes.contract.precision import Precision
from runtimes.contract.spec import GRAPH, load_spec
from runtimes.sessions.onnx_runtime import OrtSession
from tests.architectures import ARCHITECTURES
from tests.nightly import every
from trainer.run.checkpoint import load_run
from xl_export.artefact.export import export, make_spec
from xl_export.artefact.write import finite_arrays
from xl_export.graph.ops import save_model
from xl_export.graph.qdq import FORMATS, quantised
from xl_export.tensorrt.build import build
from xl_export.tensorrt.graph import tensorrt_graph
from xl_export.tensorrt.options import BuildOptions, refuse_old_gpus

SIZES: dict[str, Any] = {"d_model": 48, "heads": 2, "head_dim": 16, "d_ff": 128}
STORED: dict[Precision, str] = {"int8": "INT8", "int4": "INT4"}
LOST: dict[Precision, float] = {"int8": 0.005, "int4": 0.1}  # bits per token, of the model here
ROUNDED: dict[Precision, float] = {"int8": 0.01, "int4": 0.12}  # in the mean, of the values
MATRICES = 2 * 4  # of each layer: query, key and value; output; the two of the feed-forward network


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path], text: str) -> Path:
    """A run with weights as small as trained ones, and its text."""
    from safetensors.torch import load_file, save_file

    folder = make_run(**SIZES)
    file = folder / "model.safetensors"
    save_file({name: 0.4 * tensor for name, tensor in load_file(file).items()}, file)
    (folder / "test.txt").write_text(text[:300], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def artefacts_of(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    choices: tuple[Precision, ...] = ("fp16", *FORMATS)
    return {name: export(run, folder / name, target="tensorrt", precision=name) for name in choices}


def matrices(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "DequantizeLinear"]


@pytest.mark.parametrize("precision", FORMATS)
def test_an_export_for_engines_in_fewer_bits_measures_itself(
    precision: Precision, artefacts_of: dict[str, Path]
) -> None:
    folder = artefacts_of[precision]
    spec, report = load_spec(folder), check(folder)
    assert report.passed
    assert (spec.target, spec.precision, spec.state_dtype) == ("tensorrt", precision, "float16")
    assert spec.measured is not None
    assert spec.measured.tokens == 299
    assert abs(spec.measured.bits_lost) < LOST[precision]
    assert len(matrices(ir.load(folder / GRAPH))) == MATRICES


@pytest.mark.parametrize("precision", FORMATS)
def test_answers_are_those_of_rounded_weights(
    precision: Precision, artefacts_of: dict[str, Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    whole, model = (ir.load(artefacts_of[name] / GRAPH) for name in ("fp16", precision))
    rounded = 0
    for node in matrices(model):
        stored, scales = (value.const_value.numpy().astype(np.float32) for value in node.inputs)  # type: ignore[union-attr]
        block = node.attributes.get_int("block_size", 0)
        wide = np.repeat(scales, block, axis=0) if block else scales[None]
        name = str(node.inputs[0].name).removesuffix(".values")  # type: ignore[union-attr]
        value = whole.graph.initializers[name]
        before = value.const_value.numpy().astype(np.float32)  # type: ignore[union-attr]
        after = stored * wide
        assert 0 < np.abs(after - before).mean() < ROUNDED[precision] * np.abs(before).mean()
        value.const_value = ir.tensor(after.astype(np.float16), name=name)
        rounded += 1
    assert rounded == MATRICES
    folder = tmp_path / "rounded"
    folder.mkdir()
    save_model(whole, folder)
    stored_small = open_session(artefacts_of[precision])
    over_rounded = OrtSession(load_spec(artefacts_of["fp16"]), stored_small.vocab, folder / GRAPH)
    text = tokens[:48].reshape(2, 24)
    answers = []
    for session in (stored_small, over_rounded):
        memory = session.start(2)
        answers.append(
            np.concatenate([session.step(text[:, at : at + 8], memory)[0] for at in (0, 8, 16)], 1)
        )
    # Activations rounded to int8, as ONNX Runtime does unless it is told not to, would differ by 0.01.
    assert np.abs(answers[0] - answers[1]).max() < 1e-3


def test_a_scale_is_chosen_for_the_least_error() -> None:
    draw = np.random.default_rng(0)
    matrix = draw.standard_normal((256, 8)).astype(np.float32)
    matrix[:, 0] = 0
    for precision, chosen in FORMATS.items():
        block = 128 if chosen.in_blocks else None
        values, scales = quantised(matrix, chosen, block)
        assert values.dtype == chosen.dtype.numpy()
        assert scales.shape == ((2, 8) if block else (8,))
        wide = np.repeat(scales, 128, axis=0) if block else scales
        error = np.abs(values.astype(np.float32) * wide - matrix)
        assert error[:, 0].max() == 0
        plain = np.abs(matrix.reshape(-1, block or 256, 8)).max(axis=1) / chosen.largest
        if precision == "int4":  # three bits and a sign: cutting off the largest values pays
            assert scales.mean() < 0.95 * plain.mean()
        whole = np.repeat(np.maximum(plain, 1e-9), block or 256, axis=0)
        # A scale of float16 costs next to nothing.
        assert (error**2).sum() <= 1.01 * ((np.rint(matrix / whole) * whole - matrix) ** 2).sum()


def test_what_cannot_be_stored_is_refused(make_run: Callable[..., Path]) -> None:
    narrow, small = (load_run(make_run(**sizes)) for sizes in (SIZES | {"head_dim": 20}, {}))
    for found, precision, words in (
        (narrow, "int4", r"blocks\.0\.out has 40 rows, which is no multiple of 16; give --precision int8"),
        (small, "int8", r"no layer of the model has a matrix of at least 1024 values; give --precision fp16"),
    ):
        spec = make_spec(found, found.config.evaluation, "shift", "tensorrt", precision, "fp32")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=words):
            tensorrt_graph(spec, found.config.model, finite_arrays(found.model), attention="native")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("precision", FORMATS)
def test_every_architecture_exports_in_fewer_bits(
    precision: Precision, name: str, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = {**SIZES, "d_ff": 64, **ARCHITECTURES[name]}
    folder = export(make_run(**sizes), tmp_path / "a", target="tensorrt", precision=precision)
    assert check(folder).passed
    assert matrices(ir.load(folder / GRAPH))


@pytest.mark.parametrize("precision", every(2, ["int4", "int8"]))
def test_tensorrt_rtx_builds_the_weights_as_they_are_stored(
    precision: Precision, artefacts_of: dict[str, Path], tmp_path: Path
) -> None:
    """Built ahead of time, without a GPU. Nothing that is built here is run."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)")
    options = BuildOptions(flavour="rtx", compute_capabilities=("8.9",), batch=(1, 1, 2))
    facts = build(artefacts_of[precision], tmp_path / "engine", options)
    assert facts.layers["DEQUANTIZE"] == MATRICES
    assert facts.types[STORED[precision]] == MATRICES  # constants; their DequantizeLinear gives HALF
    assert facts.layers.get("QUANTIZE", 0) == 0


def test_gpus_that_lack_a_type_are_named() -> None:
    refuse_old_gpus("int8", ("7.5",))
    refuse_old_gpus("int4", ("8.0", "8.6"))
    with pytest.raises(
        ConfigError, match=r"int4 weights, which TensorRT takes from compute capability 8\.0 on"
    ):
        refuse_old_gpus("int4", ("8.0", "7.5"))
