"""NVIDIA's own tool builds the plan that the project builds, and times the project's plan."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

from benchmarks.first_hour.record import NotHereError, Record
from benchmarks.first_hour.steps.engines import keep_build, options_of
from benchmarks.first_hour.steps.models import Kind, artefact_of, config_of
from runtimes.contract.engine import NAMES, PLAN, Flavour
from runtimes.sessions.tensorrt.device_memory import Cuda
from xl_export.tensorrt.build import build
from xl_export.tensorrt.trtexec import LINE, TOOLS

KIND = Kind(target="tensorrt", form="ring", precision="fp16")
TIME = re.compile(r"GPU Compute Time: (.*median = .*)")


def run(record: Record, *, flavour: Flavour) -> None:
    """Runs the lines of `trtexec.txt`: the first builds a plan, and the others time that of the project."""
    tool, name = TOOLS[flavour], NAMES[flavour]
    if shutil.which(tool) is None:
        raise NotHereError(
            f"{tool} is not on the PATH; NVIDIA's archives and containers of {name} have it, and what pip "
            "installs has not."
        )
    artefact = artefact_of(record, config_of("small", quick=record.quick), KIND)
    out = artefact.with_name(f"engine-for-{tool}")
    elsewhere = out.with_name(f"{out.name}-built")  # the first line writes a plan where it is run
    for folder in (out, elsewhere):
        shutil.rmtree(folder, ignore_errors=True)
    facts = build(artefact, out, options_of(flavour, "native", Cuda().gpu.compute_capability))
    keep_build(record, tool, facts)
    elsewhere.mkdir()
    building, *timing = (out / LINE).read_text("utf-8").splitlines()
    with record.attempt(f"{tool} builds"):
        _run_line(record, f"{tool} builds", building, elsewhere)
        made = (elsewhere / PLAN).stat().st_size if (elsewhere / PLAN).is_file() else 0
        own = facts.files[PLAN].num_bytes
        said = f"{made / 2**20:.1f} MiB, and the plan of the project has {own / 2**20:.1f} MiB"
        record.check(f"{tool} builds: the plan", made > 0, said)
    for profile, line in zip(facts.profiles, timing, strict=True):
        label = f"{tool} times the profile {profile.name}"
        with record.attempt(label):
            printed = _run_line(record, label, line, out)
            found = TIME.findall(printed)
            record.fact(label, found[-1] if found else "it prints no GPU Compute Time")


def _run_line(record: Record, name: str, line: str, folder: Path) -> str:
    """What the tool prints when it is run with a line in a folder; keeps whether it ended well."""
    ended = subprocess.run(
        shlex.split(line),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    print(ended.stdout, flush=True)
    errors = [each for each in ended.stdout.splitlines() if "[E]" in each]
    said = f"exit code {ended.returncode}" + (f": {errors[0]:.300}" if errors else "")
    record.check(name, ended.returncode == 0, said)
    return ended.stdout
