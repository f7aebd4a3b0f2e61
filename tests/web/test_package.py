"""The npm package: packed, installed into an empty project, and used from there, as its README says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.web.npm import WEB, copied_module, node, packages, run_node
from tests.web.test_page import greedy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of somebody else in which the README's commands were run, without asking the registry."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, so nothing can be packed")
    node()
    folder = tmp_path_factory.mktemp("project")
    module = copied_module(tmp_path_factory.mktemp("package") / "web")
    (folder / "package.json").write_text('{"name": "of-somebody-else", "private": true}')
    # What npm would fetch is there already; it must be all that the package needs.
    for name, facts in json.loads((WEB / "package-lock.json").read_text())["packages"].items():
        if name and not facts.get("dev") and not facts.get("peer"):
            shutil.copytree(packages().parent / name, folder / name)
    (block,) = re.findall(r"```console\n(.*?)```", (WEB / "README.md").read_text(), re.DOTALL)
    environment = os.environ | {"npm_config_offline": "true", "npm_config_fund": "false"}
    for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
        ended = subprocess.run(
            ["bash", "-c", command.replace("PATH/TO/web", str(module))],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
    shutil.rmtree(module)  # what runs is the installed package, and nothing of the folder that it came from
    return folder


def test_the_guide_has_the_commands_of_the_readme() -> None:
    readme = (WEB / "README.md").read_text()
    shown = [block for block in blocks("docs/guides/web.md") if "npm pack" in block.body]
    assert [command for command, _ in shown[0].commands] == re.findall(r"^\$ (npm .*)$", readme, re.MULTILINE)


def test_an_installed_package_has_what_it_needs_and_nothing_else(project: Path) -> None:
    installed = project / "node_modules" / "xl-export-web"
    assert not installed.is_symlink()
    assert {path.name for path in installed.iterdir()} == {"README.md", "index.d.ts", "package.json", "src"}
    assert json.loads((project / "package.json").read_text())["dependencies"].keys() == {"xl-export-web"}


def test_the_example_for_node_gives_python_s_tokens(project: Path, artefacts: dict[str, Path]) -> None:
    """The engine is onnxruntime-web, which was installed with the package."""
    (project / "artefact").symlink_to(artefacts["ring"])
    example = re.findall(r"```js\n(.*?)```", (WEB / "README.md").read_text(), re.DOTALL)[0]
    (project / "example.mjs").write_text(f"{example}\nconsole.log(model.facts.computedBy);\n")
    text, engine = run_node("example.mjs", cwd=project).splitlines()
    assert re.fullmatch(r"ONNX Runtime 1\.30\.\d+ in WebAssembly", engine)
    vocab = json.loads((artefacts["ring"] / "vocab.json").read_text())["symbols"]
    expected = "".join(vocab[token] for token in greedy(artefacts["ring"], "Once upon a time", 20))
    assert text == f"Once upon a time{expected} in place"
