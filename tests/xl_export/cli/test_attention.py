"""`xl-export attention` and `xl-export spans`, end to end on tiny runs, and one sentence for every
mistake.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import image

from runtimes.base.npz import read_npz
from runtimes.contract.rule import MemoryRule
from tests.architectures import ALL_ATTENTION, SPAN
from tests.commands import refused, xl
from tests.nightly import every
from tests.xl_export.plots.test_attention import assert_picture
from trainer.model.config import SpanConfig
from trainer.model.inspection import observe
from trainer.run.checkpoint import load_run, load_tensors, save_tensors

MakeRun = Callable[..., Path]


@pytest.fixture
def text_file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "text.txt").write_text(text[5000:5300], encoding="utf-8")
    return tmp_path / "text.txt"


@pytest.fixture(scope="module")
def span_run(make_run: MakeRun) -> Path:
    """Spans of 2 and 200 tokens in each of two layers; their soft edge is 4 tokens wide."""
    span = SPAN | {"context": 201, "span": SpanConfig(maximum=200, ramp=4)}
    return make_run(shares=(0.01, 1.0), rule=MemoryRule(mem_len=200, segment=8, include_self=False), **span)


def test_attention_writes_three_pictures_and_their_numbers(
    run: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pictures"
    result = xl(f"attention {run} --text {text_file} --out {out} --tokens 100 --layer 1 --at 40")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "Figure 6 is of layer 1, head " in result.stdout
    assert sorted(path.name for path in out.iterdir()) == [
        "attention.json",
        "attention.npz",
        "figure-5.png",
        "figure-6.png",
        "figure-7.png",
    ]
    for name, size in (("figure-5", (500, 1600)), ("figure-6", (400, 1500)), ("figure-7", (500, 2200))):
        assert_picture(out / f"{name}.png", at_least=size)
    arrays, opened = read_npz(out / "attention.npz"), load_run(run)
    tokens = opened.vocab.encode(text_file.read_bytes())[:100]
    seen = observe(opened.model.eval(), tokens, opened.config.evaluation, stretch=range(40, 56), terms=True)
    assert seen.terms is not None
    expected = {"average": seen.average, "weights": seen.weights, "seen": seen.seen}
    expected |= {f"term_{name}": values for name, values in seen.terms.items()}
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)
    facts = json.loads((out / "attention.json").read_text())
    assert facts["positions"] == 100 - 16
    assert facts["figure_6"] == {"layer": 1, "head": seen.widest(layer=1)[1], "first": 40, "targets": 16}
    assert facts["mean_distance"] == seen.mean_distances.tolist()
    assert facts["rule"]["mem_len"] == 16


@pytest.mark.parametrize(
    ("sizes", "positions"),
    every(
        2,
        [
            (
                {
                    "positions": "per-layer",
                    "context": 8,
                    "rule": MemoryRule(mem_len=0, segment=8, mask="full"),
                },
                "per-layer",
            ),
            (
                ALL_ATTENTION
                | {"sublayers": "all-attention", "rule": MemoryRule(mem_len=16, segment=8, mask="full")},
                "learned",
            ),
        ],
    ),
)
def test_figure_7_is_left_out_with_a_sentence(
    sizes: dict, positions: str, make_run: MakeRun, text_file: Path, tmp_path: Path
) -> None:
    result = xl("attention", make_run(**sizes), "--text", text_file, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (
        f"figure-7.png is left out, because {positions} positions have no terms (a) to (d)" in result.stdout
    )
    names = ["attention.json", "attention.npz", "figure-5.png", "figure-6.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert_picture(tmp_path / "out/figure-5.png")
    shares = json.loads((tmp_path / "out/attention.json").read_text())["persistent_share"]
    assert (shares is None) == (positions == "per-layer")
    assert shares is None or np.shape(shares) == (2, 2)


def test_spans_prints_a_table_and_what_an_artefact_saves(span_run: Path, tmp_path: Path) -> None:

    result = xl("spans", span_run, "--out", tmp_path / "spans.png")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "span in tokens (at most 200) → largest distance that has any weight"
    assert [line.split() for line in lines[1:4]] == [
        ["layer", "head", "0", "head", "1"],
        ["0", "2.0", "→", "6", "200.0", "→", "200"],
        ["1", "2.0", "→", "6", "200.0", "→", "200"],
    ]
    assert len({len(line) for line in lines[1:4]}) == 1
    document = json.loads(xl("spans", span_run, "--json").stdout)
    assert document["maximum"] == 200
    np.testing.assert_allclose(document["spans"], [[2, 200]] * 2, rtol=1e-6)
    assert document["reaches"] == [[6, 200]] * 2
    # one head of each layer keeps 6 tokens instead of 200: keys and values of 6 float32; hidden states are
    # for all heads
    assert document["bytes_saved"] == {"ring": 2 * 2 * 194 * 6 * 4, "shift": 2 * 2 * 194 * 6 * 4, "hidden": 0}
    assert "an artefact with memory 200 saves 18,624 bytes (ring)" in lines[4]
    assert image.imread(tmp_path / "spans.png").shape[:2] == (720, 1350)


def test_spans_that_are_damaged_are_refused(span_run: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(span_run, damaged)
    tensors, _ = load_tensors(damaged / "model.safetensors", expected=load_run(damaged).model.state_dict())
    tensors["blocks.1.span.share"] = torch.tensor([0.5, float("nan")])
    save_tensors(damaged / "model.safetensors", tensors)
    refused(xl("spans", damaged), "not between 0 and 1 times")
    refused(xl("info", damaged), "not between 0 and 1 times")
