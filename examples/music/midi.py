"""Writes a standard MIDI file (format 0, a channel for each voice) while the music is made.

Libraries for MIDI keep a whole track in memory until it is saved. This writer keeps nothing, so that a stream
may be endless.
"""

from __future__ import annotations

import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from perform import HELD, Slice
from scheme import TICKS, VOICES

DIVISION = 480  # MIDI ticks in a quarter note
ORGAN = 19  # "church organ" of General MIDI, counted from 0
LOUDNESS = 84
END_OF_TRACK = b"\x00\xff\x2f\x00"


class MidiFile:
    """A MIDI file that is open for writing; closing it makes the file complete.

    tempo: quarter notes a minute. The length of the track is mended after every piece, so that a program that
    is killed leaves a file whose last complete piece can be played. Where the disk is full, closing cuts the
    file off after that piece and raises OSError; a file without a whole piece is removed.
    """

    def __init__(self, path: Path, *, tempo: float) -> None:
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._whole = 0  # bytes up to the end of the last whole piece, without the end of the track
        self._tempo = tempo
        self._waiting = 0  # MIDI ticks since the last message
        self._sounding: list[int | None] = [None] * len(VOICES)
        self._slow = False
        self._file.write(b"MThd" + struct.pack(">IHHH", 6, 0, 1, DIVISION))
        self._file.write(b"MTrk" + struct.pack(">I", 0))
        self._begin = self._file.tell()
        self._message(b"\xff\x51\x03" + self._quarter(1.0))
        for channel in range(len(VOICES)):
            self._message(bytes([0xC0 | channel, ORGAN]))
            self._message(bytes([0xB0 | channel, 10, 40 + 16 * channel]))  # position from left to right

    def write(self, piece: Slice) -> None:
        """Adds a slice of the music."""
        if piece.first:
            self._mend()
            self._message(b"\xff\x58\x04" + bytes([piece.beats, 2, 24, 8]))
            self._message(b"\xff\x59\x02" + struct.pack(">bB", piece.sharps, 0))
        for voice, pitch in enumerate(piece.pitches):
            if voice in piece.begins or pitch is None:
                self._stop(voice)
        if piece.fermata != self._slow:
            self._slow = piece.fermata
            self._message(b"\xff\x51\x03" + self._quarter(HELD if piece.fermata else 1.0))
        for voice in sorted(piece.begins):
            pitch = piece.pitches[voice]
            assert pitch is not None
            self._message(bytes([0x90 | voice, pitch, LOUDNESS]))
            self._sounding[voice] = pitch
        self._waiting += piece.ticks * DIVISION // TICKS

    def close(self) -> None:
        try:
            try:
                for voice in range(len(VOICES)):
                    self._stop(voice)
                self._mend()
            finally:
                self._file.close()
        except OSError:
            self._cut_off()
            raise

    def __enter__(self) -> MidiFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _quarter(self, stretch: float) -> bytes:
        """The microseconds of a quarter note, in three bytes."""
        return round(60e6 / self._tempo * stretch).to_bytes(3, "big")

    def _stop(self, voice: int) -> None:
        if (pitch := self._sounding[voice]) is not None:
            self._message(bytes([0x80 | voice, pitch, 0]))
            self._sounding[voice] = None

    def _message(self, message: bytes) -> None:
        self._file.write(variable_length(self._waiting) + message)
        self._waiting = 0

    def _mend(self) -> None:
        """Ends the track here; what follows overwrites its end."""
        here = self._file.tell()
        self._file.write(END_OF_TRACK)
        self._file.seek(self._begin - 4)
        self._file.write(struct.pack(">I", here + len(END_OF_TRACK) - self._begin))
        self._file.flush()
        self._file.seek(here)
        self._whole = here

    def _cut_off(self) -> None:
        """Takes off what was half written: it may have overwritten the end of the track."""
        if self._whole <= self._begin:
            return self._path.unlink()
        with self._path.open("rb+") as file:
            file.truncate(self._whole + len(END_OF_TRACK))
            file.seek(self._whole)
            file.write(END_OF_TRACK)


def variable_length(number: int) -> bytes:
    """Returns a number in seven bits a byte, the first bytes with the eighth bit set."""
    parts = [number & 0x7F]
    while number := number >> 7:
        parts.append(0x80 | (number & 0x7F))
    return bytes(reversed(parts))
