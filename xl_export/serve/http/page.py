"""The page at `/`: one file of HTML, and what it loads from `/page/`. It connects only to this server."""

from __future__ import annotations

import re

from starlette.responses import FileResponse, HTMLResponse, Response

from xl_export.serve.http.base.context import RequestContext
from xl_export.serve.http.base.endpoint import Endpoints
from xl_export.serve.http.base.errors import RefusedError
from xl_export.web.files import INDEX, PAGE, introduced, web_files

# The same page as `xl-export web`, with another back end, and without what links to it show.
BACK_END = ('data-back-end="worker"', 'data-back-end="server"')
FOR_LINKS = re.compile("<meta property.*?(?=<link)", re.DOTALL)
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


FOLDER = web_files() / PAGE
FILES = {path.name: path for path in FOLDER.iterdir() if path.suffix in TYPES}
ENDPOINTS = Endpoints()  # open: they need no API key, and what the page asks for then does


@ENDPOINTS.add("GET", "/", is_open=True, described=False)
async def index(request: RequestContext) -> Response:
    """The page itself."""
    document = (FOLDER / INDEX).read_text(encoding="utf-8").replace(*BACK_END)
    document = introduced(document, title="xl-export")
    return HTMLResponse(FOR_LINKS.sub("", document), headers=HEADERS)


@ENDPOINTS.add("GET", "/page/{name}", is_open=True, described=False)
async def part(request: RequestContext) -> Response:
    """What the page loads."""
    name = request.path_params["name"]
    if name not in FILES:
        raise RefusedError(f"the page has no file {name!r:.80}.", status=404)
    return FileResponse(FILES[name], media_type=TYPES[FILES[name].suffix], headers=HEADERS)
