"""Text files are decoded as Python's text mode decodes them, wherever a block ends."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtimes.base.errors import TextError
from runtimes.base.text import TextDecoder, text_lines

BOM = b"\xef\xbb\xbf"


@settings(max_examples=40)
@given(
    text=st.text(st.sampled_from("a\r\né😀\ufeff\x85\u2028")),
    marked=st.booleans(),
    cuts=st.lists(st.integers(0, 40)),
)
@example(text="\r\n\r", marked=True, cuts=[*range(9)])
def test_any_pieces_give_what_text_mode_gives(text: str, marked: bool, cuts: list[int]) -> None:
    data = BOM * marked + text.encode()
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(ends)]
    decoder = TextDecoder("a.txt")
    read = "".join(map(decoder.decode, pieces)) + decoder.decode(b"", final=True)
    expected = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig")
    assert read == expected.read()
    assert (decoder.note is not None) == (read.encode() != data)
    expected.seek(0)
    assert [*text_lines(pieces, "a.txt")] == [line.removesuffix("\n") for line in expected]


def test_a_note_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert [*text_lines([BOM + b"a\r", b"\nb\r"], "noted.txt")] == ["a", "b"]
    (note,) = capsys.readouterr().err.splitlines()
    assert note == (
        "note: noted.txt: its byte order mark is left out and its Windows line ends (\\r\\n) are read as \\n "
        "and its old Macintosh line ends (\\r) are read as \\n"
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Ein Käse".encode("utf-16"), "a.txt is not UTF-8 but probably UTF-16; convert it"),
        ("Ein Käse".encode("utf-16-le"), "a.txt is not UTF-8 but probably UTF-16"),
        ("Ein Käse".encode("utf-16-be"), "a.txt is not UTF-8 but probably UTF-16"),
        ("日本語".encode("utf-16"), "a.txt is not UTF-8 but probably UTF-16"),
        ("Brot\r\nKäse".encode("latin-1"), "line 2 of a.txt is not UTF-8 (byte 0xe4) but probably Latin-1"),
        (b"a\nbcdefgh\0", "line 2 of a.txt has a NUL byte, so it is not text"),
        (b"ab\n\xe2\x82", "line 2 of a.txt is not UTF-8 (byte 0xe2)"),
    ],
)
def test_what_is_not_utf8_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(TextError) as caught:
        [*text_lines(content.splitlines(keepends=True), "a.txt")]
    assert str(caught.value).startswith(words)
