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

from benchmarks.cases.serving.wire import Answer, asked
from runtimes.base.errors import ArtefactError

ROOT = Path(__file__).parents[3]
ENDS_WITHIN = 20.0  # seconds from SIGTERM
PORT = re.compile(r"http://[^ ]*:(\d+)")
METRIC = re.compile(r'xl_export_(\w+)\{model_name="[^"]*"\} (\S+)')


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that answers."""

    port: int
    #: Of its process.
    pid: int

    def load(self, do: str, **job: Any) -> dict[str, Any]:
        """What the load process says of a job; raises ArtefactError where an answer was wrong."""
        document = json.dumps({"do": do, "port": self.port, "pid": self.pid, **job})
        command = [sys.executable, "-m", "benchmarks.cases.serving.load"]
        done = subprocess.run(command, cwd=ROOT, input=document, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ArtefactError(
                f"the load process failed ({done.stderr.strip()[-300:]}); please report this."
            )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "error" in answer:
            raise ArtefactError(f"the server is not measured: {answer['error']}")
        return answer

    def asked(self, method: str, path: str, body: Any = None) -> Answer:
        """The whole answer to one request."""
        return asked(self.port, method, path, body)

    def metrics(self) -> dict[str, float]:
        """The figures that have no label but the model, by their names."""
        lines = self.asked("GET", "/metrics").body.decode().splitlines()
        found = [METRIC.fullmatch(line) for line in lines]
        return {match[1]: float(match[2]) for match in found if match}


@contextlib.contextmanager
def serving(
    artefact: Path, *, threads: int, options: Sequence[object] = (), root: Path = ROOT
) -> Iterator[Served]:
    """While the block runs, `xl-export serve` serves the artefact.

    options: further ones of the command. root: of the checkout whose server it is.
    """
    command = [sys.executable, "-m", "xl_export", "serve", artefact, "--port", 0, "--threads", threads]
    with running([*map(str, command), "--quiet", *map(str, options)], root=root) as served:
        yield served


@contextlib.contextmanager
def running(command: list[str], *, root: Path = ROOT) -> Iterator[Served]:
    """While the block runs, the process of this command serves at the address that it prints. root: of the
    checkout whose code it runs.
    """
    environment = {**os.environ, "PYTHONPATH": str(root)}
    # What the process says about itself goes to a file, since nobody reads it while it serves.
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
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
                process.communicate(timeout=ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
