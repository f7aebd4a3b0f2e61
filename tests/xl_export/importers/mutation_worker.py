"""Damages checkpoint files in many ways and reads each: `python mutation_worker.py SCRATCH SEED`, one JSON
line each.

It runs as a process of its own, with bounds on its memory and processor time, so that what a file could do
to the reader is seen by the test that started it. An audit hook sees whatever would run, import or write
something.
"""

from __future__ import annotations

import io
import json
import pickletools
import resource
import sys
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from runtimes.base.errors import UserError
from tests.xl_export.importers.forge import zip_container
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.tensors import read_npz_tensors, read_safetensors

DATA = Path(__file__).parents[2] / "data"
ZIPS = (
    "kimiyoung-ptb-full-mask/model.pt",
    "nvidia-wt103-base/checkpoint_last.pt",
    "adaptive-span-enwik8/corpus.pt",
)
LEGACY = ("kimiyoung-ptb-full-mask/model_legacy.pt", "adaptive-span-persistent/checkpoint_legacy.pt")
BARE = ("hf-wt103/pretrained/vocab.pkl",)
MEMORY = 1 << 30  # more than what is taken before the first file
SECONDS = 120
EVENTS = (
    "import",
    "exec",
    "compile",
    "os.",
    "subprocess.",
    "socket.",
    "ctypes.",
    "shutil.",
    "pickle.find_class",
    "tempfile.",
)
OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
Mutants = Iterator[tuple[str, bytes]]


def byte_damage(data: bytes, other: bytes, rng: np.random.Generator, *, count: int, front: int) -> Mutants:
    """Flips, truncations and splices, two of three within the first `front` bytes."""
    for number in range(count):
        at = int(rng.integers(min(front, len(data)) if number % 3 else len(data)))
        kind = number % 5
        if kind in (0, 1):
            yield f"flip at {at}", data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :]
        elif kind == 2:
            yield f"truncated to {at}", data[:at]
        elif kind == 3:
            start, length = int(rng.integers(len(other))), int(rng.integers(1, 200))
            yield (
                f"spliced at {at}",
                data[:at] + other[start : start + length] + data[at + length * (number % 2) :],
            )
        else:
            yield f"numbers at {at}", data[:at] + rng.bytes(4) + data[at + 4 :]


def opcode_damage(pickle: bytes, rng: np.random.Generator, *, count: int) -> Mutants:
    """Opcodes replaced, dropped, repeated and exchanged, the rest as it was."""
    starts = [position for _, _, position in pickletools.genops(pickle)]
    spans = list(zip(starts, [*starts[1:], len(pickle)], strict=True))
    for number in range(count):
        first, second = sorted(rng.choice(len(spans), 2, replace=False))
        (a, b), (c, d) = spans[first], spans[second]
        kind = number % 4
        if kind == 0:
            yield (
                f"opcode at {a} replaced",
                pickle[:a] + OPCODES[rng.integers(len(OPCODES))] + pickle[a + 1 :],
            )
        elif kind == 1:
            yield f"opcode at {a} dropped", pickle[:a] + pickle[b:]
        elif kind == 2:
            yield f"opcode at {a} repeated", pickle[:b] + pickle[a:b] + pickle[b:]
        else:
            yield (
                f"opcodes at {a} and {c} exchanged",
                pickle[:a] + pickle[c:d] + pickle[b:c] + pickle[a:b] + pickle[d:],
            )


def unpacked(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The pickle and the storages of a zip container."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return members["data.pkl"], {
        name.removeprefix("data/"): members[name] for name in members if name.startswith("data/")
    }


