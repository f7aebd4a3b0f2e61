"""The process that puts load on a server, so that neither the server nor the benchmark waits for it.

`python -m benchmarks.cases.serving.load` reads one JSON document from standard input, does what its field
`do` names, and prints one JSON document. It uses raw sockets and Python's own library alone. Every stream is
read to its end, and its tokens are counted by their events.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from benchmarks.cases.serving.events import LoadError
from benchmarks.cases.serving.mixed import mixed
from benchmarks.cases.serving.wire import Loop, Request, cpu_seconds

COMPLETIONS = "/v1/completions"
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
    names = ("tokens", "seconds", "server_cpu", "server_main_cpu", "client_cpu")
    window = {name: b - a for name, a, b in zip(names, first, last, strict=True)}
    return {"window": window, "texts": [request.answer.completion()[0] for request in requests]}


def _now(pid: int, requests: list[Request]) -> tuple[float, ...]:
    seconds = time.perf_counter()
    return (
        float(sum(request.count for request in requests)),
        seconds,
        *cpu_seconds(pid),
        time.process_time(),
    )


def first_token(job: Job) -> Job:
    """Completions one after the other: the seconds from each request to its first token."""
    seconds, texts = [], []
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
    loop, waiting, prompts = Loop(), list(job["prompts"])[::-1], list[Request]()
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
    """One long completion: the mean seconds between two tokens in each block of `block` tokens.

    The events are dropped as they come, all but those of the first block, which are given back.
    """
    loop, block = Loop(), job["block"]
    loop.add([request := Request(job["port"], "POST", COMPLETIONS, job["body"])])
    blocks, texts = list[float](), list[str]()
    counted = 0

    def each(ready: list[Request]) -> None:
        nonlocal counted
        answer = request.answer
        while len(answer.events) > block + 3:  # the last events are left for the check of the end
            found = [json.loads(event.removeprefix(b"data: ")) for event in answer.events[:block]]
            if any(not document["choices"] or not document["choices"][0]["text"] for document in found):
                raise LoadError("an event of the stream has no token.")
            if not texts:
                texts.extend(document["choices"][0]["text"] for document in found)
            blocks.append((answer.times[block] - answer.times[0]) / block)
            counted += block
            del answer.events[:block], answer.times[:block]

    loop.run(each)
    answer = request.answer
    last = json.loads(answer.events[-2].removeprefix(b"data: "))["usage"]["completion_tokens"]
    rest = sum(b'"finish_reason":null' in event for event in answer.events)
    if answer.events[-1] != b"data: [DONE]" or counted + rest != last:
        raise LoadError(f"the stream has {counted + rest} events with tokens and a usage of {last}.")
    return {"blocks": blocks, "texts": texts, "tokens": last}


JOBS = {"streams": streams, "first_token": first_token, "arrivals": arrivals, "long": long, "mixed": mixed}


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
