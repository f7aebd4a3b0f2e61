"""The site that `xl-export web` writes: what it holds, what it refuses, and how it is served."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import http.client
import io
import json
import re
import shutil
import struct
import tarfile
import threading
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import UserError
from runtimes.contract.vocabulary import save_vocab, vocab_from_file
from tests.commands import refused, xl
from tests.runtimes.contract.test_subword import trained
from xl_export.artefact.export import export
from xl_export.web import packages, site
from xl_export.web.files import copy_page
from xl_export.web.packages import Package, copy_package
from xl_export.web.picture import BAR, CHARACTER, MARGIN, picture_of
from xl_export.web.serve import ISOLATION, POLICY, serving
from xl_export.web.site import write_site

CONTENT = {"dist/engine.mjs": b"export const engine = 1;\n", "dist/engine.wasm": b"\0asm and more"}
WANTED = {path: hashlib.sha256(content).hexdigest() for path, content in CONTENT.items()}


@functools.cache  # gzip writes the second into its header: two archives of the same files may differ
def archive() -> bytes:
    """A package of the npm registry that holds CONTENT."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as members:
        for path, content in CONTENT.items():
            member = tarfile.TarInfo(f"package/{path}")
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def published(content: bytes) -> Package:
    integrity = base64.b64encode(hashlib.sha512(content).digest()).decode()
    return Package(name="@some/engine", version="1.2.3", integrity=integrity, num_bytes=len(content))


