"""Where the files of the page and of its module are: in a checkout, or in an installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

from runtimes.base.errors import UserError

PAGE = "page"
MODULE = "src"
INDEX = "index.html"
INSTALLED = Path(__file__).parent / "static"  # `setup.py` puts them here in a wheel
CHECKOUT = Path(__file__).parents[2] / "web"
SUFFIXES = (".js", ".mjs", ".css", ".svg", ".png")


def web_files() -> Path:
    """The folder that holds `page/` and `src/`; raises UserError if an installation lacks it."""
    for folder in (INSTALLED, CHECKOUT):
        if (folder / PAGE / INDEX).is_file() and (folder / MODULE).is_dir():
            return folder
    raise UserError(
        f"this installation of xl-export has no files of the page (looked for {INSTALLED / PAGE / INDEX}); "
        "install it again from a wheel, or use a checkout."
    )


def copy_page(folder: Path) -> None:
    """Copies the page and the module into a site: `index.html` on top, the others in `page/` and `src/`."""
    source = web_files()
    for part in (PAGE, MODULE):
        for path in sorted((source / part).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                target = folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    shutil.copyfile(source / PAGE / INDEX, folder / INDEX)
