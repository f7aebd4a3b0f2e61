"""Serves a site to this machine, with the headers that a browser asks for before it gives threads."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from runtimes.base.errors import UserError

HOST = "127.0.0.1"  # reachable only from this machine
# A page gets shared memory, and so threads, only where it is isolated from pages of other origins.
ISOLATION = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# The page carries this policy too, but a worker has only the one that its own file is sent with.
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval' blob:; worker-src 'self' blob:; "
    "connect-src 'self' blob:; style-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".wasm": "application/wasm",
}


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    extensions_map: dict[str, str] = {"": "application/octet-stream", **TYPES}  # noqa: RUF012

    def end_headers(self) -> None:
        for name, value in ISOLATION.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-cache")  # another site may be served here tomorrow
        super().end_headers()

    def list_directory(self, path: Any) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the terminal shows only the address."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of a download is no error."""


@contextlib.contextmanager
def serving(site: Path, *, port: int) -> Iterator[ThreadingHTTPServer]:
    """A server over a site on 127.0.0.1, bound and not yet running; it is closed when the block ends.

    port: 0 is any free one, which is `server_port` then. Raises UserError if the port cannot be had.
    """
    handler = partial(_Handler, directory=str(site))
    try:
        server = _Server((HOST, port), handler)
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        why = "is taken, or needs other rights" if taken else f"cannot be used ({error.strerror})"
        raise UserError(f"port {port} of {HOST} {why}; give another --port, or 0 for a free one.") from error
    with server:
        yield server
