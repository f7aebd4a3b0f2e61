"""An ARM computer without an ARM computer: Debian's Python for arm64 under QEMU's user mode.

Everything lies in one folder: the system's packages in `system`, wheels for aarch64 in `site`, the wheel of
this package in `package`. Nothing needs root but Debian's own packages of QEMU and of the cross compiler.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.source_tree import copy_source

ROOT = Path(__file__).parents[2]
TOOLS = ("qemu-aarch64-static", "aarch64-linux-gnu-g++")
TOOL_PACKAGES = ("qemu-user-static", "g++-aarch64-linux-gnu")
WHEELS = ("numpy", "click", "flatbuffers", "protobuf", "packaging", "onnxruntime")  # what a device has
PLATFORMS = (
    "manylinux_2_28_aarch64",
    "manylinux_2_27_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
)
NEON = "fp asimd evtstrm crc32 cpuid"
DOT = f"{NEON} aes atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"


class Processor(NamedTuple):
    part: str
    features: str  # as /proc/cpuinfo lists them
    variant: str  # of the fused operator


# By QEMU's names: that of a Raspberry Pi 4, without half precision and dot products; a newer one, for which
# ONNX Runtime takes other products; and one with products of matrices, shown as a Neoverse V1.
PROCESSORS = {
    "cortex-a72": Processor("0xd08", NEON, "neon"),
    "neoverse-n1": Processor("0xd0c", DOT, "dotprod"),
    "max,sve=off,pauth=off": Processor("0xd40", f"{DOT} i8mm", "i8mm"),
}


class MissingError(Exception):
    """One sentence that says what the emulator lacks and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Emulator:
    folder: Path
    python: str  # as `python3.11`

    def run(self, *arguments: object, processor: str, cache: Path, out: Path) -> str:
        """Runs Python on an emulated processor, with its output in a file; returns what went wrong.

        No process that it starts would run.
        """
        # QEMU before version 8 shows programs the /proc/cpuinfo of the emulating machine. ONNX Runtime 1.29
        # and newer read it, find no ARM processor in it and end in a segmentation fault. QEMU looks for files
        # in this folder first.
        (self.folder / "system" / "proc").mkdir(exist_ok=True)
        (self.folder / "system" / "proc" / "cpuinfo").write_text(_cpuinfo(processor))
        variables = {
            "PYTHONHOME": self.folder / "system" / "usr",
            "PYTHONPATH": f"{self.folder / 'package'}:{self.folder / 'site'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": cache,
        }
        given = [word for name, value in variables.items() for word in ("-E", f"{name}={value}")]
        command = [TOOLS[0], "-cpu", processor, "-L", self.folder / "system", *given]
        program = self.folder / "system" / "usr" / "bin" / self.python
        words = [str(word) for word in (*command, program, *arguments)]
        with out.open("w") as file:
            ended = subprocess.run(words, stdout=file, stderr=subprocess.PIPE, text=True)
        return f"exit code {ended.returncode}: {ended.stderr[-2000:]}" if ended.returncode else ""


def prepare(folder: Path) -> Emulator:
    """The emulator in a folder, which is filled at first. Raises MissingError."""
    if platform.system() != "Linux" or shutil.which("apt-get") is None:
        raise MissingError("the ARM tests need Debian or Ubuntu on Linux, whose packages they run.")
    folder.mkdir(parents=True, exist_ok=True)
    if any(shutil.which(tool) is None for tool in TOOLS):
        _install_tools()
    python = _unpack_system(folder)
    _unpack_wheels(folder, python.removeprefix("python"))
    _build_package(folder)
    return Emulator(folder=folder, python=python)


def prepare_programs(folder: Path, processor: str) -> tuple[tuple[str, ...], Path]:
    """The command before a cross-compiled program, and ONNX Runtime's library that it is linked with.

    The libraries of the system are those of the cross compiler, so no Python is needed. Raises MissingError.
    """
    if any(shutil.which(tool) is None for tool in TOOLS):
        _install_tools()
    root, wheels, site = (folder / name for name in ("programs", "program-wheels", "program-site"))
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc" / "cpuinfo").write_text(_cpuinfo(processor))  # see `Emulator.run`
    if not (root / "lib").exists():
        (root / "lib").symlink_to("/usr/aarch64-linux-gnu/lib")
    if not any(site.glob("onnxruntime/capi/libonnxruntime.so.*")):
        _download(wheels, f"{sys.version_info.major}.{sys.version_info.minor}", "onnxruntime")
        for wheel in wheels.glob("*.whl"):
            shutil.unpack_archive(wheel, site, "zip")
        shutil.rmtree(wheels)
    (library,) = site.glob("onnxruntime/capi/libonnxruntime.so.*")
    return (TOOLS[0], "-cpu", processor, "-L", str(root), "-E", "LD_LIBRARY_PATH=/lib"), library


