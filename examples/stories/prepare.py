"""Downloads the books of `sources.json`, verifies them, and writes their stories as three parts.

    python examples/stories/prepare.py --out stories [--from FOLDER]

stories/train.jsonl, valid.jsonl and test.jsonl have a story or a chapter on each line. The .txt files hold
the same stories with a blank line between them. Books that are in the folder of --from are not downloaded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import click
from clean import Story, stories

from runtimes.base.errors import UserError
from runtimes.base.files import atomic_file
from runtimes.cli.group import Refusal
from trainer.data.corpora import Fingerprint
from trainer.data.download import download

PARTS = ("train", "valid", "test")
SOURCES = Path(__file__).with_name("sources.json")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A book, the part of the text that it belongs to, and the lines between which its stories stand."""

    url: str
    sha256: str
    num_bytes: int
    part: str
    begin: str = ""
    end: str = ""

    @property
    def name(self) -> str:
        """The name of the file, such as 503-0.txt."""
        return self.url.rpartition("/")[2]


def sources() -> list[Source]:
    """The books of this example."""
    return [Source(**entry) for entry in json.loads(SOURCES.read_text("utf-8"))]


def read_book(source: Source, folder: Path) -> str:
    """The text of a verified book, which is downloaded if the folder does not hold it."""
    path = folder / source.name
    if not path.exists():
        download([source.url], path, Fingerprint(sha256=source.sha256, num_bytes=source.num_bytes))
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != source.sha256:
        raise UserError(
            f"{path} has the SHA-256 {found[:12]}…, and the recipe was made with {source.sha256[:12]}…; "
            "delete it, and it is downloaded again."
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252")


def write_parts(found: dict[str, list[Story]], out: Path) -> None:
    """Writes the stories of each part, as lines of JSON and as one text."""
    out.mkdir(parents=True, exist_ok=True)
    for part, of_part in found.items():
        with atomic_file(out / f"{part}.jsonl") as temporary:
            temporary.write_text(
                "".join(json.dumps({"text": story.text}) + "\n" for story in of_part), "utf-8"
            )
        with atomic_file(out / f"{part}.txt") as temporary:
            temporary.write_text("".join(story.text + "\n\n" for story in of_part), "utf-8")


@click.command()
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="The folder that the parts are written to."
)
@click.option(
    "--from", "books", type=click.Path(path_type=Path), help="The folder of the books; OUT/books by default."
)
def main(out: Path, books: Path | None) -> None:
    """Write stories/train.jsonl, valid.jsonl and test.jsonl."""
    books = books or out / "books"
    books.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Story]] = {part: [] for part in PARTS}
    for source in sources():
        try:
            book = read_book(source, books)
        except UserError as error:
            raise Refusal(str(error)) from None
        found[source.part] += stories(book, begin=source.begin, end=source.end)
    write_parts(found, out)
    for part, of_part in found.items():
        click.echo(
            f"{part}: {len(of_part):,} stories and chapters, {sum(len(s.text) + 2 for s in of_part):,} bytes"
        )


if __name__ == "__main__":
    main()
