"""The project's own files, copied for a test that builds or installs them."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
MADE_AT_THE_TOP = {
    "artefact",
    "build",
    "demo",
    "dist",
    "run",
    "shared",
}  # by commands of the README, and by us


def copy_source(to: Path) -> Path:
    """Copy the project to a new folder, without what builds, tests and commands leave in a checkout."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        made = {
            name for name in names if name in ("__pycache__", "node_modules") or name.endswith(".egg-info")
        }
        if Path(folder) == ROOT:
            made |= {name for name in names if name.startswith(".") or name in MADE_AT_THE_TOP}
        return made

    return shutil.copytree(ROOT, to, ignore=ignored)
