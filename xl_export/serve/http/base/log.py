"""The log of the server: one JSON object a line."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from datetime import datetime, timezone
from typing import Any, TextIO

import msgspec


class Log:
    """Writes events as lines of JSON; to nowhere where `stream` is None."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()  # an engine says its faults on its own thread

    def event(self, event: str, *, level: str = "info", **fields: Any) -> None:
        """One line with the time, the level, the name of the event, and its fields without those that are
        None.
        """
        if self._stream is None:
            return
        now = datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds")
        known = {name: value for name, value in fields.items() if value is not None}
        line = msgspec.json.encode({"time": now, "level": level, "event": event, **known})
        with self._lock, contextlib.suppress(OSError, ValueError):  # nobody reads the log any more
            self._stream.write(line.decode() + "\n")
            self._stream.flush()

    def fault(self, event: str, error: BaseException, **fields: Any) -> None:
        """An error that is our own, with its traceback."""
        where = "".join(traceback.format_exception(error))
        self.event(event, level="error", error=str(error), traceback=where, **fields)


# What uvicorn says of each WebSocket whose handshake was refused; the client was told why.
REFUSED_HANDSHAKE = "ASGI callable returned without completing handshake."


class Handler(logging.Handler):
    """Sends what engines and libraries log to our log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == REFUSED_HANDSHAKE:
            return
        error = record.exc_info[1] if record.exc_info else None
        fields = {"logger": record.name, "message": record.getMessage()}
        event = "engine" if record.name.startswith("xl_export") else "library"
        if error is not None:
            self._log.fault(event, error, **fields)
        else:
            self._log.event(event, level=record.levelname.lower(), **fields)
