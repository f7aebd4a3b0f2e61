"""Stories as plain paragraphs, from books as Project Gutenberg's volunteers typed them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

SHORTEST = 600  # characters of a story or chapter; shorter ones are dedications, lists and leftovers
FRONT = re.compile(
    r"preface|introduct|contents|dedicat|^to (the |my )|illustrat|foreword|^list of|author's note|bibliograph"
    r"|glossar|^notes?\b|references|^index|advertisement|publish|transcriber|footnote|pronounc|copyright"
    r"|^books? by",
    re.I,
)
BACK = re.compile(r"^(notes\b|appendix|footnotes|glossary|transcriber|index\b|the end\b|bibliography)", re.I)
CAPTION = re.compile(r"^[\"'‘]|line-art|drawing|^[^a-z]*$|frontispiece", re.I)
# Without "chapter", a Roman numeral is a number if a mark follows or it is isolated: "Civil War" has none.
NUMBER = re.compile(
    r"^(((chapter|story|part)\s+[ivxlc]+|((chapter|story|part)\s+)?\d+)[.:]?(\s*[-:]\s*|\s+|$)"
    r"|[ivxlc]+([.:]\s*([-:]\s*)?|\s*-+\s*|$))",
    re.I,
)
# Old books speak of peoples in words that no model should learn to repeat; such a paragraph is left out.
LEFT_OUT = re.compile(
    r"\b(nigger|negro|negress|darky|darkie|blackamoor|jew|jewess|jewish|savages|hottentot)(s|es)?\b", re.I
)
ASCII = {
    "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "‘": "'", "’": "'", "–": "-", "—": "--", "…": "...",
    "Æ": "Ae", "æ": "ae", "Œ": "Oe", "œ": "oe", "ß": "ss", "Ø": "O", "ø": "o", "ð": "d", "þ": "th", "ł": "l",
    "Đ": "D", "\u00a0": " ",
}  # fmt: skip


@dataclass(frozen=True)
class Story:
    """A story or a chapter: its title, which may be empty, and its paragraphs."""

    title: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The title and the paragraphs, each on a line."""
        return "\n".join((self.title, *self.paragraphs) if self.title else self.paragraphs)


def stories(book: str, *, begin: str = "", end: str = "") -> list[Story]:
    """The stories of a book, without its front matter, notes and illustrations.

    begin, end: lines of the book; the stories stand from the last `begin` to the first `end` after it. By
    default they stand between Project Gutenberg's own marks. Prefaces and notes are known by their titles.
    """
    lines = _body([line.rstrip() for line in book.replace("\r\n", "\n").replace("\r", "\n").split("\n")])
    lines = _between(lines, begin, end)
    found: list[Story] = []
    title, paragraphs, skipping = "", [], False
    for is_title, block in _blocks(lines):
        if not is_title:
            if not skipping:
                paragraphs.append(block)
            continue
        name = title_case(NUMBER.sub("", block))
        if not name:
            continue  # a part of a story that has only a number
        if paragraphs:
            found.append(Story(title, tuple(paragraphs)))
            title, paragraphs = "", []
        if BACK.search(block) and sum(len(story.text) for story in found) > 0.6 * sum(map(len, lines)):
            break
        skipping = bool(FRONT.search(block))
        title = name
    found.append(Story(title, tuple(paragraphs)))
    found = [Story(story.title, _without_source(story.paragraphs)) for story in found]
    return [story for story in found if len(story.text) >= SHORTEST]


def _without_source(paragraphs: tuple[str, ...]) -> tuple[str, ...]:
    """The paragraphs without a last one that only names where the story comes from."""
    while paragraphs and (
        paragraphs[-1][0] == "(" or re.fullmatch(r"(\S+ ){0,3}\S+[a-z)]\.?", paragraphs[-1])
    ):
        paragraphs = paragraphs[:-1]
    return paragraphs


def _body(lines: list[str]) -> list[str]:
    """The lines between Project Gutenberg's marks."""
    first, last = 0, len(lines)
    for i, line in enumerate(lines):
        if re.match(r"\*\*\* ?START|\*END\*? ?THE SMALL PRINT", line) and i < len(lines) // 2:
            first = i + 1
        if re.match(r"(\*\*\* ?END OF|End of (the |this )?Project Gutenberg)", line, re.I) and i > first:
            return lines[first:i]
    return lines[first:last]


def _between(lines: list[str], begin: str, end: str) -> list[str]:
    found = [i for i, line in enumerate(lines) if line.strip() == begin] if begin else [0]
    if not found:
        raise ValueError(f"the book has no line {begin!r}, with which its stories begin")
    first = found[-1]
    if not end:
        return lines[first:]
    last = [i for i, line in enumerate(lines) if i > first and line.strip() == end]
    if not last:
        raise ValueError(f"the book has no line {end!r}, with which its stories end")
    return lines[first : last[0]]


