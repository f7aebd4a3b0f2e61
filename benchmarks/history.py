"""The history of measurements: one line of JSON for each result, with all that its numbers depend on."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Document, Row
from benchmarks.machine import BUSY_SHARE
from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_bytes, writing
from runtimes.base.ranges import counted

NEEDED = {"case", "time", "config", "threads", "rows", "machine", "versions"}
FACTS = ("config", "threads", "commit")  # filters of a whole result; other filters are fields of its rows


def append(path: Path, document: Document) -> None:
    """Adds one line to a history file, whole or not at all."""
    line = (json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n").encode()
    # There is one unbuffered write, so that a kill cannot come between two halves of a line.
    with writing(path), path.open("ab", buffering=0) as stream:
        if (written := stream.write(line)) < len(line):  # the disk is full
            os.ftruncate(stream.fileno(), stream.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_results(path: Path) -> list[Document]:
    """The results of a history file, the newest last; raises ArtefactError if a line is not a result."""
    documents = []
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        try:
            document = json.loads(line)
            fits = document.keys() >= NEEDED
        except (ValueError, AttributeError, RecursionError):
            fits = False
        if not fits:
            raise ArtefactError(
                f"line {number} of {path} is not a result of `python -m benchmarks run`; give another file."
            )
        documents.append(document)
    return sorted(documents, key=lambda document: str(document["time"]))


def newest(
    history: Iterable[Document], case: str, filters: Mapping[str, Sequence[str]]
) -> list[tuple[Row, Document]]:
    """The newest rows that match, each with its result.

    filters: allowed values by name, in the order of the table. Each combination of values has the rows of its
    newest result. Results of busy machines are left out unless a filter is `busy=yes`, and so are those with
    fewer threads than CPUs unless `threads` is a filter. Raises ArtefactError if there is no such row.
    """
    filters = dict(filters)
    busy = filters.pop("busy", None)
    results = [each for each in history if each["case"] == case and (busy or _is_idle(each))]
    if "threads" not in filters:
        results = [each for each in results if each["threads"] == each["machine"]["cpus"]]
    found = []
    for values in itertools.product(*filters.values()):
        wanted = dict(zip(filters, values, strict=True))
        for document in reversed(results):
            facts = {name: document[name] for name in FACTS}
            rows = [row for row in document["rows"] if _matches(facts | row, wanted)]
            if rows:
                found += [(row, document) for row in rows]
                break
    if not found:
        words = " ".join(f"{name}={','.join(values)}" for name, values in filters.items())
        raise ArtefactError(
            f"the history has no result of {case} {words}; run `python -m benchmarks run {case}`."
        )
    return found


def _matches(facts: Row, wanted: Mapping[str, str]) -> bool:
    return all(str(facts.get(name)) == value for name, value in wanted.items())


def _is_idle(document: Document) -> bool:
    """Whether others used hardly any CPU before the measurement. Older results did not record it."""
    machine = document["machine"]
    return bool(machine.get("busy_cpus", 0) <= BUSY_SHARE * machine["cpus"])


def source(documents: Iterable[Document]) -> str:
    """The paragraph below a table: commands, dates, commits and machines."""
    documents = list(documents)
    commands = dict.fromkeys(f"`{each['command']}`" for each in documents)
    days = sorted({each["time"][:10] for each in documents})
    commits = dict.fromkeys(_commit(each.get("commit")) for each in documents)
    machines = dict.fromkeys(machine(each) for each in documents)
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return (
        f"Measured by {', '.join(commands)} on {period} at commit {', '.join(commits)}. Machine: "
        f"{'; '.join(machines)}."
    )


def machine(document: Document) -> str:
    """The processor, its CPUs, the threads, and the versions of ONNX Runtime and PyTorch."""
    cpu = document["machine"]["cpu"].replace("(R)", "").replace(" Processor", "")
    parts = [cpu, counted(document["machine"]["cpus"], "CPU"), counted(document["threads"], "thread")]
    for name, title in (("onnxruntime", "ONNX Runtime"), ("torch", "PyTorch")):
        if name in document["versions"]:
            parts.append(f"{title} {document['versions'][name]}")
    return ", ".join(parts)


def _commit(commit: str | None) -> str:
    if commit is None:
        return "unknown"
    return f"`{commit[:12]}`" + (" with uncommitted changes" if commit.endswith("+") else "")
