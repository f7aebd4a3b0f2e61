"""The process that puts load on a server, so that neither the server nor the benchmark waits for it.

`python -m benchmarks.cases.serving.load` reads one JSON document from standard input, does what its field
`do` names, and prints one JSON document. It uses raw sockets and Python's own library alone. Every stream is
read to its end, and its tokens are counted.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from benchmarks.cases.serving.attacks import stall
from benchmarks.cases.serving.mixed import COMPLETIONS, STREAMS, mixed
from benchmarks.cases.serving.wire import LoadError, Loop, Request, asked, cpu_seconds

Job = dict[str, Any]


def streams(job: Job) -> Job:
    """All completions at once. The window lasts from when each has `warm` events to when one has `until`."""
    loop = Loop()
    requests = [Request(job["port"], "POST", COMPLETIONS, body) for body in job["bodies"]]
    loop.add(requests)
    first: tuple[float, ...] | None = None
    last: tuple[float, ...] | None = None

    def each(ready: list[Request]) -> None:
        nonlocal first, last
        if first is None:
            if min(request.count for request in requests) >= job["warm"]:
                first = _now(job["pid"], requests)
        elif last is None and max(request.count for request in ready) >= job["until"]:
            last = _now(job["pid"], requests)

    loop.run(each)
    if first is None or last is None:
        raise LoadError("the streams were too short or too uneven to be measured; ask for more tokens.")
    names = ("tokens", "seconds", "server_cpu")
    window = {name: b - a for name, a, b in zip(names, first, last, strict=True)}
    return {"window": window, "texts": [request.answer.completion()[0] for request in requests]}


def _now(pid: int, requests: list[Request]) -> tuple[float, ...]:
    return float(sum(request.count for request in requests)), time.perf_counter(), cpu_seconds(pid)


def first_token(job: Job) -> Job:
    """Completions one after the other: the seconds from each request to its first token."""
    seconds = []
    texts = []
    for body in job["bodies"]:
        loop = Loop()
        loop.add([request := Request(job["port"], "POST", COMPLETIONS, body)])
        loop.run()
        found, times = request.answer.completion()
        seconds.append(times[0] - request.sent)
        texts.append(found)
    return {"seconds": seconds, "texts": texts}


def arrivals(job: Job) -> Job:
    """Streams, and when each has `warm` events, prompts that arrive one after the other.

    gaps: those of `gaps_between`, from when the first prompt was sent to the end of the last one's answer.
    """
    loop = Loop()
    waiting = list(job["prompts"])[::-1]
    prompts = list[Request]()
    requests = [Request(job["port"], "POST", COMPLETIONS, body) for body in job["bodies"]]
    loop.add(requests)

    def each(ready: list[Request]) -> None:
        is_free = not prompts or prompts[-1].ended is not None
        if waiting and is_free and min(request.count for request in requests) >= job["warm"]:
            prompts.append(Request(job["port"], "POST", COMPLETIONS, waiting.pop()))
            loop.add(prompts[-1:])

    loop.run(each)
    if waiting:
        raise LoadError("the streams ended before all prompts were sent; ask for more tokens.")
    answers = [request.answer.completion() for request in requests]
    gaps = gaps_between([times for _, times in answers], prompts[0].sent, prompts[-1].ended or 0.0)
    if not gaps["idle"] or not gaps["busy"]:
        raise LoadError("the streams had no tokens before or while the prompts arrived; ask for more tokens.")
    return {
        "gaps": gaps,
        "texts": [texts for texts, _ in answers],
        "prompt_texts": [request.answer.completion()[0] for request in prompts],
    }


def gaps_between(streams: list[list[float]], begin: float, end: float) -> dict[str, list[float]]:
    """The seconds between two tokens of a stream: before `begin` (`idle`), and from then to `end` (`busy`).

    streams: when each token of each stream came. Idle gaps begin when all streams have their first token,
    since the prompts of the others are fed until then.
    """
    gaps: dict[str, list[float]] = {"idle": [], "busy": []}
    decoding = max(times[0] for times in streams)
    for times in streams:
        for before, after in itertools.pairwise(times):
            if begin <= after <= end:
                gaps["busy"].append(after - before)
            elif before >= decoding and after < begin:
                gaps["idle"].append(after - before)
    return gaps


def long(job: Job) -> Job:
    """A long stored stream and forks of its beginning draw in turns: the seconds a token of each.

    `kept` is the stream after its first `block` drawn tokens. The stream draws on until it has `tokens`. In
    each round a fork of `kept` and the long stream draw one block each; every second round begins with the
    long stream. A fork must draw what the stream drew there. texts: the ids of the first two blocks.
    """
    block = job["block"]
    stream = _asked(job, "POST", STREAMS, {"tokens": job["prompt"]})["stream"]["id"]
    first, _ = _continued(job, stream, block)
    kept = _asked(job, "POST", f"{STREAMS}/{stream}/fork")["id"]
    second, _ = _continued(job, stream, block)
    for at in range(2 * block, job["tokens"], block):  # one answer of all of them could take hours
        _continued(job, stream, min(block, job["tokens"] - at))
    seconds: dict[str, list[float]] = {"early": [], "late": []}
    for turn in range(job["rounds"]):
        young = _asked(job, "POST", f"{STREAMS}/{kept}/fork")["id"]
        for side in ("early", "late")[:: -1 if turn % 2 else 1]:
            ids, mean = _continued(job, young if side == "early" else stream, block)
            if side == "early" and ids != second:
                raise LoadError("a fork of a stored stream has drawn other tokens than the stream.")
            seconds[side].append(mean)
        _asked(job, "DELETE", f"{STREAMS}/{young}")
    return {**seconds, "texts": [str(token) for token in (*first, *second)]}


def _asked(job: Job, method: str, path: str, body: Any = None) -> Any:
    """The whole answer to one request, as a document."""
    return asked(job["port"], method, path, body).document()


def _continued(job: Job, stream: str, count: int) -> tuple[list[int], float]:
    """Draws `count` tokens of a stored stream: their ids, and the seconds of one."""
    body = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "surprisal": False}
    began = time.perf_counter()
    ids: list[int] = _asked(job, "POST", f"{STREAMS}/{stream}/continue", body)["tokens"]
    seconds = time.perf_counter() - began
    if len(ids) != count:
        raise LoadError(f"a stream has drawn {len(ids)} tokens; expected {count}.")
    return ids, seconds / count


JOBS = {
    "streams": streams,
    "first_token": first_token,
    "arrivals": arrivals,
    "long": long,
    "mixed": mixed,
    "stall": stall,
}


def main() -> None:
    """Does one job; an error is a document with the field `error`."""
    job = json.loads(sys.stdin.read())
    try:
        answer = JOBS[job["do"]](job)
    except (LoadError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
