"""What one client may ask of the server, and how much of it there may be at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xl_export.serve.core.admission import Quota
from xl_export.serve.http.base.errors import RefusedError

SMALL_BODY = 1 << 16  # bytes of a request or a WebSocket that do not count among those of all


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one request may use, and how long a client may take for it."""

    #: Of the body of one request.
    body_bytes: int = 16 << 20
    #: Of the bodies of all requests that are served at once and of all messages of WebSockets that are not
    #: answered, without the first `SMALL_BODY` of each; a tenant may always send one body of `body_bytes`.
    bodies_bytes: int = 256 << 20
    #: Of one message of a WebSocket.
    message_bytes: int = 1 << 20
    #: Of all prompts of a request together.
    prompt_tokens: int = 1 << 20
    #: Tokens that one choice draws.
    max_tokens: int = 1 << 17
    #: That one answer holds: each token counts once for itself and once for each of the likeliest next to it.
    #: Also the tokens of all choices of an answer that is not streamed.
    log_probs: int = 1 << 19
    #: Prompts times `n` or `best_of`.
    choices: int = 128
    #: Of one request to score.
    texts: int = 4096
    #: That are served or wait at once; each operation on a WebSocket counts as one.
    requests: int = 2048
    #: WebSockets that are open at once.
    sockets: int = 2048
    #: Of requests, of sockets and of bodies_bytes, for one tenant with a name.
    tenant_share: float = 0.5
    #: That are open at once.
    connections: int = 4096
    #: Of the head of a request; as many between two parts of its body, and after it.
    header_bytes: int = 1 << 16
    #: Until the head of a request has arrived.
    header_seconds: float = 10.0
    #: Until its body has arrived.
    body_seconds: float = 60.0
    #: A client that accepted nothing, or next to nothing, for so long is disconnected.
    stalled_seconds: float = 120.0


def too_many(what: str) -> Callable[[int, bool], RefusedError]:
    """Makes the refusal of one request or WebSocket too many; see `Quota`. what: their name in messages."""

    def refusal(count: int, of_tenant: bool) -> RefusedError:
        return RefusedError(
            f"the {'tenant' if of_tenant else 'server'} has {count:,} {what} at once and may have no more; "
            "ask again when one of them has ended.",
            status=429,
            code="too_many",
            retry_after=1,
        )

    return refusal


class BodyAccount:
    """The bytes of one request or WebSocket that are in memory. The first `SMALL_BODY` of them do not count,
    so a small request is never refused because others send books.

    bodies: counts the bytes of all.
    """

    def __init__(self, bodies: Quota, tenant: str) -> None:
        self._bodies = bodies
        self._tenant = tenant
        #: The bytes that are in memory.
        self.held = 0

    def change(self, count: int) -> None:
        """There are so many bytes more, or fewer; raises RefusedError, and changes nothing, for too many."""
        held = self.held + count
        counted = max(0, held - SMALL_BODY) - max(0, self.held - SMALL_BODY)
        if counted > 0 and not self._bodies.has_room(self._tenant, counted):
            raise RefusedError(
                "other large requests take all memory that the server has for them; ask again when one of "
                "them has ended, or send less at once.",
                status=429,
                code="too_many",
                retry_after=1,
                closes=True,
            )
        if counted:
            self._bodies.add(self._tenant, counted)
        self.held = held

    def close(self) -> None:
        """Releases the whole body."""
        self.change(-self.held)


def refuse_long_answer(limits: Limits, tokens: int, likeliest: int | None, param: str) -> None:
    """Raises RefusedError for more tokens than an answer can hold.

    likeliest: how many of the likeliest tokens each has, next to its own log-probability; None for tokens
    without log-probabilities, of which one choice of `max_tokens` is held however large that limit is.
    """
    most = max(limits.log_probs, limits.max_tokens) if likeliest is None else limits.log_probs
    count = tokens * (1 + (likeliest or 0))
    if count > most:
        kind = "tokens" if likeliest is None else "log-probabilities"
        raise RefusedError(
            f"the answer could have {count:,} {kind} at once, and this server holds {most:,}; ask for fewer, "
            "in parts, or for a stream.",
            param=param,
        )
