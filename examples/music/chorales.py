"""The four-part chorales of Bach that the package `music21` holds, as scores; and which of them are alike."""

from __future__ import annotations

import collections
import itertools
import re
from pathlib import Path
from typing import Any

from scheme import HIGHEST, LOWEST, TICKS, VOICES, Note, Score

PARTS = ("soprano", "alto", "tenor", "bass")
SHINGLE = 8  # notes of a melody that are compared at once
ALIKE = 0.35  # share of the shorter melody that two chorales of one family have in common at least


class NotAChoraleError(ValueError):
    """A score that is not four voices of single notes in 3/4 or 4/4; the message says why."""


def chorale_files() -> list[Path]:
    """Returns the scores of Bach in the corpus of music21, by name, without analyses (`.rntxt`)."""
    from music21 import corpus

    return sorted(
        (path for path in corpus.getComposer("bach") if path.suffix != ".rntxt"), key=lambda p: p.name
    )


def read_chorale(path: Path) -> Score:
    """Returns a chorale of a MusicXML file, at its own pitch; raises NotAChoraleError for every other music.

    Repeated parts stand once, as in the print. Onsets between two sixteenths move to the earlier one.
    """
    from music21 import converter, meter

    piece = converter.parse(path, forceSource=True)
    voices = _voices(piece)
    soprano = voices[0]
    metres = [sign.ratioString for sign in soprano.recurse().getElementsByClass(meter.TimeSignature)]
    if not metres or set(metres) - {"3/4", "4/4"}:
        raise NotAChoraleError(f"its metres are {sorted(set(metres))}")
    signs = soprano.flatten().getElementsByClass("KeySignature")
    measures = list(soprano.getElementsByClass("Measure"))
    score = Score(
        beats=int(metres[0][0]), sharps=int(signs[0].sharps) if signs else 0, ticks=_ticks(piece.highestTime)
    )
    score.bars = _bar_lines(measures)
    for voice, part in enumerate(voices):
        score.notes += _notes(voice, part)
    score.fermatas = _fermatas(soprano)
    last = max(note.start + note.length for note in score.notes)
    score.ticks = min(score.ticks, last)
    score.bars = [tick for tick in score.bars if tick < score.ticks]
    if score.ticks < 16 * TICKS or score.ticks > 200 * TICKS or len(score.fermatas) < 2:
        raise NotAChoraleError(f"it has {score.ticks // TICKS} beats and {len(score.fermatas)} fermatas")
    return score


def _voices(piece: Any) -> list[Any]:
    """The four parts that are named after voices, from the top."""
    found = []
    for name in PARTS:
        parts = [part for part in piece.parts if re.split(r"[^a-z]", str(part.partName).lower())[0] == name]
        if len(parts) != 1:
            raise NotAChoraleError(f"its parts are {[part.partName for part in piece.parts]}")
        found.append(parts[0].stripTies())
    return found


def _ticks(quarters: Any) -> int:
    return int(quarters * TICKS)


def _notes(voice: int, part: Any) -> list[Note]:
    """The notes of a part; of several at a time the highest, and in the bass the lowest."""
    starts: dict[int, tuple[int, int]] = {}
    for element in part.flatten().notes:
        if element.duration.isGrace or element.quarterLength == 0:
            continue
        pitches = [pitch.midi for pitch in element.pitches]
        pitch = min(pitches) if voice == 3 else max(pitches)
        start, end = _ticks(element.offset), _ticks(element.offset + element.quarterLength)
        if end > start:
            starts.setdefault(start, (pitch, end))
    order = sorted(starts)
    following = dict(itertools.pairwise(order))
    return [
        Note(voice=voice, pitch=pitch, start=start, length=min(end, following.get(start, end)) - start)
        for start, (pitch, end) in sorted(starts.items())
    ]


