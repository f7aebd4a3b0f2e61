"""The settings of a store of streams, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.base.errors import UserError


class NoStreamError(UserError):
    """There is no stream of that name, or it belongs to another tenant."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no stream {name!a:.60}; see GET /v1/streams for yours.")


class DamagedStreamError(UserError):
    """The files of the stream are damaged. The log says how: what is wrong names paths of the server."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the stream {name} is damaged on the server's disk and cannot go on; restore a snapshot of it, "
            "or ask the operator of the server, whose log says what is wrong."
        )


class UnreadableError(UserError):
    """The disk did not give the files of the stream, which may be whole; the log says why."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the server could not read the stream {name} from its disk; try again, or ask the operator of "
            "the server, whose log says why."
        )


class BusyStreamError(UserError):
    """Another operation is using the stream."""


class ClosedStoreError(UserError):
    """The server has ended."""


class JournalError(UserError):
    """A stream has no whole snapshot, and the model that could make one is not served."""

    def __init__(self, name: str, appended: int) -> None:
        super().__init__(
            f"the last {appended:,} tokens of the stream {name} are not in its snapshot yet, and only its "
            "own artefact can bring them there; serve that artefact again, and ask for the snapshot then."
        )


class FullStoreError(UserError):
    """So many operations hold states that are not on the disk that no other one is let in now."""

    def __init__(self, count: int, of_tenant: bool) -> None:
        whose = " of this tenant" if of_tenant else ""
        super().__init__(
            f"{count:,} operations{whose} on streams run or wait for the disk, as many as this server has "
            "memory for (--waiting-memory); send the request again after the seconds of Retry-After."
        )


class TooManyStreamsError(UserError):
    """A tenant has as many streams, or bytes of them, as it may have."""


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The bounds of a store."""

    #: Of the states that stay in RAM while they are idle.
    ram_bytes: int = 1 << 30
    #: The most streams of one tenant.
    streams: int = 10_000
    #: The most bytes of the streams of one tenant.
    tenant_bytes: int = 1 << 36
    #: Of the states of operations that run or wait for the disk.
    unwritten_bytes: int = 4 << 30
    #: How many appended tokens a stream may be ahead of its snapshot; so many are fed again after a kill.
    replayed: int = 1024
    #: Whether each new stream and each change of one is on the disk before it is answered, so that it also
    #: survives a loss of power. That costs milliseconds for each append on most disks. Without it the system
    #: writes appends within seconds, and a kill of the server loses none.
    flush: bool = False