@pytest.fixture
def node_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny package in place of onnxruntime-web."""
    for path, content in CONTENT.items():
        file = tmp_path / "node_modules" / "onnxruntime-web" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    monkeypatch.setattr(site, "WASM", WANTED)
    return tmp_path / "node_modules"


@pytest.fixture
def written(artefacts: dict[str, Path], node_modules: Path, tmp_path: Path) -> Path:
    result = xl("web", artefacts["ring"], "--out", tmp_path / "site", "--node-modules", node_modules)
    assert result.exit_code == 0, result.output
    assert "is a web page of ring" in result.stdout
    assert result.stderr == ""
    return tmp_path / "site"


def test_a_site_holds_what_the_page_reads_and_nothing_else(written: Path, artefacts: dict[str, Path]) -> None:
    listed = json.loads((written / "site.json").read_text())
    (model,) = listed["models"]
    assert (model["name"], model["path"]) == ("ring", "models/ring")
    copied = {path.name for path in (written / "models" / "ring").iterdir()}
    others = {"fused.onnx", "genai_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert copied == {path.name for path in artefacts["ring"].iterdir()} - others
    for path in (written / "models" / "ring").iterdir():
        assert path.read_bytes() == (artefacts["ring"] / path.name).read_bytes()
    assert {path.name for path in (written / "vendor").iterdir()} == {
        "engine.mjs",
        "engine.wasm",
        "LICENSE.onnxruntime-web",
    }
    assert (written / "index.html").is_file()


def test_a_site_has_the_words_of_its_owner(
    artefacts: dict[str, Path], node_modules: Path, tmp_path: Path
) -> None:
    words = ["--title", "Tales & <more>", "--about", 'Of "cats"', "--url", "https://me.example/tales/"]
    words += ["--opening", "The cat", "--opening", "A dog"]
    options = ("--out", tmp_path / "site", "--node-modules", node_modules)
    assert xl("web", artefacts["ring"], *words, *options).exit_code == 0
    page = (tmp_path / "site" / "index.html").read_text()
    assert page.count("Tales &amp; &lt;more&gt;") == 3, "title, heading and link"
    assert page.count("Of &quot;cats&quot;") == 3, "description, sentence and link"
    assert 'og:image" content="https://me.example/tales/page/preview.png"' in page
    assert json.loads((tmp_path / "site" / "site.json").read_text())["openings"] == ["The cat", "A dog"]
    refused(xl("web", artefacts["ring"], "--opening", "日", *options, "--force"), "日")


def test_an_opening_is_not_for_a_model_of_ids(
    artefacts: dict[str, Path], node_modules: Path, tmp_path: Path
) -> None:
    both = [Path("examples/music/chorales"), artefacts["ring"]]
    write_site(both, tmp_path / "site", openings=["The cat"], node_modules=node_modules)


def test_the_picture_of_a_link_is_of_the_model(artefacts: dict[str, Path]) -> None:
    """Each token is a bar that is as long as its text, in one of the colours of the page."""
    ours, another = (picture_of(artefacts["ring"], opening) for opening in ("The cat", "A dog or two"))
    assert ours != another
    size, data = struct.unpack(">II", ours[16:24]), ours.index(b"IDAT") + 4
    assert size == (1200, 630)
    rows = np.frombuffer(zlib.decompressobj().decompress(ours[data:]), np.uint8).reshape(630, 1 + 3 * 1200)
    first = rows[MARGIN + BAR // 2, 1:].reshape(1200, 3)
    paper = (first == first[0]).all(axis=1)
    assert paper[:MARGIN].all()
    assert not paper[MARGIN : MARGIN + 9].any(), "T"
    assert paper[MARGIN + 3 * CHARACTER : MARGIN + 4 * CHARACTER].all(), "the blank before cat"


def test_a_model_with_an_odd_name_is_found(
    artefacts: dict[str, Path], node_modules: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(artefacts["ring"], tmp_path / "my #1 a?b%20ü")
    write_site([folder], tmp_path / "site", node_modules=node_modules)
    (model,) = json.loads((tmp_path / "site" / "site.json").read_text())["models"]
    assert model["name"] == folder.name
    with serving(tmp_path / "site", port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = urllib.parse.urljoin(f"http://127.0.0.1:{server.server_port}/", model["path"])
            with urllib.request.urlopen(f"{address}/spec.json") as response:
                assert response.read() == (folder / "spec.json").read_bytes()
        finally:
            server.shutdown()


def test_every_file_that_the_page_names_is_there(tmp_path: Path) -> None:
    """Imports of modules and addresses in the page, all of them relative: no other server is named."""
    copy_page(tmp_path)
    page = (tmp_path / "index.html").read_text()
    named = [tmp_path / name for name in re.findall(r'(?:src|href)="(page/[^"#]+)"', page)]
    for script in tmp_path.rglob("*.js"):
        text = script.read_text(encoding="utf-8")
        named += [
            script.parent / name for name in re.findall(r'^(?:import|export|\}).*?"(\.[^"]+)"', text, re.M)
        ]
        named += [script.parent / name for name in re.findall(r'new URL\("(\.[^"]+\.js)"', text)]
    assert len(named) > 30
    assert [str(path) for path in named if not path.is_file()] == []


def test_a_site_is_replaced_only_by_force(
    written: Path, artefacts: dict[str, Path], node_modules: Path
) -> None:
    options = ("--out", written, "--node-modules", node_modules)
    refused(xl("web", artefacts["shift"], *options), "exists already", "--force")
    result = xl("web", artefacts["shift"], *options, "--force")
    assert result.exit_code == 0
    assert "Warning: " in result.stderr
    assert "--memory ring" in result.stderr
    assert [path.name for path in (written / "models").iterdir()] == ["shift"]


def test_a_signature_is_copied_and_does_not_outlive_its_artefact(
    artefacts: dict[str, Path], run: Path, node_modules: Path, tmp_path: Path
) -> None:
    signed, signature = shutil.copytree(artefacts["ring"], tmp_path / "signed"), bytes(range(64))
    (signed / "spec.json.sig").write_bytes(signature)
    for _ in range(2):
        write_site([signed], tmp_path / "site", node_modules=node_modules, force=True)
    assert (tmp_path / "site" / "models" / "signed" / "spec.json.sig").read_bytes() == signature
    export(run, signed, force=True)
    assert not (signed / "spec.json.sig").exists()


@pytest.mark.parametrize("page", ["about.html", "page/logo.png", "models/ring/notes.txt"])
def test_pages_of_others_are_kept(
    page: str, written: Path, artefacts: dict[str, Path], node_modules: Path
) -> None:
    (written / page).write_text("mine")
    options = ("--out", written, "--node-modules", node_modules, "--force")
    refused(xl("web", artefacts["shift"], *options), f"also holds '{page}'")
    assert (written / page).read_text() == "mine"


def test_a_site_of_a_release_that_listed_no_files_is_replaced(
    written: Path, artefacts: dict[str, Path], node_modules: Path
) -> None:
    listed = json.loads((written / "site.json").read_text())
    assert listed.pop("files")
    (written / "site.json").write_text(json.dumps(listed))
    write_site([artefacts["shift"]], written, node_modules=node_modules, force=True)
    assert [path.name for path in (written / "models").iterdir()] == ["shift"]


def test_what_no_browser_runs_is_refused(
    run: Path, artefacts: dict[str, Path], node_modules: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--out", out, "--node-modules", node_modules)
    refused(xl("web", run, *options), "not an artefact", "xl-export export")
    refused(xl("web", artefacts["ring"], artefacts["ring"], *options), "two artefacts are called ring")
    refused(xl("web", artefacts["ring"]), "--out", "--serve")
    refused(xl("web", artefacts["ring"], *options, "--url", "me.github.io"), "--url", "me.github.io")
    copied = shutil.copytree(artefacts["ring"], tmp_path / "damaged")
    (copied / "weights.bin").write_bytes(bytes(len((copied / "weights.bin").read_bytes())))
    refused(xl("web", copied, *options), "weights.bin")
    export(run, tmp_path / "half", memory_precision="fp16")
    refused(xl("web", tmp_path / "half", *options), "float16", "--memory-precision fp32")
    export(run, tmp_path / "engine", target="tensorrt")
    refused(xl("web", tmp_path / "engine", *options), "tensorrt", "--target")
    assert not out.exists()


def test_too_large_or_failing_models_are_refused(
    artefacts: dict[str, Path], node_modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--out", tmp_path / "out", "--node-modules", node_modules)
    with monkeypatch.context() as patch:
        patch.setattr(site, "MOST_BYTES", 1000)
        refused(xl("web", artefacts["ring"], *options), "parameters", "smaller model")
    checked = site.check
    monkeypatch.setattr(site, "check", lambda *a, **k: dataclasses.replace(checked(*a, **k), passed=False))
    refused(xl("web", artefacts["ring"], *options), "fails its check", "xl-export check")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_slow_in_a_browser_are_named(run: Path, node_modules: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "artefact", precision="int8")
    result = xl("web", tmp_path / "artefact", "--out", tmp_path / "out", "--node-modules", node_modules)
    assert result.exit_code == 0, result.output
    assert "int8-stored" in result.stderr


def test_packages_come_from_the_registry_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[str] = []

    def answer(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        asked.append(request.full_url)
        return io.BytesIO(archive())

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    package = published(archive())
    for number in range(2):
        copy_package(package, WANTED, tmp_path / str(number))
    assert asked == ["https://registry.npmjs.org/@some/engine/-/engine-1.2.3.tgz"]
    assert (tmp_path / "1" / "engine.mjs").read_bytes() == CONTENT["dist/engine.mjs"]
    kept = next((tmp_path / "cache").rglob("engine.mjs"))
    kept.write_bytes(b"altered")
    copy_package(package, WANTED, tmp_path / "2")
    assert len(asked) == 2
    assert kept.read_bytes() == CONTENT["dist/engine.mjs"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"another archive", "SHA-512"),
        (urllib.error.URLError(OSError(101, "Network is unreachable")), "Network"),
    ],
)
def test_no_other_archive_is_taken(
    answer: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def opened(*_: Any, **__: Any) -> io.BytesIO:
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer)

    monkeypatch.setattr(urllib.request, "urlopen", opened)
    with pytest.raises(UserError, match=says) as error:
        copy_package(published(archive()), WANTED, tmp_path / "out")
    assert "--node-modules" in str(error.value)
    assert not list(tmp_path.rglob("engine.*"))


def test_files_of_another_release_are_refused(node_modules: Path, tmp_path: Path) -> None:
    package = dataclasses.replace(published(archive()), name="onnxruntime-web")
    copy_package(package, WANTED, tmp_path / "good", node_modules=node_modules)
    (node_modules / "onnxruntime-web" / "dist" / "engine.mjs").write_bytes(b"older")
    with pytest.raises(UserError, match=r"is not from onnxruntime-web@1\.2\.3"):
        copy_package(package, WANTED, tmp_path / "bad", node_modules=node_modules)
    with pytest.raises(UserError, match="npm install"):
        copy_package(package, WANTED, tmp_path / "bad", node_modules=tmp_path)


def test_the_pinned_releases_are_those_of_the_module() -> None:
    module = json.loads((Path(__file__).parents[3] / "web" / "package.json").read_text())
    for package in (packages.ONNXRUNTIME_WEB, packages.TOKENIZERS):
        assert module["dependencies"][package.name] == package.version
    source = (Path(__file__).parents[3] / "web" / "src" / "engine" / "runtime.js").read_text()
    for path in (*packages.WASM, *packages.WEBGPU, *packages.SUBWORDS):
        assert path == packages.LICENCE or f'"{Path(path).name}"' in source, path


def test_a_site_is_served_to_this_machine(written: Path) -> None:
    (written.parent / "secret").write_text("outside of the site")
    assert f'content="{POLICY}"' in " ".join((written / "index.html").read_text().split())
    with serving(written, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        try:
            types = {
                "": "text/html; charset=utf-8",
                "page/main.js": "text/javascript; charset=utf-8",
                "vendor/engine.mjs": "text/javascript; charset=utf-8",
                "vendor/engine.wasm": "application/wasm",
                "models/ring/weights.bin": "application/octet-stream",
                "models/ring/spec.json": "application/json",
            }
            for name, kind in types.items():
                with urllib.request.urlopen(address + name) as response:
                    assert response.headers["Content-Type"] == kind
                    assert response.headers["Content-Security-Policy"] == POLICY
                    found = {header: response.headers[header] for header in ISOLATION}
                    assert found == ISOLATION
            for hidden in ("models/", "../secret", "%2e%2e/secret", "models/ring/absent"):
                connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
                connection.request("GET", f"/{hidden}")  # as it stands, and not made simpler by the client
                assert connection.getresponse().status == 404, hidden
                connection.close()
            with pytest.raises(UserError, match="--port"), serving(written, port=server.server_port):
                raise AssertionError
        finally:
            server.shutdown()


def test_the_command_serves_what_it_wrote_until_it_is_interrupted(
    artefacts: dict[str, Path], node_modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[bytes] = []

    def interrupted(server: ThreadingHTTPServer) -> None:
        """Answers one request, and is interrupted as by Ctrl-C."""
        address = f"http://127.0.0.1:{server.server_port}/site.json"
        reader = threading.Thread(target=lambda: served.append(urllib.request.urlopen(address).read()))
        reader.start()
        server.handle_request()
        reader.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    result = xl("web", artefacts["ring"], "--serve", "--port", 0, "--node-modules", node_modules)
    assert re.search(r"^http://127\.0\.0\.1:\d+/ serves it until Ctrl-C$", result.stdout, re.M), result.output
    assert json.loads(served[0])["models"][0]["name"] == "ring"
    assert not isinstance(result.exception, KeyboardInterrupt)
    assert "Traceback" not in result.output


def test_a_vocabulary_that_no_browser_reads_is_refused(
    make_run: Callable[..., Path], node_modules: Path, tmp_path: Path
) -> None:
    vocab = vocab_from_file(trained("sentencepiece", tmp_path))
    run = make_run(vocab_size=vocab.size)
    save_vocab(run, vocab)
    export(run, tmp_path / "artefact")
    options = ("--out", tmp_path / "out", "--node-modules", node_modules)
    refused(xl("web", tmp_path / "artefact", *options), "sentencepiece", "tokenizer.json")
