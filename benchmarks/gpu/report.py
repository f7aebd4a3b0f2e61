"""`python -m benchmarks gpu-report`: the tests and benchmarks for a GPU, as one archive to send.

Each part is a process with a limit. A part that fails, crashes or hangs is a result, and the next one starts.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import click

from benchmarks.gpu.private import Scrubber, scrubber
from benchmarks.machine import commit, machine_facts, versions
from runtimes.base.files import atomic_file, writing
from runtimes.base.folders import refuse_existing
from runtimes.base.kinds import GPU_REPORT
from runtimes.base.ranges import Range
from runtimes.cli.options import Number
from runtimes.sessions.ort_gpu.driver import ask_driver

ROOT = Path(__file__).parents[2]
MINUTES = Range(0, 1e6, exclusive=True)
REPORT = "report.md"
LOGS = "logs"
RESULTS = "results.jsonl"
ARCHIVE = "report.tar.gz"
PACKAGES = ("onnxruntime", "triton", "cuda", "tensorrt", "nvidia")  # how their names begin
# Sections without serial numbers and without other people's processes.
SECTIONS = "MEMORY,UTILIZATION,ECC,TEMPERATURE,POWER,CLOCK,COMPUTE,PERFORMANCE"
SMI = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
# The project's settings make each warning an error, and name plugins that only developers install.
PYTEST = (
    *("-o", "addopts=--import-mode=importlib", "-W", "default", "-m", "gpu", "-v", "-ra", "--tb=short"),
    *("--continue-on-collection-errors", "-p", "no:cacheprovider"),
)
TEST_SILENCE_SECONDS = 300.0  # a test that prints no line for longer hangs
EXIT_CODES = range(6)  # of pytest that ended by itself
LAST_LINES = 80  # of a log
HEAD_BYTES = 20_000
TAIL_BYTES = 200_000


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process of the report."""

    name: str
    command: tuple[str, ...]
    minutes: float
    silent: float | None = None  # seconds without a line after which it is stopped


def _python(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *words)


def _benchmark(case: str, *words: str) -> tuple[str, ...]:
    return _python("benchmarks", "run", case, *words, "--history", RESULTS)


def _sides(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--only", name))


LARGE = _sides("tensorrt-native-ring-fp16", "tensorrt-plugin-ring-fp16", "pytorch-*")
# What needs little and says most comes first. The limits of the last parts are what is left of an hour.
PARTS = (
    Part(name="machine", command=_python("benchmarks.gpu.report"), minutes=2),
    Part(name="nvidia-smi", command=("nvidia-smi", SMI, "--format=csv"), minutes=1),
    Part(name="nvidia-smi-details", command=("nvidia-smi", "-q", "-d", SECTIONS), minutes=1),
    Part(name="devices", command=_python("xl_export", "devices"), minutes=2),
    Part(name="try", command=_python("xl_export", "devices", "--try"), minutes=5),
    Part(
        name="tests",
        command=_python("pytest", "tests/gpu", *PYTEST),
        minutes=25,
        silent=TEST_SILENCE_SECONDS,
    ),
    Part(name="small", command=_benchmark("gpu"), minutes=20),
    Part(
        name="enwik8-base",
        command=_benchmark(
            "gpu",
            *("--config", "enwik8-base"),
            *LARGE,
            *_sides("tensorrt-onnx-attention", "tensorrt-plugin-shift-fp16", "tensorrt-native-ring-int8"),
            *_sides(
                "rtx-native-ring-fp16", "cuda-ring-fp32", "cuda-ring-fp16-memory-fp16-node", "training-*"
            ),
        ),
        minutes=20,
    ),
    Part(
        name="wt103-base",
        command=_benchmark("gpu", "--config", "wt103-base", *LARGE, *_sides("cuda-ring-fp32")),
        minutes=15,
    ),
    Part(
        name="enwik8-large",
        command=_benchmark("gpu", "--config", "enwik8-large", *LARGE, *_sides("cuda-ring-fp16")),
        minutes=15,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a part ended."""

    name: str
    how: str
    seconds: float = 0.0


@click.command("gpu-report")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The folder of the report to write."
)
@click.option(
    "--minutes",
    type=Number(MINUTES),
    default=60.0,
    show_default=True,
    help="Limit of all parts together.",
)
@click.option("--force", is_flag=True, help="Replace the report in --out.")
def gpu_report_command(out: Path, minutes: float, force: bool) -> None:
    """Run the tests and benchmarks for an NVIDIA GPU, and pack one archive to send.

    Models have random weights in the published sizes; nothing is downloaded.
    """
    gpu_report(out, minutes=minutes, force=force, say=lambda line: click.echo(line, err=True))


def gpu_report(
    out: Path,
    parts: Sequence[Part] | None = None,
    *,
    minutes: float = 60.0,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[Ended]:
    """How each part ended; the report is in `out`. After Ctrl-C it holds the parts until then.

    Logs are scrubbed before they are written to `out`. Raises UserError if `out` exists, unless it is a
    report and `force` is given.
    """
    parts = PARTS if parts is None else parts
    refuse_existing(out, GPU_REPORT, force=force)
    with writing(out):
        shutil.rmtree(out / LOGS, ignore_errors=True)
        (out / LOGS).mkdir(parents=True)
    for name in (RESULTS, ARCHIVE):
        (out / name).unlink(missing_ok=True)
    if fault := ask_driver().fault:
        say(f"note: no NVIDIA GPU can be used here, because {fault}; tests and benchmarks will be skipped")
    scrub = scrubber({Path.cwd(): "<here>", ROOT: "<project>", out.resolve(): "<report>"})
    ended: list[Ended] = []
    deadline = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _keep(out, work, ended, scrub)  # from here on --force knows the folder as a report
        try:
            for part in parts:
                say(f"{part.name}: at most {part.minutes:g} minutes")
                ended.append(_ended(part, work, deadline))
                _keep(out, work, ended, scrub)
                say(f"{part.name}: {ended[-1].how}, {ended[-1].seconds:.0f} s")
        except KeyboardInterrupt:
            ended.append(Ended(name=part.name, how="interrupted"))
            raise
        finally:
            _keep(out, work, ended, scrub)
            _pack(out)
    say(f"{out / ARCHIVE} is ready; look through it and attach it to an issue of the project")
    return ended


def _ended(part: Part, work: Path, deadline: float) -> Ended:
    """Runs a part to its end. After a test that crashes or hangs, the next ones run."""
    began = time.monotonic()
    log = work / f"{part.name}.txt"
    end = min(deadline, began + 60 * part.minutes)
    if end - began < 1:
        return Ended(name=part.name, how="not run: no time was left; give a larger --minutes")
    broken = []
    seen = set[str]()
    while True:
        skipped = [f"--deselect={name}" for name in sorted(seen)]
        code, how = _run([*part.command, *skipped], work, log, end=end, silent=part.silent)
        names = re.findall(r"^(\S+::\S+)", log.read_text("utf-8", "replace"), re.MULTILINE)
        stopped = code not in EXIT_CODES and "pytest" in part.command and names and names[-1] not in seen
        if stopped:
            broken.append(f"{how} in {names[-1]}")
        if not stopped or time.monotonic() >= end:
            break
        seen |= set(names)
    return Ended(
        name=part.name, how="; ".join(dict.fromkeys([*broken, how])), seconds=time.monotonic() - began
    )


def _run(
    command: Sequence[str], work: Path, log: Path, *, end: float, silent: float | None
) -> tuple[int | None, str]:
    """The exit code of a process, None if it was stopped, and the same in words.

    Its output goes to the log, its files to `work`.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(work),
    }
    with log.open("ab") as stream:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=ROOT if "pytest" in command else work,  # pytest names tests as seen from here
                env=environment,
                start_new_session=True,  # so that all that it starts ends with it
            )
        except FileNotFoundError:
            return None, f"{command[0]} is not installed"
        size = -1
        changed = time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.1)
                now = time.monotonic()
                written = log.stat().st_size
                size, changed = (written, now) if written != size else (size, changed)
                if now >= end:
                    return None, "stopped at its limit"
                if silent is not None and now - changed >= silent:
                    return None, f"stopped after {silent:g} seconds without output"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    code = process.returncode
    return code, f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


