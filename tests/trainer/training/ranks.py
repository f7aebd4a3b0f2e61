"""Processes of one run without torchrun: forks of a server that has imported PyTorch once for all tests."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["trainer.training.loop", "xl_export.cli.main"]


class Ended(NamedTuple):
    code: int | None
    output: str
    errors: str


def in_ranks(folder: Path, commands: list[list[object]], *, script: Path | None = None) -> list[Ended]:
    """How the commands end, each as one of the ranks of a run; they are `xl-export`'s, or a script's.

    folder: for their output.
    """
    CONTEXT.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared["WORLD_SIZE"] = str(len(commands))
    processes = []
    for rank, command in enumerate(commands):
        words, own = [str(word) for word in command], {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        given = (words, shared | own, folder / f"rank{rank}", script)
        processes.append(CONTEXT.Process(target=_run, args=given))
        processes[-1].start()
    ended = []
    for rank, process in enumerate(processes):
        process.join(280)
        texts = [(folder / f"rank{rank}{suffix}").read_text() for suffix in (".out", ".err")]
        ended.append(Ended(process.exitcode, *texts))
    return ended


def _run(words: list[str], environment: dict[str, str], output: Path, script: Path | None) -> None:
    os.environ.update(environment)
    for stream, suffix in ((sys.stdout, ".out"), (sys.stderr, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream.fileno())
    sys.argv = ["xl-export", *words]
    if script is not None:
        runpy.run_path(str(script))
        return
    from xl_export.cli.main import main

    main()