def _blocks(lines: list[str]) -> Iterator[tuple[bool, str]]:
    """The titles and paragraphs of a book, as (is a title, text on one line)."""
    text = re.sub(
        r"\[[^\[\]]{0,600}\]| ?\(\d+\)", "", "\n".join(lines)
    )  # illustrations, notes and their numbers
    text = re.sub(r"\n+\d{1,3}\n(?=\S)", "\n", text)  # numbers of pages within the text
    blank, titles, paragraph = 2, 0, 0
    for part in re.split(r"(\n(?:[ \t]*\n)+)", text):
        if not part.strip():
            blank = part.count("\n") - 1
            continue
        rows = [row for row in part.split("\n") if row.strip()]
        line = plain(" ".join(row.strip() for row in rows))
        if _is_title(rows, line, blank, titles):
            titles, paragraph = titles + 1, 0
            if not CAPTION.search(line):
                yield True, line
            continue
        titles = 0
        indented = sum(row.startswith("   ") for row in rows)
        if (indented > len(rows) / 2 and len(rows) > 1) or _is_noise(line):
            continue  # verse, lists and pages of titles
        # The first words of a chapter are often printed in capitals.
        capitals = re.match(r"(?=.*[a-z])[\"']?[A-Z][A-Z']*[A-Z](?: [A-Z']+\b)*(?=[ ,])", line)
        if capitals and not paragraph:
            line = capitals[0].capitalize() + line[capitals.end() :]
        paragraph += 1
        yield False, dialogue(line)


def _is_title(rows: list[str], line: str, blank: int, titles: int) -> bool:
    short = len(rows) <= 2 and len(line) <= 70
    ends = re.search(r"[a-z][.,;!?:'\"-]+$|[\"']$", line) is not None
    shouted = line.upper() == line and re.search(r"[A-Z]{3}", line) is not None
    return short and (shouted or (not ends and (blank >= 2 or titles > 0)))


def _is_noise(line: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in line)
    gutenberg = re.search(
        r"gutenberg|proofread|^end of the |produced by|e-?text|http|www\.|copyright", line, re.I
    )
    # An asterisk or a brace marks a footnote or a break.
    return bool(
        letters < 0.8 * len(line)
        or gutenberg
        or re.match(r"[\[*{<]|\(?\d", line)
        or re.search(r"[\[\]{}|<>=_\\#@]", line)
        or LEFT_OUT.search(line)
        or not re.search(r"[a-z]{2}.*[.!?:;,\-'’\")]$", line)
    )


def plain(line: str) -> str:
    """The line in ASCII with single blanks; accents and marks of italics are dropped."""
    for symbol, replacement in ASCII.items():
        # A curly quote is kept until its dialogue is known.
        if symbol not in "‘’":
            line = line.replace(symbol, replacement)
    line = unicodedata.normalize("NFKD", line)
    line = "".join(c for c in line if c in "‘’" or 32 <= ord(c) < 127)
    line = re.sub(r"\{\d+\}|\[\d+\]|\[[A-Za-z*]\]", "", line)
    line = re.sub(r"(^|[\s\"'(\-‘])[_*]+(?=\w)|(?<=[\w.,;!?])[_*]+(?=$|[\s\"'.,;:!?)\-’])", r"\1", line)
    line = re.sub(r"(\. ){2,}\.", "...", line).replace("----", "--").replace("``", '"').replace("''", '"')
    line = re.sub(r" +([,.;:!?])", r"\1", line.replace("_", ""))
    return re.sub(r"\s+", " ", line).strip()


def dialogue(line: str) -> str:
    """The paragraph with dialogue in double quotation marks, and straight apostrophes."""
    if '"' not in line:
        if "‘" in line:
            line = _opened(line.replace("‘", "\0"), "’")
        elif re.search(r"(^|[\s(\-])'[A-Z]", line) and re.search(r"[.,!?;\-]'", line):
            line = _opened(
                re.sub(
                    r"(^|[.,;:!?] |[(\-])'(?=[A-Za-z])(?!([Tt](is|was|were)|em|d|ll|s|t)\b)", "\\1\0", line
                ),
                "'",
            )
    return line.replace("‘", "'").replace("’", "'")


def _opened(line: str, close: str) -> str:
    """The line with \\0 and what closes it as double quotation marks."""
    parts, is_open = [], False
    for i, c in enumerate(line):
        if c == "\0":
            is_open = True
            parts.append('"')
        elif c == close and is_open and _closes(line, i):
            is_open = False
            parts.append('"')
        else:
            parts.append("'" if c == close else c)
    return "".join(parts)


def _closes(line: str, i: int) -> bool:
    before, after = line[i - 1 : i], line[i + 1 : i + 2]
    return before in set(".,!?;:-") or (not after.isalnum() and (before != "s" or after in set(",;:.!?")))


def title_case(title: str) -> str:
    """The title with capitals where a book would have them: The Frog and the Prince."""
    title = re.sub(r"[.:;]+$", "", dialogue(title).strip(" -*")).strip()
    if title.upper() != title and title[:1].isupper():
        return title
    small = {
        "a",
        "an",
        "and",
        "at",
        "by",
        "for",
        "from",
        "how",
        "in",
        "of",
        "on",
        "or",
        "the",
        "to",
        "who",
        "with",
    }
    words = title.lower().split()
    return " ".join(
        word if i and word in small else re.sub(r"^(\W*)(\w)", lambda m: m[1] + m[2].upper(), word)
        for i, word in enumerate(words)
    )
