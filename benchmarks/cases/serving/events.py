"""An answer over HTTP/1.1 while it arrives, and the server-sent events in it, read without any library."""

from __future__ import annotations

import json
from typing import Any

END_OF_HEAD = b"\r\n\r\n"
END_OF_LINE = b"\r\n"
END_OF_EVENT = b"\n\n"


class LoadError(Exception):
    """A server has not answered as it should; the message says how, in one sentence."""


class Answer:
    """One answer. `feed` takes what a socket has received.

    status: of HTTP; 0 before it is known. events: those that have arrived whole, without what ends them.
    times: when each of them arrived. done: whether the answer has arrived whole.
    """

    def __init__(self) -> None:
        self.status = 0
        self.events: list[bytes] = []
        self.times: list[float] = []
        self.done = False
        self._raw = bytearray()
        self._body = bytearray()
        self._chunked = self._has_events = False
        self._length = 0

    def feed(self, data: bytes, now: float) -> int:
        """Takes bytes that arrived at `now`; returns how many events they have completed."""
        self._raw += data
        if not self.status and not self._read_head():
            return 0
        if self._chunked:
            self._read_chunks()
        else:
            self._body += self._raw
            self._raw.clear()
            self.done = len(self._body) >= self._length
        return self._read_events(now) if self._has_events else 0

    @property
    def body(self) -> bytes:
        """The bytes of an answer without events, so far."""
        return bytes(self._body)

    def content(self) -> bytes:
        """The bytes of a whole answer without events; raises LoadError where it is a refusal."""
        if not self.done:
            raise LoadError("the server has ended a connection before its answer was whole.")
        if self.status not in (200, 201):
            raise LoadError(f"the server has answered {self.status}: {bytes(self._body)[:300]!r}.")
        return bytes(self._body)

    def document(self) -> Any:
        """The answer as one JSON document; raises LoadError where it is none, or where it is a refusal."""
        return json.loads(self.content())

    def completion(self) -> tuple[list[str], list[float]]:
        """The text and the time of each token of a stream that has ended as it was asked to.

        Raises LoadError where the stream is not whole: without its last events, with another number of tokens
        than its usage says, or ended for another reason than its length.
        """
        if self.status != 200 or not self.done or not self._has_events:
            raise LoadError(f"a stream has not ended: {self.status} {bytes(self._body)[:300]!r}.")
        texts = list[str]()
        times = list[float]()
        reason = None
        count = None
        for event, time in zip(self.events[:-1], self.times, strict=False):
            document = json.loads(event.removeprefix(b"data: "))
            if "error" in document:
                raise LoadError(f"a stream has failed: {document['error']}.")
            if document.get("usage"):
                count = document["usage"]["completion_tokens"]
            for choice in document["choices"]:
                reason = choice.get("finish_reason") or reason
                if choice["text"]:
                    texts.append(choice["text"])
                    times.append(time)
        if self.events[-1:] != [b"data: [DONE]"]:
            raise LoadError("a stream has ended without its last event.")
        if reason != "length" or count != len(texts):
            raise LoadError(
                f"a stream has {len(texts)} events with tokens, a usage of {count} and ended by {reason}; "
                "expected equal numbers and the end by length."
            )
        return texts, times

    def _read_head(self) -> bool:
        end = self._raw.find(END_OF_HEAD)
        if end < 0:
            return False
        first, *lines = bytes(self._raw[:end]).split(END_OF_LINE)
        fields = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip().lower()
        self.status = int(first.split(b" ")[1])
        self._chunked = fields.get(b"transfer-encoding") == b"chunked"
        self._has_events = fields.get(b"content-type", b"").startswith(b"text/event-stream")
        self._length = int(fields.get(b"content-length", 0))
        del self._raw[: end + len(END_OF_HEAD)]
        return True

    def _read_chunks(self) -> None:
        raw = self._raw
        at = 0
        while (end := raw.find(END_OF_LINE, at)) >= 0:
            size = int(raw[at:end].partition(b";")[0], 16)
            first = end + 2
            last = end + 2 + size
            if len(raw) < last + 2:
                break
            self._body += raw[first:last]
            at = last + 2
            if size == 0:
                self.done = True
                break
        del raw[:at]

    def _read_events(self, now: float) -> int:
        *whole, rest = bytes(self._body).split(END_OF_EVENT)
        if whole:
            self.events += whole
            self.times += [now] * len(whole)
            self._body = bytearray(rest)
        return len(whole)
