"""Exports of fewer bits: what they measure of themselves, what commands say of it, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from runtimes import open_session
from runtimes.base.errors import ConfigError, TextError
from runtimes.contract.precision import PRESETS, Measured, Precision, sentence
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import GRAPH, VOCAB, WEIGHTS, load_spec
from runtimes.contract.tensors import FORMS
from runtimes.contract.vocabulary import load_vocab
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.check import check
from tests.commands import refused, xl
from tests.nightly import every, matrix
from xl_export.artefact.export import export
from xl_export.artefact.quality import drawn_tokens
from xl_export.artefact.validate import FailingCheckWarning
from xl_export.graph import quantise
from xl_export.graph.ops import constant


@pytest.mark.parametrize(
    ("precision", "form"), matrix(("fp16", "int8-stored", "int8", "int4"), FORMS, together=1)
)
def test_an_export_measures_itself(
    precision: Precision,
    form: Any,
    calm_run: Callable[..., Path],
    artefacts: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = export(calm_run("transformer-xl"), tmp_path / precision, memory=form, precision=precision)
    spec, report = load_spec(folder), check(folder)
    assert report.passed
    assert report.against == ("PyTorch" if precision == "fp16" else "the stored weights in fp32")
    assert load_spec(artefacts[form]).measured is None
    measured = spec.measured
    assert measured is not None
    assert measured.tokens == 299
    assert measured.num_bytes < 0.7 * measured.fp32_num_bytes
    assert measured.num_bytes == sum((folder / name).stat().st_size for name in (GRAPH, WEIGHTS))
    assert 0 <= measured.kl_nats < 0.1
    assert 0.7 < measured.agreement <= 1
    assert abs(measured.bits_lost) < {"fp16": 0.002, "int4": 0.1}.get(precision, 0.01)


def test_what_is_measured_is_what_evaluation_says(calm_run: Callable[..., Path], tmp_path: Path) -> None:
    from runtimes.tasks.evaluate import evaluate

    run = calm_run("adaptive-softmax")
    folder = export(run, tmp_path / "artefact", precision="int4")
    session = open_session(folder)
    tokens = session.vocab.encode((run / "test.txt").read_bytes())
    measured = load_spec(folder).measured
    assert measured is not None
    assert abs(evaluate(session, tokens).bits_per_token - measured.bits_per_token) < 1e-3
    assert abs(evaluate(open_session(run), tokens).bits_per_token - measured.fp32_bits_per_token) < 1e-4


def test_a_run_without_text_is_measured_on_a_given_one(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run()
    drawn = load_spec(export(run, tmp_path / "none", precision="int8")).measured
    assert drawn is not None
    assert drawn.drawn
    text = tmp_path / "text.txt"
    text.write_text("The memory is yours.")
    measured = load_spec(export(run, tmp_path / "some", precision="int8", text=text)).measured
    assert measured is not None
    assert measured.tokens == 19
    assert not measured.drawn
    text.write_text("T")
    with pytest.raises(TextError, match=r"text\.txt has fewer than 2 tokens"):
        export(run, tmp_path / "short", precision="int8", text=text)
    assert not (tmp_path / "short").exists()


@pytest.mark.parametrize(("rows", "tokens", "drawn"), [(1, None, False), (2, (1, 8), True)])
def test_graphs_of_fixed_sizes_are_measured(
    rows: int, tokens: Any, drawn: bool, calm_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = calm_run("transformer-xl")
    if drawn:
        (run / "test.txt").unlink()
    rule = MemoryRule(mem_len=8, segment=8)
    options: dict[str, Any] = {"rows": rows, "tokens": tokens}
    measured = load_spec(export(run, tmp_path / "a", precision="fp16", rule=rule, **options)).measured
    assert measured is not None
    assert measured.tokens == (512 if drawn else 296)  # 37 of 37.375 segments
    assert measured.drawn == drawn
    assert abs(measured.bits_lost) < 0.01


def test_tokens_are_drawn_with_the_probabilities_of_the_model() -> None:
    session: Any = SimpleNamespace(
        spec=SimpleNamespace(fixed_rows=None, only_whole_segments=False),
        rule=MemoryRule(mem_len=4, segment=2),
        vocab=SimpleNamespace(size=3),
        start=lambda rows: None,
        predict=lambda tokens, memory: (np.array([[np.log(0.7), np.log(0.3), -np.inf]]), memory),
    )
    tokens = drawn_tokens(session)
    assert tokens is not None
    shares = np.bincount(tokens[1:], minlength=3) / (len(tokens) - 1)
    assert np.abs(shares - [0.7, 0.3, 0]).max() < 0.1
    session.spec.only_whole_segments = True
    assert drawn_tokens(session) is None


@pytest.mark.parametrize("precision", every(3, ["int4", "int8", "int8-stored"]))
def test_the_check_of_quantised_weights_finds_wrong_scales(
    precision: Precision, make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tolerances let the rounding of activations differ and no more: scales that are a tenth too large
    are found.
    """
    run = make_run(d_model=48, heads=2, head_dim=20, d_ff=64)
    folder = export(run, tmp_path / "artefact", precision=precision)
    model = ir.load(folder / GRAPH)
    for name, value in model.graph.initializers.items():
        if "scales" in name:
            array = value.const_value.numpy()  # type: ignore[union-attr]
            value.const_value = ir.tensor((1.1 * array).astype(array.dtype), name=name)
    ir.save(model, folder / "wrong.onnx")  # beside the weights that it shares
    spec = load_spec(folder)
    wrong = OrtSession(spec, load_vocab(folder / VOCAB), folder / "wrong.onnx")
    monkeypatch.setattr("runtimes.tasks.check.open_session", lambda *arguments, **options: wrong)
    report = check(folder)
    assert not report.passed, report.sentence


