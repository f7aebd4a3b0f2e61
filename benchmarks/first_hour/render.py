"""Headings, paragraphs, tables and printed lines as Markdown and as one HTML file without scripts."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.first_hour.results import BAD

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }
th, td { border: 1px solid #9995; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: break-word; }
pre { background: #8882; padding: 0.6rem; overflow-x: auto; font-size: 0.8rem; }
.passed { color: #1a7f37; } .slower { color: #9a6700; } .failed { color: #cf222e; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
"""


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Printed:
    """Lines that a program has printed, under a summary."""

    summary: str
    lines: Sequence[str]


Block = Heading | Paragraph | Table | Printed


def to_markdown(blocks: Sequence[Block]) -> str:
    """The blocks as GitHub's Markdown."""
    return "\n\n".join(map(_markdown, blocks)) + "\n"


def to_html(blocks: Sequence[Block]) -> str:
    """The blocks as one HTML page, which asks no server for anything."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    body = "\n".join(map(_html, blocks))
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n{body}\n</html>\n"
    )


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Printed):
        lines = [re.sub("`{3,}", "'''", line) for line in block.lines]
        return "\n".join([f"**{block.summary}**", "", "```text", *lines, "```"])
    rows = [block.head, ["---"] * len(block.head), *block.rows]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Printed):
        lines = html.escape("\n".join(block.lines))
        return f"<details open><summary>{html.escape(block.summary)}</summary><pre>{lines}</pre></details>"
    head = "".join(f"<th>{html.escape(text)}</th>" for text in block.head)
    rows = "\n".join("<tr>" + "".join(map(_html_cell, row)) + "</tr>" for row in block.rows)
    return f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"


def _html_cell(text: str) -> str:
    kind = "failed" if text in BAD else text if text in ("passed", "slower") else ""
    return f'<td class="{kind}">{html.escape(text)}</td>' if kind else f"<td>{html.escape(text)}</td>"


def _inline(text: str) -> str:
    """A paragraph with `code` and **strong** words."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
