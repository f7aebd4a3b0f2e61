"""What the site needs beyond its pages: help texts, the examples, copied commands, the demo."""

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
from mkdocs.structure.files import File, InclusionLevel

TOP = Path(__file__).resolve().parent.parent
WIDTH = 78  # columns of a help text
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)#]+)(#[^)]*)?\)")
# Files of the repository that become pages of the site, below SOURCE, so that links to them work there.
SOURCE = "source"
PROGRAMS = {".py": "python", ".cpp": "cpp"}
DEMO_MARK = "<!-- the demo of this site -->"
DEMO = (TOP / "examples" / "stories" / "tales", TOP / "examples" / "music" / "chorales")
ABOUT = (
    "A small model has read 67 old books of tales, and writes its own; another one writes chorales for four "
    "voices. Memory and speed stay the same, however long they write."
)
OPENINGS = (
    "Once upon a time there was",
    "There was once a king who",
    "Long ago, in a little house by the sea, there lived",
    "A poor woodcutter had three sons.",
    "One day a fox met a",
    "In the middle of the forest stood",
)
REQUIRED = "SITE_NEEDS_DEMO"
CONSOLE = re.compile(r'<div class="language-console highlight">(?=(.*?)</div>)', re.DOTALL)
# How the search treats the pages of a folder: a guide comes before a table of measurements.
SEARCH = {
    "decisions": {"exclude": True},
    SOURCE: {"boost": 0.1},
    "results": {"boost": 0.3},
    "reference": {"boost": 0.5},
    "guides": {"boost": 1.5},
}
COMMANDS = re.compile(r"^<!-- commands: (?P<program>.+) (?P<module>\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any = (), **_: Any) -> str:
    """The page with its help texts, its link to the demo, and links to the pages of examples."""
    if folder := SEARCH.get(page.file.src_uri.split("/")[0]):
        page.meta["search"] = folder
    if (Path(config["site_dir"]) / "demo").is_dir():
        level = "../" * page.url.count("/")
        markdown = markdown.replace(DEMO_MARK, f'<a href="{level}demo/">Open the live demo.</a>')
    made = {file.src_uri for file in files}

    def linked(match: re.Match[str]) -> str:
        """The link, changed if it leaves docs/ or the page is one of an example: to a page, or to a name."""
        here = origin(page.file.src_uri)
        path = Path(os.path.normpath(here.parent / match[2]))
        if path.is_relative_to(TOP / "docs"):
            target = path.relative_to(TOP / "docs").as_posix()
            if here.is_relative_to(TOP / "docs"):
                return match[0]
        else:
            target = source_page(path)
            if target not in made:
                return f"`{path.relative_to(TOP).as_posix()}`"
        relative = os.path.relpath(target, Path(page.file.src_uri).parent)
        return f"[{match[1]}]({relative}{match[3] or ''})"

    def helped(match: re.Match[str]) -> str:
        sys.path.insert(0, str(TOP))
        group: click.Group = importlib.import_module(match["module"]).main
        return "\n\n".join(help_texts(group, match["program"]))

    return COMMANDS.sub(helped, LINK.sub(linked, markdown))


def source_page(path: Path) -> str:
    """Where the site has a file of the repository: a README is the page of its folder."""
    name = path.relative_to(TOP).as_posix()
    return f"{SOURCE}/{name}.md" if path.suffix in PROGRAMS else f"{SOURCE}/{name}"


def origin(uri: str) -> Path:
    """The file that a page was made of: the inverse of `source_page`."""
    folder, _, name = uri.partition("/")
    if folder != SOURCE:
        return TOP / "docs" / uri
    program = name.removesuffix(".md")
    return TOP / (program if Path(program).suffix in PROGRAMS else name)


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
    """Adds the pages of examples, and writes the page of the trained models, before pages link to them."""
    examples = [*(TOP / "examples").rglob("*"), *(TOP / "cpp" / "examples").glob("*.cpp")]
    for path in [TOP / "CONTRIBUTING.md", *sorted(examples)]:
        if path.suffix in (".md", ".png"):
            made = {"abs_src_path": str(path)}
        elif path.suffix in PROGRAMS:
            code = path.read_text(encoding="utf-8")
            made = {"content": f"# {path.name}\n\n````{PROGRAMS[path.suffix]}\n{code}````\n"}
        else:
            continue
        files.append(File.generated(config, source_page(path), inclusion=InclusionLevel.NOT_IN_NAV, **made))
    write_demo(config)


def write_demo(config: Any) -> None:
    """Writes the page of the trained models into the site.

    Without a network the site has no such page, and the build says so. It fails for every other error, and
    where the variable REQUIRED is set, as in the workflow of GitHub.
    """
    sys.path.insert(0, str(TOP))
    from xl_export.web.packages import UnreachableError
    from xl_export.web.site import write_site

    try:
        write_site(
            DEMO,
            Path(config["site_dir"]) / "demo",
            title="A storyteller with a memory of fixed size",
            about=ABOUT,
            openings=OPENINGS,
            manual="../",
            force=True,
        )
    except UnreachableError as error:
        if os.environ.get(REQUIRED):
            raise
        print(f"The site has no demo: {error}", file=sys.stderr)
