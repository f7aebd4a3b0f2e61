"""What the site needs beyond its pages: help texts, links into the repository, copied commands, the demo."""

from __future__ import annotations

import html
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

TOP = Path(__file__).resolve().parent.parent
WIDTH = 78  # columns of a help text
LINK = re.compile(
    r"\[([^\]]+)\]\(((?:\.\./)+(?:examples|tests|runtimes|trainer|xl_export|benchmarks|[A-Z]+\.md)[^)]*)\)"
)
DEMO_MARK = "<!-- the demo of this site -->"
DEMO = (TOP / "examples" / "stories" / "tales", TOP / "examples" / "music" / "chorales")
REQUIRED = "SITE_NEEDS_DEMO"
CONSOLE = re.compile(r'<div class="language-console highlight">(?=(.*?)</div>)', re.DOTALL)
# How the search treats the pages of a folder: a guide comes before a table of measurements.
SEARCH = {"decisions": {"exclude": True}, "results": {"boost": 0.3}, "guides": {"boost": 1.5}}
COMMANDS = re.compile(r"^<!-- commands: (?P<program>.+) (?P<module>\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with its help texts and link to the demo; links out of docs/ become names of files."""
    if folder := SEARCH.get(page.file.src_uri.split("/")[0]):
        page.meta["search"] = folder
    if (Path(config["site_dir"]) / "demo").is_dir():
        level = "../" * page.url.count("/")
        markdown = markdown.replace(DEMO_MARK, f'<a href="{level}demo/">Open the live demo.</a>')

    def named(match: re.Match[str]) -> str:
        path = (TOP / "docs" / Path(page.file.src_uri).parent / match[2]).resolve()
        return f"`{path.relative_to(TOP).as_posix()}`"

    def helped(match: re.Match[str]) -> str:
        sys.path.insert(0, str(TOP))
        group: click.Group = importlib.import_module(match["module"]).main
        return "\n\n".join(help_texts(group, match["program"]))

    return COMMANDS.sub(helped, LINK.sub(named, markdown))


def on_page_content(content: str, **_: Any) -> str:
    """The page whose copy buttons copy commands, without prompts and output."""

    def with_commands(match: re.Match[str]) -> str:
        lines = html.unescape(re.sub(r"<[^>]+>", "", match[1])).splitlines()
        commands = "\n".join(line[2:] for line in lines if line.startswith(("$ ", "> ")))
        return f'<div class="language-console highlight" data-copy="{html.escape(commands)}">'

    return CONSOLE.sub(with_commands, content)


def on_post_page(output: str, **_: Any) -> str:
    """The page whose search has a name for screen readers, which the theme leaves out."""
    return output.replace(
        'data-md-component="search" role="dialog"',
        'data-md-component="search" role="dialog" aria-label="Search"',
    )


def help_texts(group: click.Group, program: str) -> Iterator[str]:
    """A section for a group, and one for each of its commands that the help shows."""
    settings = {**group.context_settings, "terminal_width": WIDTH}
    context = click.Context(group, info_name=program, **settings)
    yield f"## {program}\n\n```text\n{group.get_help(context)}\n```"
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            inner = click.Context(command, parent=context, info_name=name, **settings)
            yield f"### {program} {name}\n\n```text\n{command.get_help(inner)}\n```"


def on_files(files: Any, *, config: Any, **_: Any) -> None:
    """Writes the page of the trained models into the site, before any page is made that may lead to it.

    Without a network the site has no such page, and the build says so. It fails for every other error, and
    where the variable REQUIRED is set, as in the workflow of GitHub.
    """
    sys.path.insert(0, str(TOP))
    from xl_export.web.packages import UnreachableError
    from xl_export.web.site import write_site

    try:
        write_site(DEMO, Path(config["site_dir"]) / "demo", about="../", force=True)
    except UnreachableError as error:
        if os.environ.get(REQUIRED):
            raise
        print(f"The site has no demo: {error}", file=sys.stderr)
