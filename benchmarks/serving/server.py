"""The server in a process of its own, and the process that puts load on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError

ROOT = Path(__file__).parents[2]
END_SECONDS = 20.0  # from SIGTERM until it is killed
PORT = re.compile(r"http://[^ ]*:(\d+)")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that answers."""

    port: int
    pid: int  # process id

    def load(self, **job: Any) -> dict[str, Any]:
        """The answer of the load process to a job; raises ArtefactError if the server has failed."""
        document = json.dumps({"port": self.port, "pid": self.pid, **job})
        command = [sys.executable, "-m", "benchmarks.serving.load"]
        done = subprocess.run(command, cwd=ROOT, input=document, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ArtefactError(
                f"the load process failed ({done.stderr.strip()[-300:]}); please report this."
            )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "error" in answer:
            raise ArtefactError(f"the server is not measured: {answer['error']}.")
        return answer


def serving(
    artefact: Path, *, threads: int, options: Sequence[object] = ()
) -> contextlib.AbstractContextManager[Served]:
    """While the block runs, `xl-export serve` serves the artefact. options: further ones of the command."""
    command = [sys.executable, "-m", "xl_export", "serve", artefact, "--port", 0, "--threads", threads]
    return running([*map(str, command), "--quiet", *map(str, options)])


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[Served]:
    """While the block runs, the process of this command serves at the address that it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            match = None
            while match is None and (line := process.stdout.readline()):
                match = PORT.search(line)
            if match is None:
                process.wait()
                errors.seek(0)
                lines = errors.read().strip().splitlines()
                reason = lines[-1] if lines else process.returncode
                raise ArtefactError(f"the server did not start ({reason}).")
            yield Served(port=int(match[1]), pid=process.pid)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
