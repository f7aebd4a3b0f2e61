"""Streams on several machines with Ray Serve: replicas that share a folder of streams.

    serve run xl_export.serve.ray:application \\
        model=artefact streams=/shared/streams

A client sends the name of its stream in the path and in the header `x-session-id`. Ray's router then sends
all requests of a stream to one replica, which has it in RAM. Affinity makes this fast; that the answers are
right does not depend on it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from runtimes.base.errors import ConfigError, UserError
from runtimes.base.files import writing
from runtimes.base.ranges import POSITIVE, Range
from runtimes.base.records import from_json, refuse_out_of_range
from runtimes.sessions.open import open_session
from xl_export.serve.core.settings import EngineSettings, Queue, Rows
from xl_export.serve.http.base.errors import RefusedError, refusal_of
from xl_export.serve.replica import Replica, SharedStreams, read_body

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
PATH = "/streams/"
Seconds = Annotated[int, Range(0, whole=True)]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What `serve run` accepts as NAME=VALUE."""

    model: str
    """An artefact with ring memory, at the same path on every machine."""
    streams: str
    """A folder that all replicas share, at the same path on every machine."""
    replicas: Annotated[int, POSITIVE] = 1
    """The fewest, which is also how many there are at first."""
    most_replicas: Annotated[int, POSITIVE] | None = None
    """The most; without it their number is fixed."""
    add_seconds: Seconds = 30
    """Ray adds replicas when each had more than `rows` requests for this many seconds."""
    remove_seconds: Seconds = 600
    """Ray removes replicas when fewer would have been enough for this many seconds."""
    leave_seconds: Seconds = 120
    """Seconds that a removed replica has to finish its requests."""
    rows: Rows = 32
    """Number of rows of each replica."""
    queue: Queue = 1024
    """Number of requests that may wait in each replica."""
    threads: Annotated[int, POSITIVE] = 1
    """Number of CPUs of each replica."""
    ram_bytes: Annotated[int, Range(0, whole=True)] = 1 << 28
    """Bytes of streams that each replica keeps in RAM."""

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        if self.most_replicas is not None and self.most_replicas < self.replicas:
            raise ConfigError(
                f"most_replicas is {self.most_replicas} and replicas, the fewest, is {self.replicas}; give "
                f"most_replicas={self.replicas} or more, or fewer replicas."
            )


class Streams:
    """A replica as Ray Serve starts it: `POST /streams/NAME` and `DELETE /streams/NAME`.

    The header `x-replica` of an answer says which one it was.
    """

    def __init__(self, given: Deployment) -> None:
        self._id = serve.get_replica_context().replica_id.unique_id
        session = open_session(given.model, threads=given.threads, device="cpu")
        self._replica = Replica(
            session,
            SharedStreams(Path(given.streams), session, ram_bytes=given.ram_bytes),
            EngineSettings(rows=given.rows, queue=given.queue),
        )

    async def __call__(self, request: Request) -> Response:
        """The answer to a request, or one sentence: 400, 404, 409 for another position, 413 for a body that
        is too large, 429 or 503 to ask again. A client that leaves ends nothing: its request is done, and its
        answer is there when it asks again.
        """
        name = request.url.path.partition(PATH)[2]
        try:
            if request.method == "DELETE":
                return JSONResponse({"deleted": await self._replica.delete(name)})
            if request.method != "POST" or not name:
                raise RefusedError(f"there is nothing here; send POST {PATH}NAME.", status=404)
            body = await read_body(request.headers, request.stream())
            answer = await self._replica.answer(name, body)
            return JSONResponse(answer, headers={"x-replica": self._id})
        except (RefusedError, UserError) as error:
            return refusal_of(error).response()

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if not self._replica.alive:
            raise RuntimeError("the engine has ended")

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor has failed
            self._replica.stop()


def application(arguments: dict[str, Any]) -> Any:
    """The application for `serve.run` and `serve run`, of a `Deployment` in JSON."""
    numbers = {name: int(value) if str(value).isdecimal() else value for name, value in arguments.items()}
    given = from_json(Deployment, numbers, where="the arguments of serve run")
    with writing(Path(given.streams)):
        Path(given.streams).mkdir(parents=True, exist_ok=True, mode=0o700)
    deployment = serve.deployment(
        Streams,
        name="streams",
        ray_actor_options={"num_cpus": given.threads},
        # More requests wait in the replica, whose queue is bounded and answers 429.
        max_ongoing_requests=given.rows + given.queue + 16,
        autoscaling_config=AutoscalingConfig(
            min_replicas=given.replicas,
            max_replicas=given.most_replicas or given.replicas,
            target_ongoing_requests=given.rows,
            upscale_delay_s=given.add_seconds,
            downscale_delay_s=given.remove_seconds,
        ),
        graceful_shutdown_timeout_s=given.leave_seconds,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            # By default a busy replica passes a stream on to others, which would have to read it.
            request_router_kwargs={"num_fallback_replicas": 0},
        ),
    )
    return deployment.bind(given)