def mutants(rng: np.random.Generator) -> Iterator[tuple[str, str, bytes]]:
    """Kind, description and content of every damaged file."""
    whole = {name: (DATA / name).read_bytes() for name in (*ZIPS, *LEGACY, *BARE)}
    for name, data in whole.items():
        yield "whole", name, data
    for name in ZIPS:
        for what, data in byte_damage(whole[name], whole[LEGACY[0]], rng, count=60, front=30_000):
            yield "zip", f"{name} {what}", data
        directory = whole[name].rindex(b"PK\1\2") - 5000  # the last part of the archive's directory
        for what, data in byte_damage(whole[name][directory:], whole[BARE[0]], rng, count=60, front=6000):
            yield "zip", f"{name} directory {what}", whole[name][:directory] + data
        pickle, storages = unpacked(whole[name])
        for what, data in byte_damage(pickle, whole[BARE[0]], rng, count=120, front=len(pickle)):
            yield "sealed zip", f"{name} {what}", zip_container(data, storages)
        for what, data in opcode_damage(pickle, rng, count=120):
            yield "sealed zip", f"{name} {what}", zip_container(data, storages)
    for name in LEGACY:
        for what, data in byte_damage(whole[name], whole[BARE[0]], rng, count=200, front=22_000):
            yield "legacy", f"{name} {what}", data
    for what, data in byte_damage(
        whole[BARE[0]], whole[LEGACY[0]], rng, count=150, front=len(whole[BARE[0]])
    ):
        yield "bare", what, data
    for what, data in opcode_damage(whole[BARE[0]], rng, count=150):
        yield "bare", what, data


def other_mutants(rng: np.random.Generator) -> Iterator[tuple[str, str, bytes]]:
    """The same for the two formats without pickles."""
    arrays = io.BytesIO()
    np.savez(arrays, a=np.arange(60.0).reshape(3, 20), b=np.ones(7, np.float32))
    for kind, data, front in (
        ("safetensors", (DATA / "hf-wt103/pretrained/model.safetensors").read_bytes(), 3000),
        ("npz", arrays.getvalue(), 700),
    ):
        yield "whole", kind, data
        for what, damaged in byte_damage(data, data, rng, count=120, front=front):
            yield kind, what, damaged


def outcome(path: Path) -> str:
    """How reading ends: read, refused (with one sentence), or a bug with its traceback."""
    reader = {"safetensors": read_safetensors, "npz": read_npz_tensors}.get(path.suffix[1:], read_pickle)
    try:
        reader(path)
    except UserError as error:
        message = str(error)
        one = message.endswith(".") and "\n" not in message and message.isprintable() and len(message) < 600
        return "refused" if one else f"bug: not one sentence: {message}"
    except BaseException:
        return "bug: " + traceback.format_exc()
    return "read"


def run(scratch: Path, rng: np.random.Generator) -> None:
    torch.set_num_threads(1)
    seen: list[str] = []
    for kind, what, data in (
        *other_mutants(rng),
        ("", "", zip_container(b"N.")),
    ):  # what is loaded when first used
        path = written(scratch, kind if kind != "whole" else what, data)
        outcome(path)
    b"a".decode("raw-unicode-escape")

    def hook(event: str, arguments: tuple) -> None:
        writes = (
            event == "open" and isinstance(arguments[1], str) and not set(arguments[1]).isdisjoint("wax+")
        )
        parses = event == "compile" and path.suffix == ".npz"  # NumPy, the literal that is an array's header
        if watching and (event.startswith(EVENTS) or writes) and not parses:
            seen.append(f"{event} {arguments!r:.100}")

    watching = False
    sys.addaudithook(hook)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    for kind, what, data in (*mutants(rng), *other_mutants(rng)):
        path = written(scratch, kind if kind != "whole" else what, data)
        print(json.dumps({"begin": f"{kind} {what}"}), flush=True)
        seen.clear()
        watching = True
        result = outcome(path)
        watching = False
        print(
            json.dumps({"kind": kind, "what": what, "outcome": f"bug: {seen}" if seen else result}),
            flush=True,
        )


def written(scratch: Path, kind: str, data: bytes) -> Path:
    path = scratch / ("file." + (kind if kind in ("safetensors", "npz") else "pt"))
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    run(Path(sys.argv[1]), np.random.default_rng(int(sys.argv[2])))
