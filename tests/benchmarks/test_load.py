"""The process that puts load on a server: how answers are read, and what is not measured."""

from __future__ import annotations

import pytest

from benchmarks.cases.serving.load import gaps_between
from benchmarks.cases.serving.wire import Answer, LoadError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKENS = [b'data: {"choices":[{"text":" %d","finish_reason":null}]}\n\n' % token for token in (7, 12)]
LAST = b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def sent(*events: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + end


def read(data: bytes, size: int) -> Answer:
    answer = Answer()
    for at in range(0, len(data), size):
        answer.feed(data[at : at + size], float(at))
    return answer


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_read_however_they_arrive(size: int) -> None:
    data = sent(TOKENS[0], TOKENS[1] + LAST, DONE)  # two events in one chunk
    answer = read(data, size)
    texts, times = answer.completion()
    assert texts == [" 7", " 12"]
    assert times == sorted(times)
    arrived = [data.index(event) + len(event) - 1 for event in TOKENS]
    assert all(at <= end < at + size for at, end in zip(times, arrived, strict=True))


@pytest.mark.parametrize("size", [1, 1000])
def test_a_document_is_read_however_it_arrives(size: int) -> None:
    answer = read(b'HTTP/1.1 200 OK\r\ncontent-length: 14\r\n\r\n{"data":[1,2]}', size)
    assert answer.document() == {"data": [1, 2]}
    cut = read(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"data":[1,2]}', size)
    with pytest.raises(LoadError, match="before its answer was whole"):
        cut.document()


BROKEN = [
    (sent(*TOKENS, LAST, DONE, end=b""), "a stream has not ended"),
    (sent(TOKENS[0], b'data: {"error":{"message":"no"}}\n\n', DONE), "a stream has failed"),
    (b"HTTP/1.1 429 No\r\nContent-Length: 2\r\n\r\nno", "429 b'no'"),
]


@pytest.mark.parametrize(("data", "message"), BROKEN)
def test_a_stream_that_is_not_whole_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read(data, 1000).completion()


def test_the_streams_own_prompts_are_in_no_gap() -> None:
    """The first stream waits for the prompt of the second one from 1 to 5."""
    streams = [[1.0, 5.0, 6.0, 8.0, 11.0, 20.0], [4.0, 5.5, 9.0, 12.0]]
    assert gaps_between(streams, 7.0, 12.0) == {"idle": [1.0, 1.5], "busy": [2.0, 3.0, 3.5, 3.0]}
