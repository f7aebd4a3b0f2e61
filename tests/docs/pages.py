"""Reads the code blocks of the documents, and compares the outputs that they show with real ones.

A mark is an HTML comment on the line before a block:

    <!-- not run: reason -->   the block is not run; the test is listed as skipped with the reason
    <!-- output -->            the block is the output of the Python block before it
    <!-- file: name -->     the block is the file of that name, which the commands after it may run
    <!-- instead: command -->  this command runs in its place, and all numbers are compared by shape

An expected output is compared line by line, and words by blanks:

    …                      alone on a line: any lines; within a line: any text
    1.6092, 418,576        the same number within 5 %, or within 0.001
    8.6e-06                a difference: at most ten times as large
    0.26 s, 88,276 tokens/s, 0.14 ms, 77 times    a time: any number
    f880d029…              24 or more hexadecimal digits: any as many
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
)
# The pages on the artefact's format, which are a specification together.
FORMAT = "\n".join(
    (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    for name in ("format.md", "step.md", "answers.md", "saved-streams.md")
)
TOLERANCE, SMALLEST = 0.05, 0.001  # relative, absolute: other processors round training otherwise
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<body>.*?)^```$", re.M | re.S
)
NUMBER = r"[-+±−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
TIME = re.compile(rf"(?:{NUMBER})(?= ?(?:s|ms|min|tokens/s|times|% of)\b)")
HASH = re.compile(r"\b[0-9a-f]{24,64}\b")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One code block. mark: what stands in the comment before it, empty where there is none."""

    page: str
    line: int
    language: str
    body: str
    mark: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why the block is not run; None where it is."""
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run: ") else None

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command of a console block with the output that the block shows, empty where it shows none."""
        pairs: list[tuple[str, list[str]]] = []
        for line in self.body.splitlines():
            if line.startswith("$ "):
                pairs.append((line[2:], []))
            elif pairs and line.startswith("> "):  # a command that goes on
                pairs[-1] = (f"{pairs[-1][0]}\n{line[2:]}", [])
            else:
                pairs[-1][1].append(line)
        return [(command, "\n".join(lines).strip()) for command, lines in pairs]


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            language=match["language"],
            body=match["body"],
            mark=match["mark"] or "",
        )
        for match in BLOCK.finditer(text)
    ]


def difference(expected: str, actual: str, *, shape_only: bool = False) -> str | None:
    """What differs between the output that a document shows and the real one; None where they agree."""
    wanted, found = (
        [line.rstrip() for line in text.strip().splitlines() if line.strip()] for text in (expected, actual)
    )
    at = 0
    free = False  # after a line of dots: any lines may come first
    for line in wanted:
        if line.strip() == "…":
            free = True
            continue
        while free and at < len(found) and not matches(line, found[at], shape_only=shape_only):
            at += 1
        if at >= len(found):
            return f"expected the line\n  {line}\nand the output ends"
        if not matches(line, found[at], shape_only=shape_only):
            return f"expected\n  {line}\nfound\n  {found[at]}"
        at, free = at + 1, False
    return None if free or at == len(found) else f"the document does not show\n  {found[at]}"


def matches(expected: str, actual: str, *, shape_only: bool = False) -> bool:
    """Whether two lines agree by the rules at the top of this module."""
    parts = [_pattern(part) for part in expected.split("…")]
    match = re.fullmatch(".*?".join(parts), actual.strip())
    if match is None:
        return False
    numbers = [text for part in expected.split("…") for text in _numbers(part)]
    return shape_only or all(close(want, have) for want, have in zip(numbers, match.groups(), strict=True))


def close(expected: str, actual: str) -> bool:
    """Whether two numbers agree within the tolerance; 8.6e-06 and the like may be ten times as large."""
    want, have = (
        float(text.replace(",", "").replace("−", "-").replace("±", "")) for text in (expected, actual)
    )
    if "e-" in expected:
        return abs(have) <= 10 * abs(want)
    return abs(want - have) <= max(TOLERANCE * abs(want), SMALLEST)


def _pieces(text: str) -> list[tuple[str, str]]:
    """A line in pieces: ("time" | "hash" | "number" | "blank" | "text", piece)."""
    kinds = (
        f"(?P<hash>{HASH.pattern})|(?P<time>{TIME.pattern})|(?P<number>(?<![\\w.]){NUMBER})|(?P<blank>\\s+)"
    )
    pieces, end = [], 0
    for match in re.finditer(kinds, text):
        if match.start() > end:
            pieces.append(("text", text[end : match.start()]))
        pieces.append((match.lastgroup or "text", match[0]))
        end = match.end()
    return [*pieces, ("text", text[end:])]


def _pattern(text: str) -> str:
    """The regular expression of a line: its numbers are groups, times and hashes may be any."""
    written = {"time": NUMBER, "number": f"({NUMBER})", "blank": r"\s+"}
    return "".join(
        written.get(kind) or (rf"[0-9a-f]{{{len(piece)}}}" if kind == "hash" else re.escape(piece))
        for kind, piece in _pieces(text.strip())
    )


def _numbers(text: str) -> list[str]:
    return [piece for kind, piece in _pieces(text.strip()) if kind == "number"]