def _install_tools() -> None:
    commands = (
        ("dpkg", "--add-architecture", "arm64"),
        ("apt-get", "-q", "update"),
        ("apt-get", "-q", "install", "-y", "--no-install-recommends", *TOOL_PACKAGES),
    )
    if os.geteuid() != 0:
        asked = " && ".join(" ".join(command) for command in commands)
        raise MissingError(f"the ARM tests need {' and '.join(TOOLS)}; run as root: {asked}")
    for command in commands:
        _call(*command, why="Debian's packages of the emulator could not be installed; is there a network?")


def _unpack_system(folder: Path) -> str:
    """Unpacks Debian's Python for arm64 with all that it needs; returns its name."""
    system, packages = folder / "system", folder / "packages"
    if not (system / "complete").is_file():
        why = (
            "apt knows no packages for arm64, or there is no network; run as root: "
            "dpkg --add-architecture arm64 && apt-get update"
        )
        foreign = ("-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64")
        needed = _call("apt-cache", *foreign, "depends", "python3-minimal", why=why)
        found = re.search(r"python3\.\d+", needed)
        if found is None:
            raise MissingError(f"{why}.")
        wanted = (f"{found[0]}-minimal", f"lib{found[0]}-stdlib", "libstdc++6", "libgomp1")
        skipped = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces")]
        options = ("depends", "--recurse", *skipped, "--no-enhances", "--no-pre-depends")
        listed = _call("apt-cache", *foreign, *options, *wanted, why=why)
        names = sorted({line for line in listed.splitlines() if re.match(r"[a-z0-9]", line)})
        shutil.rmtree(packages, ignore_errors=True)
        packages.mkdir()
        _call("apt-get", *foreign, "-q", "download", *names, why=why, cwd=packages)
        for package in packages.glob("*.deb"):
            _call("dpkg", "-x", package, system, why=f"{package.name} could not be unpacked")
        shutil.rmtree(packages)
        (system / "complete").write_text(found[0])
    return (system / "complete").read_text()


def _unpack_wheels(folder: Path, version: str) -> None:
    """Unpacks the wheels of a device, in the versions that the suite is tested with."""
    site, wheels = folder / "site", folder / "wheels"
    if (site / "complete").is_file():
        return
    _download(wheels, version, *WHEELS)
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, site, "zip")
    shutil.rmtree(wheels)
    (site / "complete").touch()


def _download(wheels: Path, version: str, *names: str) -> None:
    """The wheels of some packages for aarch64 and a version of Python."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    command = ("pip", "download", "-q", "--no-deps", "--only-binary=:all:", *platforms)
    options = ("--python-version", version, "-c", ROOT / "constraints.txt", "-d", wheels)
    why = "the wheels for aarch64 could not be downloaded; is there a network?"
    _call(sys.executable, "-m", *command, *options, *names, why=why)


def _build_package(folder: Path) -> None:
    """Cross-builds the wheel of this package from a copy of the sources, and unpacks it."""
    for name in ("source", "built", "package"):
        shutil.rmtree(folder / name, ignore_errors=True)
    source = copy_source(folder / "source")
    environment = {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "CC": "aarch64-linux-gnu-gcc",
        "CXX": TOOLS[1],
        "XL_EXPORT_FUSED_KERNEL": "required",
    }
    command = ("-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "built", source)
    _call(sys.executable, *command, why="the wheel could not be cross-built", **environment)
    (wheel,) = (folder / "built").glob("*-py3-none-linux_aarch64.whl")
    shutil.unpack_archive(wheel, folder / "package", "zip")


def _call(*command: object, why: str, cwd: Path | None = None, **environment: str) -> str:
    """What a program printed. Raises MissingError with `why` and its last line where it fails."""
    words = [str(word) for word in command]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment})
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise MissingError(f"{why} ({words[0]}: {lines[-1]:.300}).")
    return ended.stdout


def _cpuinfo(processor: str) -> str:
    """/proc/cpuinfo of two such processors."""
    lines = (
        "BogoMIPS\t: 108.00",
        f"Features\t: {PROCESSORS[processor].features}",
        "CPU implementer\t: 0x41",
        "CPU architecture: 8",
        "CPU variant\t: 0x3",
        f"CPU part\t: {PROCESSORS[processor].part}",
        "CPU revision\t: 1",
    )
    return "".join(f"processor\t: {number}\n" + "\n".join(lines) + "\n\n" for number in range(2))
