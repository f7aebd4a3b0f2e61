"""Parts of OpenAI's interface that do not apply to these models; each is refused with the reason."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.server import Server

CHAT = "these models continue text and have learned no roles; send the text to /v1/completions"
REFUSED = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": CHAT,
    "/v1/messages": CHAT,
    "/v1/assistants": CHAT,
    "/v1/threads": CHAT,
    "/v1/embeddings": "these models give probabilities and no embeddings; /v1/score gives log-probabilities",
    "/v1/moderations": "these models classify nothing; /v1/score gives log-probabilities",
    "/v1/edits": "these models only continue text; send it to /v1/completions",
    "/v1/images/generations": "these models know text alone; send it to /v1/completions",
    "/v1/audio/speech": "these models know text alone; send it to /v1/completions",
    "/v1/audio/transcriptions": "these models know text alone; send it to /v1/completions",
    "/v1/files": "this server keeps no files; send texts to /v1/completions or /v1/score",
    "/v1/batches": "this server keeps no batches; send up to 4,096 texts at once to /v1/score",
    "/v1/fine_tuning/jobs": "this server does not train; use `xl-export train`",
    "/v1/rerank": "these models rank nothing themselves; /v1/score gives log-probabilities",
}


def routes(server: Server) -> list[BaseRoute]:
    """One route for each path that is refused."""
    return [Route(path, _refused, methods=["GET", "POST", "DELETE"]) for path in REFUSED]


async def _refused(request: Request) -> Response:
    path = request.url.path
    raise RefusedError(f"{path} is not served: {REFUSED[path]}.", status=404, code="not_served")
