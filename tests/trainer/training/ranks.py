"""Processes that train, as forks of a server that has imported PyTorch once for all tests of a file."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trainer.training.loop", "xl_export.cli.train"])


class Ended(NamedTuple):
    code: int | None
    output: str
    errors: str


def started(
    output: Path, *words: object, environment: dict[str, str] | None = None, script: Path | None = None
) -> ForkServerProcess:
    """A process that runs this command of `xl-export`, or a script; output: for its .out and .err."""
    arguments = (output, [str(word) for word in words], environment or {}, script)
    process = CONTEXT.Process(target=_run, args=arguments)
    process.start()
    return process


def in_ranks(folder: Path, words: list[object], *, script: Path | None = None) -> list[Ended]:
    """How a command ends in both processes of a run, without torchrun; folder: for their output."""
    outputs = [folder / f"rank{rank}" for rank in "01"]
    # Bound and not listening, the port is kept for the first process and from all others.
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.getsockname()[1]), "WORLD_SIZE": "2"}
        processes = [
            started(output, *words, environment=shared | {"RANK": rank, "LOCAL_RANK": rank}, script=script)
            for rank, output in zip("01", outputs, strict=True)
        ]
        for process in processes:
            process.join(280)
    return [
        Ended(process.exitcode, *(output.with_suffix(end).read_text() for end in (".out", ".err")))
        for process, output in zip(processes, outputs, strict=True)
    ]


def _run(output: Path, words: list[str], environment: dict[str, str], script: Path | None) -> None:
    os.environ.update(environment)
    for stream, suffix in ((sys.stdout, ".out"), (sys.stderr, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream.fileno())
    sys.argv = ["xl-export", *words]
    if script is not None:
        runpy.run_path(str(script))
        return
    from xl_export.cli.main import main

    main()
