"""What all pictures have in common: a figure of matplotlib, its title, plain axes, and a PNG file.

Only these functions load matplotlib. No backend is chosen: a `Figure` that is made without pyplot opens no
window.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runtimes.base.errors import needs
from runtimes.base.files import atomic_file, refuse_unwritable

GRID = "#e5e7eb"


def check_picture(path: Path, option: str) -> None:
    """Raises UserError, before anything is computed, if matplotlib is missing or `path` cannot become a PNG
    file.
    """
    new_figure(1, 1)
    refuse_unwritable(path, option=option, suffixes=(".png",))


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib, sizes in inches; raises MissingPackageError without matplotlib."""
    with needs("bench", "matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def set_title(figure: Any, text: str) -> None:
    """Writes the title of a figure; lines that are too long for its width are broken."""
    characters = int(11 * figure.get_figwidth())  # that fit into a line
    lines = (textwrap.fill(line, characters) for line in text.split("\n"))
    figure.suptitle("\n".join(lines), fontsize=11, parse_math=False)


def plain_axes(axes: Any, *, lines: str = "both", legend: bool = True) -> None:
    """Gives axes a pale grid and a legend without a frame, and removes the lines at the top and on the right.

    lines: the axis whose grid lines are drawn, `x`, `y` or `both`.
    """
    axes.grid(True, which="major", axis=lines, color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=9)


def save_figure(figure: Any, path: Path, *, dpi: int = 150) -> None:
    """Writes a figure to a PNG file, which is whole or absent. dpi: pixels for each inch."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)


def short_names(paths: Iterable[str]) -> list[str]:
    """The last parts of each path, as few as distinguish the paths; equal paths stay whole."""
    parts = [Path(path).parts for path in paths]
    names = []
    for own in parts:
        others = [other for other in parts if other != own]
        count = next(
            (n for n in range(1, len(own)) if all(own[-n:] != other[-n:] for other in others)), len(own)
        )
        names.append(str(Path(*own[-count:])) if own else ".")
    return names
