"""The page of the guide, built by bundlers from the npm package, in Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from runtimes.base.files import read_json
from tests.browsers import SWIFTSHADER, Page
from tests.docs.pages import Block, blocks
from tests.web.npm import WEB, node, packages
from tests.web.test_page import greedy
from xl_export.artefact.export import export
from xl_export.web.serve import serving


def block_with(text: str) -> Block:
    return next(block for block in blocks("docs/guides/web.md") if text in block.body)


HTML, MAIN = block_with("<!doctype html>").body, block_with('from "xl-export-web"').body
PROMPT = "Once upon a time"
OPTIONS = "{ worker: true }"
GPU_FILES = (
    "cp node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify.{mjs,wasm} dist/onnxruntime-web/"
)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, artefacts: dict[str, Path]) -> Path:
    """The reader's folder, with what npm would install."""
    node()
    folder = tmp_path_factory.mktemp("bundled")
    (folder / "node_modules").mkdir()
    for path in packages().iterdir():
        (folder / "node_modules" / path.name).symlink_to(path)
    package = folder / "node_modules" / "xl-export-web"
    shutil.copytree(WEB / "src", package / "src")
    shutil.copy(WEB / "package.json", package)
    (folder / "index.html").write_text(HTML)
    return folder


def build(project: Path, bundler: str, artefact: Path, options: str = OPTIONS) -> Path:
    """The folder that the guide's commands write. options: of `open` in its program."""
    shutil.rmtree(project / "dist", ignore_errors=True)
    shutil.rmtree(project / "public", ignore_errors=True)
    shutil.copytree(artefact, project / "public" / "artefact")
    assert OPTIONS in MAIN
    program = f"{MAIN.replace(OPTIONS, options)}globalThis.facts = model.facts;\n"
    (project / "main.js").write_text(program)
    for command, _ in block_with(f"npx {bundler}").commands:
        if command.startswith("npm "):
            continue
        ended = run_shell(command, project)
        assert ended.returncode == 0, ended.stderr
    (project / "dist" / "favicon.ico").touch()  # browsers ask for one
    return project / "dist"


def run_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"npm_config_offline": "true"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def open_folder(browsers: Callable[..., Any]) -> Iterator[Callable[..., Page]]:
    """`open_folder(folder, *flags)` → its page, which has finished or failed."""
    with ExitStack() as stack:

        def open_one(folder: Path, *flags: str) -> Page:
            server = stack.enter_context(serving(folder, port=0))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            context = browsers(*flags).new_context()
            stack.callback(context.close)
            page = Page(context, f"http://127.0.0.1:{server.server_port}/")
            page.page.add_init_script(
                "const keep = ({error, reason}) => { globalThis.failed = String(error ?? reason); };"
                "addEventListener('error', keep); addEventListener('unhandledrejection', keep);"
            )
            page.page.goto(page.address)
            page.until("globalThis.facts || globalThis.failed", seconds=60)
            return page

        yield open_one


def text_of(page: Page) -> str:
    assert page.errors == []
    assert page.foreign == []
    return page.text("text")


def python_s_text(artefact: Path) -> str:
    symbols = read_json(artefact / "vocab.json")["symbols"]
    return PROMPT + "".join(symbols[token] for token in greedy(artefact, PROMPT, 20))


@pytest.mark.parametrize(
    ("bundler", "options"),
    [
        ("esbuild", OPTIONS),
        pytest.param("esbuild", "{}", marks=slow),
        pytest.param("esbuild", "{ worker: true, threads: 2 }", marks=slow),
        pytest.param("vite", OPTIONS, marks=slow),
        pytest.param("vite", "{}", marks=slow),
        pytest.param("vite", "{ worker: true, threads: 2 }", marks=slow),
    ],
)
def test_the_bundled_page_writes_python_s_text(
    bundler: str,
    options: str,
    project: Path,
    artefacts: dict[str, Path],
    open_folder: Callable[..., Page],
) -> None:
    page = open_folder(build(project, bundler, artefacts["ring"], options))
    assert text_of(page) == python_s_text(artefacts["ring"])
    facts = page.do("facts")
    assert facts["memory"] == "in place"
    assert facts["threads"] == (2 if "threads" in options else 1)


@slow
@pytest.mark.parametrize("bundler", ["esbuild", "vite"])
def test_the_bundled_page_computes_on_the_gpu(
    bundler: str, project: Path, run: Path, tmp_path: Path, open_folder: Callable[..., Page]
) -> None:
    artefact = export(run, tmp_path / "artefact", memory="ring", target="web")
    folder = build(project, bundler, artefact)
    if bundler == "esbuild":
        assert run_shell(GPU_FILES, project).returncode == 0
    page = open_folder(folder, *SWIFTSHADER)
    assert text_of(page) == python_s_text(artefact)
    assert page.do("facts.device") == "webgpu"


@slow
@pytest.mark.parametrize(
    ("missing", "options", "words"),
    [
        ("onnxruntime-web/ort-wasm-simd-threaded.wasm", OPTIONS, "copy the files that README.md names"),
        ("onnxruntime-web/ort-wasm-simd-threaded.mjs", "{}", "copy the files that README.md names"),
        ("worker.js", OPTIONS, "worker=xl-export-web/worker"),
    ],
)
def test_a_file_that_was_not_copied_is_named(
    missing: str,
    options: str,
    words: str,
    project: Path,
    artefacts: dict[str, Path],
    open_folder: Callable[..., Page],
) -> None:
    folder = build(project, "esbuild", artefacts["ring"], options)
    (folder / missing).unlink()
    failed = open_folder(folder).do("failed")
    assert Path(missing).name in failed
    assert words in failed


@slow
@pytest.mark.parametrize("options", ["{}", OPTIONS])
def test_another_format_than_modules_is_named(
    options: str, project: Path, artefacts: dict[str, Path], open_folder: Callable[..., Page]
) -> None:
    folder = build(project, "esbuild", artefacts["ring"], options)
    program = project / "main.js"
    program.write_text(program.read_text().replace("const model", "(async () => {\nconst model") + "})();\n")
    assert run_shell("npx esbuild main.js --bundle --outdir=dist", project).returncode == 0
    assert "--format=esm" in open_folder(folder).do("failed")
