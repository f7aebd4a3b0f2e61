"""Text files as Python's text mode reads them: UTF-8 with or without a byte order mark, universal newlines.

Everything that reads a text file decodes it here. A byte order mark is left out, and `\\r\\n` and `\\r`
become `\\n`, so the same text has the same tokens whichever program wrote the file. With a byte
vocabulary, a whole file (`eval`, `train`) is read as it is; files of lines are read here for all of them.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from runtimes.base.errors import TextError
from runtimes.base.progress import say_once

MAX_LINE_BYTES = 1 << 26  # bytes of one line of a file that is read line by line
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
ENCODING_SAMPLE_BYTES = 1 << 12  # bytes that show whether a file is UTF-16
LINE_ENDS = {"\r\n": "Windows line ends (\\r\\n)", "\r": "old Macintosh line ends (\\r)"}


class TextDecoder:
    """Decodes the bytes of a text file piece by piece; the pieces may be cut anywhere.

    name: of the file, for messages. line: the number of the first line; a byte order mark is expected only
    at the beginning of line 1.
    """

    def __init__(self, name: str, *, line: int = 1) -> None:
        self._name = name
        self._line = line
        self._begins = line == 1
        encoding = "utf-8-sig" if self._begins else "utf-8"
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=True)
        self._start = b""  # of the file, where a byte order mark may be

    def decode(self, data: bytes, *, final: bool = False) -> str:
        """The text that these bytes complete. Raises TextError for bytes that are not UTF-8 text."""
        self._start += data[: 3 - len(self._start)]
        if (at := data.find(b"\0")) >= 0:
            raise self._refused(data, at)
        try:
            text = self._decoder.decode(data, final)
        except UnicodeDecodeError as error:
            raise self._refused(error.object, error.start) from error
        self._line += text.count("\n")
        return text

    @property
    def note(self) -> str | None:
        """What was changed in the bytes decoded so far, as a sentence for the user; None for nothing."""
        seen = self._decoder.newlines
        kinds = (seen,) if isinstance(seen, str) else seen or ()
        changes = [f"its {name} are read as \\n" for end, name in LINE_ENDS.items() if end in kinds]
        if self._begins and self._start == codecs.BOM_UTF8:
            changes.insert(0, "its byte order mark is left out")
        return f"{self._name or 'the input'}: {' and '.join(changes)}" if changes else None

    def _refused(self, data: bytes, at: int) -> TextError:
        """The error for the byte at index `at` of `data`."""
        start = data[:ENCODING_SAMPLE_BYTES]
        name = self._name or "the input"
        # Every second byte of English in UTF-16 is NUL.
        if (self._begins and self._start[:2] in UTF16_MARKS) or start.count(0) * 3 > len(start):
            return TextError(
                f"{name} is not UTF-8 but probably UTF-16; convert it, for example with `iconv -f UTF-16 -t "
                "UTF-8`."
            )
        line = self._line + _plain(data[:at]).count(b"\n")
        place = f"line {line} of {self._name}" if self._name else f"line {line}"
        if data[at] == 0:
            return TextError(f"{place} has a NUL byte, so it is not text; give a text file in UTF-8.")
        return TextError(
            f"{place} is not UTF-8 (byte 0x{data[at]:02x}) but probably Latin-1 or Windows-1252; convert the "
            "file, for example with `iconv -f WINDOWS-1252 -t UTF-8`."
        )


def decode_text(data: bytes, name: str) -> str:
    """The text of a whole file, without a note: for formats in which white space between values is free."""
    return TextDecoder(name).decode(data, final=True)


def text_pieces(pieces: Iterable[bytes], name: str, *, line: int = 1) -> Iterator[str]:
    """Yields the text of a file that is read in pieces of bytes; at its end, a note says what was changed.

    name, line: as in `TextDecoder`. Raises TextError for a file that is not UTF-8 text.
    """
    decoder = TextDecoder(name, line=line)
    for data in pieces:
        yield decoder.decode(data)
    yield decoder.decode(b"", final=True)
    if decoder.note:
        say_once(f"note: {decoder.note}")


def text_lines(pieces: Iterable[bytes], name: str, *, line: int = 1) -> Iterator[str]:
    """Yields the lines of a text file without their ends; otherwise as `text_pieces`."""
    rest = ""
    for text in text_pieces(pieces, name, line=line):
        *lines, rest = (rest + text).split("\n")
        yield from lines
    if rest:
        yield rest


def byte_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Yields the lines of a stream as bytes with their ends, each as soon as it is there.

    Raises TextError for a line of more than MAX_LINE_BYTES bytes.
    """
    number = 1
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            place = f"line {number} of {name}" if name else f"line {number}"
            raise TextError(
                f"{place} has more than {MAX_LINE_BYTES:,} bytes; give each text a line of its own."
            )
        yield line
        number += 1


def _plain(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