def _fermatas(soprano: Any) -> list[int]:
    """The ticks of the soprano's notes with a fermata."""
    marked = [
        note for note in soprano.flatten().notes if any("Fermata" in e.classes for e in note.expressions)
    ]
    return sorted({_ticks(note.offset) for note in marked})


def _bar_lines(measures: list[Any]) -> list[int]:
    """The ticks at which bars begin. A bar that a repeat sign cuts in two has no line in the middle."""
    lines: list[int] = []
    for number, measure in enumerate(measures):
        bar, length, start = (
            _ticks(q) for q in (measure.barDuration.quarterLength, measure.highestTime, measure.offset)
        )
        is_pickup = number == 0 and length < bar
        ends_a_bar = bool(lines) and start - lines[-1] < bar and length < bar
        if not is_pickup and not ends_a_bar:
            lines.append(start)
    return lines


def transpositions(score: Score, ranges: dict[int, tuple[int, int]]) -> list[Score]:
    """Returns the piece in each key, 6 semitones below to 5 above, in which all voices stay in `ranges`.

    ranges: the lowest and highest pitch of each voice.
    """
    moved = []
    for step in range(-6, 6):
        notes = [
            Note(voice=note.voice, pitch=note.pitch + step, start=note.start, length=note.length)
            for note in score.notes
        ]
        if all(ranges[note.voice][0] <= note.pitch <= ranges[note.voice][1] for note in notes):
            sharps = (score.sharps + 7 * step + 6) % 12 - 6
            moved.append(
                Score(
                    beats=score.beats,
                    sharps=sharps,
                    ticks=score.ticks,
                    notes=notes,
                    bars=score.bars,
                    fermatas=score.fermatas,
                )
            )
    return moved


def pitch_ranges(scores: list[Score]) -> dict[int, tuple[int, int]]:
    """Returns the lowest and highest pitch of each voice; raises ValueError if one has no token."""
    ranges = {}
    for voice, letter in enumerate(VOICES):
        pitches = [note.pitch for score in scores for note in score.notes if note.voice == voice]
        ranges[voice] = (min(pitches), max(pitches))
        if ranges[voice][0] < LOWEST[letter] or ranges[voice][1] > HIGHEST[letter]:
            raise ValueError(
                f"voice {letter} goes from {min(pitches)} to {max(pitches)}; widen scheme.LOWEST, HIGHEST"
            )
    return ranges


def melody_pieces(score: Score) -> collections.Counter[tuple[int, ...]]:
    """Returns how often each run of `SHINGLE` intervals occurs in the soprano, in any key and rhythm."""
    pitches = [note.pitch for note in sorted(score.notes, key=lambda note: note.start) if note.voice == 0]
    steps = [second - first for first, second in itertools.pairwise(pitches)]
    steps = [step for step in steps if step]  # the same tune is set to texts with other syllables
    return collections.Counter(tuple(steps[i : i + SHINGLE]) for i in range(len(steps) - SHINGLE + 1))


def families(scores: list[Score]) -> list[int]:
    """Returns a number for each piece; pieces with the same number share a melody, directly or by others.

    Two pieces are alike where at least `ALIKE` of the shorter one's pieces of melody stand in the other.
    """
    counts = [melody_pieces(score) for score in scores]
    family = list(range(len(scores)))

    def root(i: int) -> int:
        while family[i] != i:
            i = family[i]
        return i

    for i, first in enumerate(counts):
        for j in range(i):
            shorter = min(first.total(), counts[j].total())
            if shorter and (first & counts[j]).total() >= ALIKE * shorter:
                family[root(i)] = root(j)
    return [root(i) for i in range(len(scores))]


def fingerprint(score: Score) -> tuple[Any, ...]:
    """Returns what two copies of a piece have in common, whatever their key: all notes, from the first on."""
    notes = sorted(score.notes, key=lambda note: (note.start, note.voice))
    first = notes[0].pitch
    return tuple((note.voice, note.pitch - first, note.start, note.length) for note in notes)
