"""The settings of a server. A field with an `Option` is also an option of `xl-export serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from runtimes.base.options import MB, Option
from runtimes.base.ranges import POSITIVE, Range

Rows = Annotated[int, Range(1, 4096, whole=True)]
Queue = Annotated[int, Range(1, 1 << 20, whole=True)]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The sizes of the engine of a model."""

    rows: Annotated[
        Rows,
        Option(
            "--rows",
            "The number of streams that advance at once; others wait. Each row needs the memory of a stream.",
        ),
    ] = 32
    queue: Annotated[
        Queue,
        Option(
            "--queue", "The number of requests that may wait for a row; more are answered with status 429."
        ),
    ] = 1024
    prompt_tokens: int = 128
    """Tokens of prompts that are fed in one iteration, padding included; at least one chunk is always fed."""
    unread: int = 8192
    """Answers that a client has not read. The next one ends its task: a client that reads nothing must hold
    neither a row nor much memory (about 200 bytes an answer). That bridges a stall of half a second at the
    rate of the smallest models.
    """
    # One state is always accepted.
    state_bytes: Annotated[
        int,
        Range(MB, whole=True),
        Option(
            "--waiting-memory",
            "The most megabytes of streams that running requests hold next to the rows. For each model; more "
            "requests are answered with status 429.",
            unit=MB,
        ),
    ] = 4096 * MB
    cache_bytes: Annotated[
        int,
        Range(0, whole=True),
        Option(
            "--cache",
            "The most megabytes of memory for prompts that may come again, for each model; 0 keeps none.",
            unit=MB,
        ),
    ] = 256 * MB
    cache_shared: Annotated[
        bool,
        Option(
            "--share-cache",
            "Let API keys find prompts of each other in the cache. The time to the first token then reveals "
            "to a client whether another one has sent the same prompt.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one request may use, and how long a client may take for it."""

    body_bytes: Annotated[
        int, Range(MB, 4096 * MB, whole=True), Option("--max-body", "The largest body of a request.", unit=MB)
    ] = MB
    prompt_tokens: Annotated[
        int, POSITIVE, Option("--max-prompt", "The most tokens of the prompts of a request.")
    ] = 1 << 20
    max_tokens: Annotated[
        int, POSITIVE, Option("--max-tokens", "The most tokens that one choice of a request may have.")
    ] = 1 << 17
    log_probs: int = 1 << 19
    """Log-probabilities of one answer: a token has one for itself and one for each of the likeliest next to
    it. Also the tokens of all choices of an answer that is not streamed.
    """
    choices: int = 128
    """Prompts times `n` or `best_of`."""
    texts: int = 4096
    """Texts of one request to score."""
    requests: int = 2048
    """Requests that are served or wait at once."""
    bodies_bytes: int = 256 * MB
    """Bytes of the bodies of these requests, and never less than one body may have."""
    connections: int = 4096
    """Connections that are open at once."""
    header_bytes: int = 1 << 16
    """Bytes of the head of a request, and of what frames a chunk of its body."""
    header_seconds: float = 10.0
    """Seconds until the head of a request has arrived."""
    body_seconds: float = 60.0
    """Seconds until its body has arrived."""
    stalled_seconds: float = 120.0
    """Seconds after which a client that does not read its answer is disconnected."""


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The bounds of a store of streams."""

    ram_bytes: Annotated[
        int,
        Range(0, whole=True),
        Option(
            "--stream-memory",
            "The most megabytes of idle streams that stay in memory; the others are only on the disk.",
            unit=MB,
        ),
    ] = 1024 * MB
    streams: Annotated[
        int, POSITIVE, Option("--max-streams", "The most streams that one API key may have.")
    ] = 10_000
    owner_bytes: Annotated[
        int,
        Range(MB, whole=True),
        Option(
            "--stream-disk",
            "The most megabytes on the disk for the memories of the streams of one API key. Their journals "
            "are not counted.",
            unit=MB,
        ),
    ] = 65_536 * MB
    replayed: int = 1024
    """Tokens that a stream may be ahead of its snapshot; they are fed again after a kill."""
    # It costs milliseconds for each change on most disks.
    flush: Annotated[
        bool,
        Option(
            "--flush-streams",
            "Bring each new stream and each change of one to the disk before it is answered, so that it "
            "survives a loss of power. It needs --state.",
        ),
    ] = False
    adopt: Annotated[
        bool,
        Option(
            "--adopt-streams",
            "Continue streams that a model with the same memory but other weights has computed, such as the "
            "model before it was fine-tuned.",
        ),
    ] = False
