"""The ES module in web/ computes in Node what Python computes, and refuses what Python refuses.

The answers come from Python; the tests are those of web/test/, which Node runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.contract.checks import load_memory
from runtimes.sessions.onnx_runtime import OrtSession
from tests.runtimes.contract.test_spec import in_place_cases
from tests.sampling import range_cases, read_cases
from tests.web import cases
from tests.web.npm import copied_module, node, packages, run_node


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    node(), packages()
    return copied_module(tmp_path_factory.mktemp("module") / "web")


@pytest.fixture(scope="module")
def given(
    module: Path,
    artefacts: dict[str, Path],
    padded_artefact: Path,
    make_run: Callable[..., Path],
    text: str,
    tmp_path_factory: Any,
) -> dict[str, Any]:
    """What the tests in Node are given: artefacts, and Python's answers."""
    scratch = tmp_path_factory.mktemp("scratch")
    folders = artefacts | cases.artefacts_of_kinds(make_run, scratch)
    return {
        "scratch": str(scratch),
        "chunks": cases.long_text(),
        "padded": str(padded_artefact),
        "sampling": read_cases(),
        "ranges": range_cases(),
        "inPlace": in_place_cases(),
        "cases": [cases.model_case(name, folder, scratch) for name, folder in folders.items()],
        "vocabularies": [
            cases.vocabulary_case(name, vocab, scratch / f"vocabulary-{name}")
            for name, vocab in cases.vocabularies(text).items()
        ],
    }


def run_tests(module: Path, given: dict[str, Any], *names: str, **environment: str) -> str:
    path = Path(given["scratch"]) / "cases.json"
    path.write_text(json.dumps(given))
    return run_node("test/all.js", *names, cwd=module, XL_EXPORT_CASES=str(path), **environment)


def test_the_module_computes_what_python_computes(module: Path, given: dict[str, Any]) -> None:
    printed = run_tests(module, given)
    for case in given["cases"]:
        assert f"{case['name']} on wasm gives Python's answers" in printed
        session = OrtSession.open(Path(case["folder"]), threads=1, kernel="standard")
        streams = list(Path(given["scratch"]).glob(f"{case['name']}-*.stream"))
        assert streams
        for stream in streams:  # which the module has written
            memory = load_memory(stream, session)
            assert memory.positions.tolist() == [len(case["prompt"])]
            logits, _ = session.predict(np.array([case["next"]]), memory)
            assert np.abs(logits[0] - case["logits"]).max() < 1e-3


@pytest.mark.slow
def test_the_types_are_those_of_the_code(module: Path) -> None:
    run_node(packages() / "typescript" / "bin" / "tsc", "-p", module, cwd=module)


def test_the_examples_of_the_readme_run(module: Path, artefacts: dict[str, Path], tmp_path: Path) -> None:
    """Each block of the page, in a folder with an artefact, where npm has installed the package."""
    blocks = re.findall(r"```js\n(.*?)```", (module / "README.md").read_text(), re.S)
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "xl-export-web").symlink_to(module)
    (tmp_path / "artefact").symlink_to(artefacts["ring"])
    (tmp_path / "page.mjs").write_text("\n".join(f"{{\n{without_import(block)}}}" for block in blocks))
    program = f'import {{ open }} from "xl-export-web";\n{(tmp_path / "page.mjs").read_text()}'
    (tmp_path / "page.mjs").write_text(program)
    first, second, third = run_node("page.mjs", cwd=tmp_path).splitlines()
    assert first.startswith("The ")
    assert first.endswith(" in place")
    assert second == "4 13 true"
    assert third == "AbortError 30"


def without_import(block: str) -> str:
    line = 'import { open } from "xl-export-web";\n'
    assert block.startswith(line)
    return block.removeprefix(line)


@pytest.mark.slow
def test_long_texts_take_no_more_memory(module: Path, given: dict[str, Any]) -> None:
    assert "# fail 0" in run_tests(module, given, "long")


@pytest.mark.slow
def test_damaged_artefacts_end_in_sentences(module: Path, given: dict[str, Any]) -> None:
    assert "# fail 0" in run_tests(module, given, "mutations")
