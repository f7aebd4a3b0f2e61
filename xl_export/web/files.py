"""Where the files of the page and of its module are: in a checkout, or in an installed package."""

from __future__ import annotations

import html
import re
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


def introduced(
    document: str, *, title: str | None = None, about: str | None = None, address: str | None = None
) -> str:
    """`index.html` with another title and description, wherever it has them. None leaves them as they are.

    address: the URL of the page, for the picture of a link, which most services want with its whole URL.
    """
    for pattern, given in (("<title>(.*?)</title>", title), ('name="description" content="(.*?)"', about)):
        found = re.search(pattern, document, re.DOTALL)
        assert found is not None, pattern
        if given is not None:
            document = document.replace(found[1], html.escape(given))
    picture = 'property="og:image" content="'
    assert picture in document
    return document.replace(picture, f"{picture}{html.escape(address.rstrip('/'))}/") if address else document