def test_an_export_whose_check_fails_says_so(
    calm_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = calm_run("transformer-xl")
    monkeypatch.setitem(PRESETS, "int8", dataclasses.replace(PRESETS["int8"], tolerance=1e-12))
    result = xl("export", run, "--out", tmp_path / "int8", "--precision", "int8")
    assert result.exit_code == 1
    assert "int8 is written, but its check FAILED on this machine: ring memory" in result.stdout
    assert "differ from the stored weights in fp32 by at most" in result.stdout
    assert result.stderr == ""
    with pytest.warns(
        FailingCheckWarning, match=r"^in int8 the answers of step.onnx on this machine differ .* fails here"
    ):
        export(run, tmp_path / "int8", precision="int8", force=True)
    rows = quantise._scaled_rows

    def too_large(graph: ir.Graph, node: ir.Node, table: quantise.Matrix) -> list[ir.Node]:
        made = rows(graph, node, table)
        factor = constant(graph, "factor", np.float32([1.05]))
        return [*made, ir.node("Mul", [made[-1].outputs[0], factor])]

    monkeypatch.setattr(quantise, "_scaled_rows", too_large)  # the bytes are right, and the graph is not
    refused(
        xl("export", run, "--out", tmp_path / "stored", "--precision", "int8-stored"), "nothing was written"
    )
    assert not (tmp_path / "stored").exists()


def test_loading_widens_the_matrices_of_bytes_once(calm_run: Callable[..., Path], tmp_path: Path) -> None:
    """The Cast of each is computed when the graph is loaded, so the products are of constants in fp32."""
    folder = export(calm_run("transformer-xl"), tmp_path / "artefact", precision="int8-stored")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # it warns that the written graph is for this machine
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(folder / GRAPH, options)
    counted = []
    for path in (folder / GRAPH, tmp_path / "loaded.onnx"):
        tensors = [value.const_value for value in ir.load(path).graph.initializers.values()]
        matrices = [str(t.dtype) for t in tensors if t is not None and len(t.shape) == 2 and t.size > 1024]
        counted.append({kind: matrices.count(kind) for kind in set(matrices)})
    # Four of each layer, and the tied table, whose bytes stay for the look-up.
    assert counted == [{"INT8": 9}, {"FLOAT": 9, "INT8": 1}]


def test_the_command_says_what_was_measured_and_info_repeats_it(
    calm_run: Callable[..., Path], tmp_path: Path
) -> None:
    run, out = calm_run("transformer-xl"), tmp_path / "artefact"
    options = ("--precision", "int8", "--memory-precision", "fp16")
    exported = xl("export", run, "--out", out, *options).stdout
    spec = load_spec(out)
    gained = f"{spec.bytes_per_stream:,} bytes per stream for {2 * spec.bytes_per_stream - 8:,}"
    assert "int8 with fp16 memory: " in exported
    assert f"; {gained}; " in exported
    shown = xl("info", out, "--all").stdout
    assert "precision   weights int8, memory fp16\n" in shown
    assert f"measured.tokens {spec.measured.tokens}\n" in shown
    (run / "test.txt").unlink()
    without_text = xl("export", run, "--out", out, "--force", *options[:2]).stdout
    assert "; 512 tokens that the model drew" in without_text
    assert "measured.drawn true\n" in xl("info", out, "--all").stdout
    assert not spec.measured.drawn


@pytest.mark.parametrize("figure", [float("nan"), 1e300, 10**400, -2])
@pytest.mark.parametrize("name", ["bits_per_token", "num_bytes", "tokens"])
def test_figures_that_nothing_can_measure_are_refused(name: str, figure: float) -> None:
    """A stranger's file may hold any; they are printed."""
    names = [field.name for field in dataclasses.fields(Measured)]
    with pytest.raises(ConfigError):
        Measured(
            **dict.fromkeys(names, 0.5) | {"tokens": 9, "num_bytes": 1, "fp32_num_bytes": 2, name: figure}
        )  # type: ignore[arg-type]


def test_a_preset_that_misses_its_limit_says_so() -> None:
    figures: dict[str, Any] = {field.name: 1 for field in dataclasses.fields(Measured)}
    measured = Measured(**figures | {"tokens": 1000, "bits_per_token": 2.0, "fp32_bits_per_token": 1.0})
    for changed, words in (
        ({}, "BEYOND the limit"),
        ({"bits_per_token": 0.9}, "within the limit"),
        ({"tokens": 4}, "too few tokens to judge"),
    ):
        said = sentence("fp32", "int8", dataclasses.replace(measured, **changed), stream=(1, 2))
        assert words in said
        assert "fp32 with int8 memory: " in said
