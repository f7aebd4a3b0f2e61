"""Downloads from a server on this machine: verified and whole, or nothing and one sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runtimes.base.errors import UserError
from tests.trainer.data.corpus_files import PUBLISHED, make_zip
from trainer.data.corpora import Fingerprint
from trainer.data.download import download
from trainer.data.published import fingerprint

Serve = Callable[[dict[str, bytes]], str]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serve({"/name": content})` → address. `/short` announces more than it sends; other names are 404."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in files:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[self.path]) + 9 * self.path.endswith("short")))
            self.send_header("X-Agent", self.headers["User-Agent"])
            self.end_headers()
            self.wfile.write(files[self.path])

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def start(content: dict[str, bytes]) -> str:
        files.update(content)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def archive(tmp_path: Path) -> tuple[bytes, Fingerprint]:
    """A small file, and what is known of it."""
    path = make_zip(tmp_path / "enwik8.zip", PUBLISHED["enwik8"])
    content = path.read_bytes()
    known = fingerprint({"": path})
    path.unlink()
    return content, known


def refused(urls: list[str], expected: Fingerprint, tmp_path: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        download(urls, tmp_path / "enwik8.zip", expected)
    assert "get it by other means and put it at" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_published_archive_is_fetched_whole(
    archive: tuple[bytes, Fingerprint], serve: Serve, tmp_path: Path
) -> None:
    content, known = archive
    address = serve({"/enwik8.zip": content})
    urls = [f"{address}/moved.zip", f"{address}/enwik8.zip"]  # the first is gone
    download(urls, tmp_path / "enwik8.zip", known)
    assert (tmp_path / "enwik8.zip").read_bytes() == content
    assert len(list(tmp_path.iterdir())) == 1


def test_another_file_is_refused(archive: tuple[bytes, Fingerprint], serve: Serve, tmp_path: Path) -> None:
    content, known = archive
    files = {"/altered": content[:-1] + b"!", "/long": content + b"more", "/short": content[:-9]}
    address = serve(files | {"/less": content[:-1]})
    for name, words in (
        ("altered", "it sends another file: expected md5 [0-9a-f]{32}, found md5"),
        ("long", "it sends more than was published"),
        ("less", f"expected {len(content):,} bytes, found {len(content) - 1:,} bytes"),
        ("short", "another file|IncompleteRead"),
    ):
        refused([f"{address}/{name}"], known, tmp_path, words)


def test_no_network_is_one_sentence_with_every_reason(
    archive: tuple[bytes, Fingerprint], serve: Serve, tmp_path: Path
) -> None:
    closed = serve({}).rpartition(":")[0] + ":1"
    refused(
        [f"{closed}/enwik8.zip", serve({}) + "/gone"],
        archive[1],
        tmp_path,
        r"enwik8.zip could not be downloaded \(http://127\.0\.0\.1:1/enwik8\.zip: .*refused; http://.*/gone: "
        r"Not Found\)",
    )
