"""What the site needs beyond its pages: links to files of the repository lead to the repository itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
LINK = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)+(?:examples|tests|runtimes|trainer|xl_export|benchmarks|[A-Z]+\.md)[^)]*)\)"
)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links out of docs/ become names of files: the site holds the pages alone."""

    def named(match: re.Match[str]) -> str:
        path = (TOP / "docs" / Path(page.file.src_uri).parent / match[2]).resolve()
        return f"`{path.relative_to(TOP).as_posix()}`"

    return LINK.sub(named, markdown)
