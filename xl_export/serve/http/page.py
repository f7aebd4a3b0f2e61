"""The page at `/`: one file of HTML, and what it loads from `/page/`. It connects only to this server."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, Response

from xl_export.serve.http.base.endpoint import Endpoint
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.exchange import Exchange
from xl_export.web.files import PAGE, web_files

OWN = Path(__file__).parents[1] / "page"
INDEX = "index.html"
# These files are those of the page of `xl-export web`: colours of surprisals, style, symbol.
SHARED = ("style.css", "tokens.js", "icon.svg")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


FILES = {path.name: path for path in OWN.iterdir() if path.suffix in TYPES}
FILES |= {name: web_files() / PAGE / name for name in SHARED}


async def index(exchange: Exchange) -> Response:
    """The page itself."""
    return _file(FILES[INDEX])


async def part(exchange: Exchange) -> Response:
    """What the page loads."""
    name = exchange.params["name"]
    if name not in FILES:
        raise RefusedError(f"the page has no file {name!r:.80}.", status=404)
    return _file(FILES[name])


# They need no API key; what the page asks for then does.
ENDPOINTS = [
    Endpoint(method="GET", path="/", handler=index, is_open=True),
    Endpoint(method="GET", path="/page/{name}", handler=part, is_open=True),
]


def _file(path: Path) -> Response:
    return FileResponse(path, media_type=TYPES[path.suffix], headers=HEADERS)
