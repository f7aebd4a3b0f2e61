"""The tests of web/test/, which Node runs. tests/parity compares what the module computes with Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from runtimes.contract.vocabulary import save_vocab
from tests.web import cases
from tests.web.npm import copied_module, node, packages, run_node


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    node(), packages()
    return copied_module(tmp_path_factory.mktemp("module") / "web")


@pytest.fixture(scope="module")
def given(
    module: Path, artefacts: dict[str, Path], text: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the tests in Node are given: artefacts, vocabularies and texts."""
    scratch, vocabularies = tmp_path_factory.mktemp("scratch"), []
    for name, vocab in cases.vocabularies(text).items():
        (folder := scratch / f"vocabulary-{name}").mkdir()
        save_vocab(folder, vocab)
        texts = [*cases.random_texts(20), "the cat naïve 🙂", "THE CAT\n\nthe\n", "a\0b", ""]
        vocabularies.append({"name": name, "folder": str(folder), "texts": texts})
    return {
        "scratch": str(scratch),
        "chunks": cases.long_text(),
        "folders": {name: str(folder) for name, folder in artefacts.items()},
        "vocabularies": vocabularies,
    }


def run_tests(module: Path, given: dict[str, Any], *names: str, **environment: str) -> str:
    path = Path(given["scratch"]) / "cases.json"
    path.write_text(json.dumps(given))
    return run_node("test/all.js", *names, cwd=module, XL_EXPORT_CASES=str(path), **environment)


def test_the_tests_of_the_module_pass(module: Path, given: dict[str, Any]) -> None:
    assert "# fail 0" in run_tests(module, given)


LEFT_OPEN = """
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";

test("it fails", async () => {
  await new Promise((resolve) => createServer().listen(0, "127.0.0.1", () => resolve(null)));
  assert.equal("found", "wanted");
});
"""


def test_a_failure_is_reported_whatever_it_left_open(module: Path, given: dict[str, Any]) -> None:
    (module / "test" / "left-open.test.js").write_text(LEFT_OPEN)
    with pytest.raises(AssertionError, match=r"(?s)ended with 1.*'found'.*'wanted'"):
        run_tests(module, given, "left-open")


@pytest.mark.slow
def test_a_program_that_does_not_end_fails_with_what_it_printed(tmp_path: Path) -> None:
    (tmp_path / "endless.js").write_text("console.log('so far'); setInterval(() => {}, 1000);")
    with pytest.raises(AssertionError, match=r"(?s)did not end in 20 s.*so far"):
        run_node("endless.js", cwd=tmp_path, timeout=20)


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
    assert first.startswith("Once upon a time")
    assert first.endswith(" in place")
    assert second == "4 13 true"
    assert third == "AbortError 30"


def without_import(block: str) -> str:
    line = 'import { open } from "xl-export-web";\n'
    assert block.startswith(line)
    return block.removeprefix(line)


@pytest.mark.slow
def test_damaged_artefacts_end_in_sentences(module: Path, given: dict[str, Any]) -> None:
    assert "# fail 0" in run_tests(module, given, "mutations")
