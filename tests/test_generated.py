"""Files that programs of this tree write are what these programs write now.

Others are compared next to what they hold: tests/data/sampling.jsonl in tests/runtimes/tasks/test_sample.py,
tests/cuda/counts.md in tests/cuda/test_provider.py, the tables of the documents by `python -m benchmarks
tables --check`.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "cpp" / "tools"


def test_the_tables_of_the_format_are_those_of_the_records() -> None:
    for path, text in runpy.run_path(str(TOOLS / "format_tables.py"))["sources"]().items():
        assert path.read_text() == text, "run `python cpp/tools/format_tables.py`"


def test_the_tables_of_letters_and_numbers_are_those_of_the_library() -> None:
    pytest.importorskip("tokenizers")
    tool = runpy.run_path(str(TOOLS / "unicode_classes.py"))
    assert tool["TARGET"].read_text() == tool["source"](), "run `python cpp/tools/unicode_classes.py`"


def test_vendored_headers_are_one() -> None:
    first, second = (
        (ROOT / folder / "onnxruntime" / "onnxruntime_c_api.h").read_bytes()
        for folder in ("cpp/third_party", "runtimes/sessions/fused_cpu/vendor")
    )
    assert first == second


RUN_READY = "run `python -m xl_export.tensorrt.kernels.ready`"


def test_compiled_kernels_are_not_older_than_their_sources() -> None:
    from xl_export.tensorrt.kernels.ready import FILE, ORIGIN, RING_FILE, hash_of_sources

    with open(RING_FILE) as ring:
        (sources, triton), others = json.loads(FILE.read_text())[ORIGIN].split(", "), ring.readline()
    assert others == f"// {ORIGIN}: {sources}, {triton}\n", RUN_READY
    assert sources == hash_of_sources(), RUN_READY


@pytest.mark.slow
def test_compiled_kernels_are_those_of_the_source() -> None:
    triton = pytest.importorskip("triton")
    from xl_export.tensorrt.kernels.ready import FILE, ORIGIN, RING_FILE, ready_document, ring_source

    kept = json.loads(FILE.read_text())
    if not kept[ORIGIN].endswith(f"Triton {triton.__version__}"):
        pytest.skip(f"they were compiled from {kept[ORIGIN]}")
    assert kept == ready_document(), RUN_READY
    assert RING_FILE.read_text() == ring_source(), RUN_READY
