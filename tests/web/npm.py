"""The npm packages of `web/`, installed once for each lock file into a cache of the user."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).resolve().parents[2] / "web"
LOCK = "package-lock.json"
CACHE = Path.home() / ".cache" / "xl-export" / "npm"  # XDG_CACHE_HOME is another one in each test run
OLDEST_NODE = (20, 12)


@functools.cache
def node() -> str:
    """The program `node`; skips where there is none, or one that is too old."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("node is not installed, so nothing of web/ can be run")
    version = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if tuple(int(number) for number in version.removeprefix("v").split(".")[:2]) < OLDEST_NODE:
        pytest.skip(f"node is {version}, and web/ needs 20.12 or newer")
    return program


@functools.cache
def packages() -> Path:
    """The folder `node_modules` with what web/package-lock.json names, every hash verified by npm.

    Skips where npm is not installed and where the registry cannot be reached. Several test processes may ask
    at once: one installs, and the others wait for it.
    """
    program = shutil.which("npm")
    folder = CACHE / hashlib.sha256((WEB / LOCK).read_bytes()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").is_file():
            if program is None:
                pytest.skip("npm is not installed, so the packages of web/ cannot be had")
            for name in ("package.json", LOCK):
                shutil.copy(WEB / name, folder / name)
            command = [program, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
            if ended.returncode and "EINTEGRITY" not in ended.stderr:
                pytest.skip(f"npm could not install the packages of web/: {ended.stderr.strip()[:300]}")
            assert ended.returncode == 0, ended.stderr
            (folder / "complete").touch()
    return folder / "node_modules"


def copied_module(folder: Path) -> Path:
    """The npm package's files in a folder of their own, with its packages beside them."""
    folder.mkdir(parents=True)
    for name in ("src", "page", "test"):
        shutil.copytree(WEB / name, folder / name)
    for name in ("package.json", "index.d.ts", "tsconfig.json", "README.md"):
        shutil.copy(WEB / name, folder / name)
    (folder / "node_modules").symlink_to(packages())
    return folder


def run_node(*arguments: str | Path, cwd: Path, timeout: float = 300, **environment: str) -> str:
    """What a program in Node prints. It fails the test, with what was printed, if the program fails or does
    not end.
    """
    # Code that WebAssembly's second compiler makes pays only in programs that run for long.
    command = [node(), "--liftoff-only", *map(str, arguments)]
    environment = os.environ | environment
    try:
        ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, timeout=timeout)
        printed, errors, how = ended.stdout, ended.stderr, f"ended with {ended.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, errors, how = error.stdout or b"", error.stderr or b"", f"did not end in {timeout} s"
    assert how == "ended with 0", b"\n".join([how.encode(), printed[-6000:], errors[-3000:]]).decode(
        errors="replace"
    )
    return printed.decode()
