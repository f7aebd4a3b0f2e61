"""The stories of the example: what is cut out of a book, and which books may be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runtimes
from runtimes.base.errors import UserError
from tests.examples.conftest import load_example

clean, prepare = load_example("stories", "clean"), load_example("stories", "prepare")

TALES = Path(__file__).parents[2] / "examples" / "stories" / "tales"
MAX_BYTES = 5_500_000  # the repository keeps it, so it is small
BOOK = """The Project Gutenberg EBook of Two Stories

*** START OF THIS PROJECT GUTENBERG EBOOK TWO STORIES ***

Produced by Somebody


PREFACE

These stories come from far away, and a preface is no story. Nobody who learns to tell one needs it.


CONTENTS

  The Fox
  The Well


THE FOX AND THE
GEESE

ONCE there was a fox,{1} who said: ‘Come, come here, and
listen to the wolves’ song.’[Illustration: a fox]

“We shan't,” said a goose.

‘I’ll not come,’ said another; ‘it isn’t safe.’

   Run, run, run,
   As fast as you can.

FILLER

II

So the geese stayed on their side of the water -- and were _very_ glad (2) of it.

NOTE

Collected by a professor, who has written much about geese and about what foxes say to them.


THE WELL

'Where is it?' asked the old cafe-keeper of Å. 'Down there,' he said, 'where it was.'

FILLER

*** END OF THIS PROJECT GUTENBERG EBOOK TWO STORIES ***

End of the licence.
"""


def test_the_artefact_of_tales_passes_its_check_and_is_small() -> None:
    report = runtimes.check(TALES, threads=1)
    assert report.passed, report.sentence
    assert sum(path.stat().st_size for path in TALES.iterdir()) <= MAX_BYTES


def test_stories_of_a_book_are_its_prose_in_one_style():
    filler = "\n\n".join(
        f"Then came day {word}, and they sat by the fire and told one another tales." * 2 for word in "abcdef"
    )
    found = clean.stories(BOOK.replace("FILLER", filler))
    assert [story.title for story in found] == ["The Fox and the Geese", "The Well"]
    first, second = ([p for p in story.paragraphs if "told one another" not in p] for story in found)
    assert first == [
        'Once there was a fox, who said: "Come, come here, and listen to the wolves\' song."',
        '"We shan\'t," said a goose.',
        '"I\'ll not come," said another; "it isn\'t safe."',
        "So the geese stayed on their side of the water -- and were very glad of it.",
    ]
    assert second == ['"Where is it?" asked the old cafe-keeper of A. "Down there," he said, "where it was."']
    assert found[0].text.startswith("The Fox and the Geese\nOnce there was")


def test_another_book_is_refused_and_parts_hold_the_same_stories(tmp_path):
    source = prepare.sources()[0]
    (tmp_path / source.name).write_text("another book")
    with pytest.raises(UserError, match="has the SHA-256"):
        prepare.read_book(source, tmp_path)
    told = [clean.Story("A", ("b.", "c.")), clean.Story("", ("d.",))]
    prepare.write_parts({"test": told}, tmp_path / "out")
    assert (tmp_path / "out/test.txt").read_text() == "A\nb.\nc.\n\nd.\n\n"
    lines = (tmp_path / "out/test.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["A\nb.\nc.", "d."]
