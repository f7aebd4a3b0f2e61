"""The settings of a store of streams, what it reports, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.base.errors import ConfigError, UserError


class NoStreamError(UserError):
    """There is no stream of that name, or it is somebody else's."""


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


class TooManyStreamsError(UserError):
    """A tenant has as many streams, or bytes of them, as it may have."""


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The bounds of a store.

    ram_bytes: of the states that stay in RAM while they are idle. streams, tenant_bytes: the most that one
    tenant may have. unwritten_bytes: of the states of operations that run or wait for the disk. replayed: of
    the tokens of appends, how many a stream may be ahead of its snapshot; so many are fed again after a kill.
    flush: whether each new stream and each change of one is on the disk before it is answered, so that it
    also survives a loss of power. That costs milliseconds an append on most disks; without it the system
    writes appends within seconds, and a kill of the server loses none.
    """

    ram_bytes: int = 1 << 30
    streams: int = 10_000
    tenant_bytes: int = 1 << 36
    unwritten_bytes: int = 4 << 30
    replayed: int = 1024
    flush: bool = False

    def __post_init__(self) -> None:
        for name in ("ram_bytes", "streams", "tenant_bytes", "unwritten_bytes", "replayed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more.")


@dataclass(frozen=True, kw_only=True)
class StreamFacts:
    """What a client may know of its stream. created, used: seconds since 1970. in_ram: whether the next
    operation need not read the disk. busy: whether an operation runs.
    """

    id: str
    owner: str
    position: int
    created: float
    used: float
    in_ram: bool
    busy: bool


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What a store holds and has done. damaged: folders of streams that cannot go on; `streams` are the
    others. ram_bytes: of idle states. snapshot_bytes, journal_bytes: of the files of all streams; forks may
    share the bytes of a snapshot on the disk, and each counts them. read, written: whole snapshots.
    """

    streams: int
    damaged: int
    in_ram: int
    ram_bytes: int
    snapshot_bytes: int
    journal_bytes: int
    read: int
    written: int


def no_stream(name: str) -> NoStreamError:
    """The error for a stream that is not there, or belongs to somebody else."""
    return NoStreamError(f"there is no stream {name!a:.60}; see GET /v1/streams for yours.")
