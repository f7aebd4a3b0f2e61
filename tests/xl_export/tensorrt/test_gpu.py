"""Engines on a real GPU say what their artefacts say (`pytest -m gpu`). Nothing of this runs where there is
none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import check, evaluate, load_memory, open_session, save_memory
from runtimes.base.errors import UserError
from runtimes.contract.engine import Attention, Flavour
from runtimes.contract.tensors import Form
from runtimes.sessions.tensorrt.device_memory import Cuda
from tests.architectures import ARCHITECTURES
from tests.streams import feed, rows
from xl_export.artefact.export import export
from xl_export.tensorrt.build import build
from xl_export.tensorrt.options import BuildOptions

pytestmark = pytest.mark.gpu
KINDS: tuple[tuple[Flavour, Attention, Form | None], ...] = (
    ("tensorrt", "native", None),
    ("tensorrt", "plugin", None),  # a ring, where the model allows one
    ("tensorrt", "plugin", "shift"),
    ("rtx", "native", None),
)
NAMES = ("transformer-xl", "adaptive-softmax", "all-attention-groups", "adaptive-span-full", "head-split")


@pytest.fixture(scope="module", params=[(kind, name) for kind in KINDS for name in NAMES], ids=str)
def pair(
    request: pytest.FixtureRequest, make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """An artefact in float16 and its engine on this GPU."""
    (flavour, attention, form), name = request.param
    package = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}[flavour]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    try:
        gpu = Cuda().gpu
    except UserError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("gpu")
    run = make_run(**{"head_dim": 16, **ARCHITECTURES[name]})
    wanted: Attention = "plugin" if attention == "plugin" else "native"
    artefact = export(run, folder / "artefact", target="tensorrt", attention=wanted, memory=form)
    here = (gpu.compute_capability,) if flavour == "rtx" else ()
    facts = build(
        artefact,
        folder / "engine",
        BuildOptions(flavour=flavour, attention=attention, compute_capabilities=here, token_batch=(2,) * 3),
    )
    assert (facts.plugin_layers > 0) == (attention == "plugin")
    return artefact, folder / "engine"


def test_the_engine_passes_the_artefacts_own_check(pair: tuple[Path, Path]) -> None:
    report = check(pair[1])
    assert report.passed, report


def test_log_probabilities_are_those_of_the_artefact(pair: tuple[Path, Path], tokens: np.ndarray) -> None:
    batch, cuts = rows(tokens, 2, 64), [8, 1, 1, 1, 1, 1, 7, 8, 8, 1, 1, 1, 1, 8, 8, 8]
    mine, theirs = (feed(open_session(folder), batch, cuts)[0] for folder in reversed(pair))
    assert np.abs(mine - theirs).max() < 2e-2


def test_a_text_costs_what_it_costs_the_artefact(pair: tuple[Path, Path], tokens: np.ndarray) -> None:
    mine, theirs = (evaluate(open_session(folder), tokens[:2000], lanes=2) for folder in reversed(pair))
    assert abs(mine.bits_per_token - theirs.bits_per_token) < 2e-3


def test_a_saved_stream_continues(pair: tuple[Path, Path], tokens: np.ndarray, tmp_path: Path) -> None:
    session = open_session(pair[1])
    _, memory = feed(session, rows(tokens, 2, 24), [8, 8, 8])
    save_memory(memory, tmp_path / "stream.npz")
    again = load_memory(tmp_path / "stream.npz", session)
    one, other = (feed(session, rows(tokens, 2, 6), [1] * 6, m)[0] for m in (memory, again))
    assert np.abs(one - other).max() < 1e-3