def _keep(out: Path, work: Path, ended: Sequence[Ended], scrub: Scrubber) -> None:
    """Writes logs, results and the page without private data."""
    texts = {part.name: scrub(_excerpt(work / f"{part.name}.txt")) for part in ended}
    for name, text in texts.items():
        _write(out / LOGS / f"{name}.txt", text)
    if (work / RESULTS).is_file():
        lines = [scrub.clean(json.loads(line)) for line in (work / RESULTS).read_text("utf-8").splitlines()]
        _write(out / RESULTS, "".join(json.dumps(line) + "\n" for line in lines))
    page = [
        "# GPU report",
        f"Attach `{ARCHIVE}` to an issue of the project. User and host names, folders, serial numbers and "
        "values of environment variables were removed; please look through it before you send it.",
        "\n".join(
            ["| part | ended | seconds | last line |", "|---|---|---|---|"]
            + [
                f"| {part.name} | {_cell(scrub(part.how))} | {part.seconds:.0f} | {_cell(texts[part.name])} |"
                for part in ended
            ]
        ),
    ]
    for name, text in texts.items():
        lines = [line.replace("```", "'''") for line in text.splitlines()]
        page.append("\n".join([f"## {name}", "```text", *lines[-LAST_LINES:], "```"]))
    _write(out / REPORT, "\n\n".join(page) + "\n")


def _cell(text: str) -> str:
    """The last line of a text, for a table."""
    lines = text.splitlines()
    return lines[-1].strip("= ").replace("|", "/") if lines else ""


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _excerpt(path: Path) -> str:
    """A log without its middle if it is long."""
    content = path.read_bytes() if path.is_file() else b""
    if len(content) > HEAD_BYTES + TAIL_BYTES:
        content = content[:HEAD_BYTES] + b"\n... the middle is left out ...\n" + content[-TAIL_BYTES:]
    return content.decode("utf-8", "replace")


def _pack(out: Path) -> None:
    """Writes the archive, in which files have no owner."""
    files = [path for path in (out / REPORT, out / RESULTS) if path.is_file()]
    with (
        atomic_file(out / ARCHIVE) as temporary,
        temporary.open("wb") as stream,
        gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for file in (*files, *sorted((out / LOGS).glob("*.txt"))):
            content = file.read_bytes()
            member = tarfile.TarInfo(f"gpu-report/{file.relative_to(out)}")
            member.size = len(content)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(content))


def print_machine() -> None:
    """Prints what the numbers depend on."""
    driver = ask_driver()
    print(f"NVIDIA driver: {driver.version}, {driver.fault or ''}", *driver.gpus, sep="\n")
    facts = {
        **machine_facts(),
        "commit": commit(),
        "kernel": platform.release().partition("-")[0],
        **versions(),
    }
    for package in distributions():
        if (package.name or "").startswith(PACKAGES):  # pip leaves folders without a name behind
            facts[package.name] = package.version
    for name, value in facts.items():
        print(f"{name}: {value}")
    with contextlib.suppress(ImportError):
        import torch

        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        print(f"PyTorch for CUDA {torch.version.cuda}, {seen} GPUs seen")


if __name__ == "__main__":
    print_machine()
