"""Writes `src/unicode_classes.hpp`: which characters the library `tokenizers` takes for
letters and for numbers.

    python cpp/tools/unicode_classes.py

The library is asked about every character: its tables may be of another Unicode version than Python's.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

TARGET = Path(__file__).parents[1] / "src" / "unicode_classes.hpp"
CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
HEAD = """\
// Written by cpp/tools/unicode_classes.py: the characters that the library `tokenizers` takes for letters and
// for numbers. Each table holds run lengths from U+0000 on: first outside the class, then inside, and so on.
#ifndef XL_EXPORT_UNICODE_CLASSES_HPP
#define XL_EXPORT_UNICODE_CLASSES_HPP

#include <cstdint>

namespace xl_export::detail {

"""
TAIL = """\
}  // namespace xl_export::detail

#endif
"""


def inside(expression: str) -> set[int]:
    """The codes of all characters that match an expression of the library."""
    split = pre_tokenizers.Split(Regex(expression), "removed")
    outside = {character for piece, _ in split.pre_tokenize_str("".join(CHARACTERS)) for character in piece}
    return {ord(character) for character in CHARACTERS if character not in outside}


def table(name: str, codes: set[int]) -> str:
    """A C++ array of the lengths of the runs outside and inside, the last run outside left out."""
    runs = [len(list(run)) for _, run in groupby(range(max(codes) + 1), key=codes.__contains__)]
    lines, line = [], ""
    for word in (f"{length}," for length in runs):
        if len(line) + len(word) > 106:
            lines, line = [*lines, line.rstrip()], ""
        line += f"{word} "
    body = "\n".join(f"    {text}" for text in [*lines, line.rstrip(", ")])
    return f"inline constexpr std::uint32_t {name}[] = {{\n{body}}};\n\n"


def source() -> str:
    """The text of the file."""
    return HEAD + table("letter_runs", inside(r"\p{L}")) + table("number_runs", inside(r"\p{N}")) + TAIL


if __name__ == "__main__":
    TARGET.write_text(source())
