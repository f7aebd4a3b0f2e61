"""ONNX Runtime's real CUDA provider over stub libraries: where nodes run, and what a token costs in calls.

It runs in an environment with onnxruntime-gpu (`make test-cuda`). Kernels compute nothing, so no answer is
checked.
"""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from runtimes import open_session
from runtimes.sessions.fused_cpu import build
from runtimes.sessions.ort_gpu.loading import OF_SHAPES
from runtimes.sessions.ort_gpu.machine_code import codes_of
from runtimes.sessions.ort_gpu.provider import PROVIDER
from tests.cuda.counts import CASES, DOCUMENT, LAYERS, TF32, Counts, count_all, make_run, table, written
from tests.cuda.stubs import load_all

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu"
    ),
]


DEVICES = (Path(__file__).parents[2] / "docs" / "guides" / "devices.md").read_text()


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counts]:
    return count_all(tmp_path_factory.mktemp("counts"))


def test_the_guide_names_the_gpus_that_the_provider_has_code_for() -> None:
    """One column for each architecture of CPUs; the wheel of this one is read."""
    codes = codes_of(PROVIDER.file(onnxruntime))
    _, _, rows = DEVICES.partition("| compute capability | GPUs | x86-64 | aarch64 |\n|---|---|---|---|\n")
    column = 2 + (platform.machine() == "aarch64")
    for row in rows.partition("\n\n")[0].splitlines():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        for gpu in cells[0].split(", ") if cells[column] != "–" else ():  # there is no such machine
            served = any(code.runs_on(round(10 * float(gpu))) for code in codes)
            assert cells[column] == ("yes" if served else "no"), row


@pytest.mark.parametrize("name", CASES)
def test_only_arithmetic_on_shapes_runs_on_the_cpu(counts: dict[str, Counts], name: str) -> None:
    assert set(counts[name].elsewhere) <= OF_SHAPES


@pytest.mark.parametrize("name", CASES)
def test_memory_is_never_copied_as_a_whole(counts: dict[str, Counts], name: str) -> None:
    found = counts[name]
    if "shift" in name or "hidden" in name:  # written from one set of buffers to another
        return
    assert found.of_memory() == []


@pytest.mark.parametrize("name", CASES)
def test_a_captured_token_is_one_launch(counts: dict[str, Counts], name: str) -> None:
    found = Counter(event.kind for event in counts[name].replayed)
    assert (found["graph"], found["kernel"], found["product"]) == (1, 0, 0)


@pytest.mark.parametrize("name", CASES)
def test_a_captured_token_has_one_upload_download_and_wait(counts: dict[str, Counts], name: str) -> None:
    found = Counter(event.name if event.kind == "copy" else event.kind for event in counts[name].replayed)
    assert (found["upload"], found["download"], found["wait"]) == (1, 1, 1)


def test_a_row_is_cleared_where_it_is_and_its_graphs_stay(tmp_path: Path) -> None:
    from xl_export.artefact.export import export

    (tmp_path / "run").mkdir()
    artefact = export(make_run(tmp_path / "run"), tmp_path / "artefact", memory="shift")
    stubs = load_all()
    session = open_session(artefact, device="cuda", threads=1)
    memory = session.start(2)
    steps = []
    for position in (0, 1, 2, 3, 4, 0):  # the fourth and all later ones are captured
        memory.positions[1] = position
        stubs.forget()
        session.predict(np.zeros((2, 1), np.int64), memory)
        steps.append(Counter(event.name for event in stubs.events()))
    *_, usual, restarted = steps
    assert (usual["launch"], restarted["launch"]) == (1, 1)
    added = restarted - usual - Counter(cuStreamSynchronize=len(memory.tensors))
    assert added == Counter(cuMemsetD8Async=len(memory.tensors))


def test_rows_are_copied_on_the_device_and_one_row_leaves_it_alone(tmp_path: Path) -> None:
    """As an engine does when another stream joins, and when one ends."""
    from xl_export.artefact.export import export

    (tmp_path / "run").mkdir()
    artefact = export(make_run(tmp_path / "run"), tmp_path / "artefact", memory="shift")
    stubs = load_all()
    session = open_session(artefact, device="cuda", threads=1)
    one, other, both = session.start(1), session.start(1), session.start(2)
    for memory in (one, other, both):
        session.predict(np.zeros((memory.batch, 1), np.int64), memory)
    stubs.forget()
    both.write_rows([0, 1], [(one, 0), (other, 0)])
    copies = [event for event in stubs.events() if event.kind == "copy"]
    tensors = both.tensors.values()
    row_bytes = [int(np.prod(x.shape[1:])) * x.dtype.itemsize for x in tensors]
    assert Counter(event.name for event in copies) == {"on device": 2 * len(row_bytes)}
    assert [event.num_bytes for event in copies[::2]] == row_bytes
    stubs.forget()
    both.select([1])
    copies = [event for event in stubs.events() if event.kind == "copy"]
    assert [(event.name, event.num_bytes) for event in copies] == [("download", size) for size in row_bytes]


def test_a_layers_attention_is_one_launch_as_a_node(counts: dict[str, Counts]) -> None:
    for name, found in counts.items():
        launches = sum(event.name == "ring_attention" for event in found.token)
        assert launches == (LAYERS if "node" in name else 0), name


def test_products_are_launches_of_ours(counts: dict[str, Counts]) -> None:
    """Five launches a layer: attention and four products. Three more for the embedding and the logits, and in
    halves one that makes floats of the logits.
    """
    for name, found in counts.items():
        if "node" in name:
            launches = Counter(event.name for event in found.token if event.kind in ("kernel", "product"))
            assert launches["product_of_few_rows"] == 4 * LAYERS + 1, name
            assert launches.total() == 5 * LAYERS + 3 + ("--precision fp16" in name), name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_layer_of_a_segment_is_eight_launches(precision: str, tmp_path: Path) -> None:
    """cuBLAS has no norms and biases, and no additions of residuals: one more launch for three of four."""
    from xl_export.artefact import export as exporting

    (tmp_path / "run").mkdir()
    build()  # the library of the node
    with patch.object(exporting, "on_cuda", return_value=None):
        run = make_run(tmp_path / "run")
        artefact = exporting.export(run, tmp_path / "artefact", attention="plugin", precision=precision)
    stubs = load_all()
    session = open_session(artefact, device="cuda", threads=1)
    memory = session.start(3)
    stubs.forget()
    session.predict(np.zeros((3, 4), np.int64), memory)
    found = [event for event in stubs.events() if not event.captured]
    launches = Counter(event.name for event in found if event.kind in ("kernel", "product"))
    assert launches["product_end"] == 3 * LAYERS + 1
    assert launches[{"fp32": "float32", "fp16": "float16"}[precision]] == 4 * LAYERS + 1
    assert launches.total() == 8 * LAYERS + 4 + (precision == "fp16")


def test_the_graph_for_engines_multiplies_in_float16(counts: dict[str, Counts]) -> None:
    for name, found in counts.items():
        if "tensorrt" in name:
            assert set(found.products) == {"float16"}, name  # with sums in float32


def test_products_round_to_tf32_only_when_asked(counts: dict[str, Counts]) -> None:
    assert set(counts[""].products) == {"float32"}
    assert set(counts[TF32].products) == {"tf32"}


def test_the_table_of_the_guide_is_what_was_counted(counts: dict[str, Counts]) -> None:
    assert written(DOCUMENT.read_text()) == table(counts.items()), "run `python -m tests.cuda.counts`"
