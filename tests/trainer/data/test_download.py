"""Downloads from a server on this machine: verified and whole, or nothing and one sentence."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runtimes.base.errors import UserError
from tests.trainer.data.corpus_files import PUBLISHED, make_zip
from trainer.data.corpora import CORPORA
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
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small archive that the table knows as the published one of enwik8."""
    path = make_zip(tmp_path / "enwik8.zip", PUBLISHED["enwik8"])
    known = dataclasses.replace(CORPORA["enwik8"], archive=fingerprint({"": path}, progress=False))
    monkeypatch.setitem(CORPORA, "enwik8", known)
    content = path.read_bytes()
    path.unlink()
    return content


def published_at(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    monkeypatch.setitem(CORPORA, "enwik8", dataclasses.replace(CORPORA["enwik8"], urls=urls))


def refused(tmp_path: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        download("enwik8", tmp_path / "enwik8.zip", progress=False)
    assert "get its archive by other means and give it as --from" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_published_archive_is_fetched_whole(
    archive: bytes, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve({"/enwik8.zip": archive})
    published_at(monkeypatch, f"{address}/moved.zip", f"{address}/enwik8.zip")  # the first is gone
    download("enwik8", tmp_path / "enwik8.zip", progress=False)
    assert (tmp_path / "enwik8.zip").read_bytes() == archive
    assert len(list(tmp_path.iterdir())) == 1


def test_another_file_is_refused(
    archive: bytes, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(
        {
            "/altered": archive[:-1] + b"!",
            "/long": archive + b"more",
            "/less": archive[:-1],
            "/short": archive[:-9],
        }
    )
    published_at(monkeypatch, f"{address}/altered")
    refused(tmp_path, "it sends another file: expected md5 [0-9a-f]{32}, found md5")
    published_at(monkeypatch, f"{address}/long")
    refused(tmp_path, "it sends more than was published")
    published_at(monkeypatch, f"{address}/less")
    refused(tmp_path, f"expected {len(archive):,} bytes, found {len(archive) - 1:,} bytes")
    published_at(monkeypatch, f"{address}/short")
    refused(tmp_path, "another file|IncompleteRead")


def test_no_network_is_one_sentence_with_every_reason(
    archive: bytes, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = serve({}).rpartition(":")[0] + ":1"
    published_at(monkeypatch, f"{closed}/enwik8.zip", serve({}) + "/gone")
    refused(
        tmp_path,
        r"enwik8 could not be downloaded \(http://127\.0\.0\.1:1/enwik8\.zip: .*refused; http://.*/gone: "
        r"Not Found\)",
    )


def test_a_folder_that_is_missing_is_one_sentence(archive: bytes, serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be written: No such file"):
        download("enwik8", tmp_path / "missing/enwik8.zip", progress=False)
