"""Altered graphs for the fused operator are refused with a sentence, before anything is read elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from runtimes import check
from runtimes.base.errors import ArtefactError
from runtimes.contract.spec import FUSED
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import OrtSession
from xl_export.artefact.export import export


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built once for these tests."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here to build the operator with")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield fused_cpu.build()  # type: ignore[misc]


@pytest.fixture(scope="module")
def in_bytes(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact with memory in int8."""
    return export(run, tmp_path_factory.mktemp("bytes") / "artefact", memory_precision="int8")


def test_a_table_without_rows_is_refused(
    artefacts: dict[str, Path], reseal: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "altered"
    shutil.copytree(artefacts["ring"], folder)
    model = onnx.load(folder / FUSED, load_external_data=False)
    name = next(node for node in model.graph.node if node.op_type == "RingRelativeLayer").input[4]
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    heads, width, _ = tensor.dims
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros((heads, width, 0), np.float32), name))
    onnx.save(model, folder / FUSED)
    reseal(folder, FUSED)
    with pytest.raises(ArtefactError, match="do not fit together"):
        check(folder)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("heads", 3),
        ("mem_len", 1 << 40),
        ("mem_len", 17),
        ("query_at", 90),
        ("key_at", -1),
        ("value_at", 1 << 62),
    ],
)
def test_a_graph_that_would_read_elsewhere_is_refused(
    attribute: str, value: int, artefacts: dict[str, Path], reseal: Callable[..., None], tmp_path: Path
) -> None:
    folder = tmp_path / "altered"
    shutil.copytree(artefacts["ring"], folder)
    model = onnx.load(folder / FUSED, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "RingRelativeLayer")
    next(a for a in node.attribute if a.name == attribute).i = value
    onnx.save(model, folder / FUSED)
    reseal(folder, FUSED)
    with pytest.raises(ArtefactError, match=r"could not (be loaded|run)"):
        one_step(folder)


@pytest.mark.parametrize(("dropped", "given"), [(1, 2), (2, 3), (3, 17), (4, 18)])
def test_a_graph_without_its_ring_outputs_is_refused(
    dropped: int,
    given: int,
    artefacts: dict[str, Path],
    in_bytes: Path,
    reseal: Callable[..., None],
    tmp_path: Path,
) -> None:
    """Outputs 3 and 4 are the scales of a ring of bytes."""
    folder = Path(shutil.copytree(artefacts["ring"] if dropped < 3 else in_bytes, tmp_path / "altered"))
    model = onnx.load(folder / FUSED, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type.startswith("RingRelativeLayer"))
    past = node.input[given]
    model.graph.node.append(onnx.helper.make_node("Identity", [past], [node.output[dropped]]))
    node.output[dropped] = ""
    onnx.save(model, folder / FUSED)
    reseal(folder, FUSED)
    with pytest.raises(ArtefactError, match="could not run"):
        one_step(folder)


def one_step(folder: Path) -> None:
    session = OrtSession.open(folder, kernel="fused")
    session.step(np.zeros((1, 8), np.int64), session.start(1))
