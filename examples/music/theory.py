"""What counterpoint says about four-part music, in figures: crossings, chords, keys, parallels, phrases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scheme import TICKS, VOICES, Score

MAJOR_SCALE = (0, 2, 4, 5, 7, 9, 11)
# Triads and seventh chords as intervals over a root, as in a textbook of harmony.
CHORDS = (
    (0, 4, 7),
    (0, 3, 7),
    (0, 3, 6),
    (0, 4, 8),
    (0, 4, 7, 10),
    (0, 3, 7, 10),
    (0, 4, 7, 11),
    (0, 3, 6, 10),
    (0, 3, 6, 9),
)
KNOWN = {frozenset((root + step) % 12 for step in chord) for chord in CHORDS for root in range(12)}
PARTIAL = {
    frozenset(part)
    for chord in KNOWN
    for size in (1, 2)
    for part in itertools.combinations(chord, size)
    if len(chord) == 3
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A property of a set of pieces, and its unit."""

    name: str
    value: float
    unit: str = "%"


def grid(score: Score) -> np.ndarray:
    """Returns what sounds, int64 [ticks, 4]: MIDI pitches, and -1 for silence."""
    sounding = np.full((score.ticks, len(VOICES)), -1)
    for note in score.notes:
        sounding[note.start : note.start + note.length, note.voice] = note.pitch
    return sounding


def describe(scores: Sequence[Score]) -> list[Figure]:
    """Returns the figures of a set of pieces."""
    grids = [grid(score) for score in scores]
    full = [row for ticks in grids for row in ticks if (row >= 0).all()]
    beats = [row for ticks in grids for row in ticks[::TICKS] if (row >= 0).all()]
    found = np.array([parallels(ticks[::TICKS]) for ticks in grids]).sum(0)
    moves = np.concatenate([_melody_moves(score) for score in scores])
    gaps = np.concatenate([np.diff(score.fermatas) // TICKS for score in scores])
    notes = [(score, note) for score in scores for note in score.notes]
    inside = [_in_scale(note.pitch, score.sharps) for score, note in notes]
    lengths = [score.ticks / TICKS for score in scores]
    crossed = [(np.diff(row) > 0).any() for row in full]
    endings = [is_triad_over_its_root(ticks[-1]) for ticks in grids]
    figures = (
        ("sixteenths in which voices cross", _share(crossed), "%"),
        ("beats on a triad or a seventh chord", _share([_is_chord(row) for row in beats]), "%"),
        ("time in the scale of the key signature", _share(inside, [note.length for _, note in notes]), "%"),
        ("parallel fifths and octaves", 100 * found[0] / max(found[1], 1), "per 100 changes"),
        ("moves of the soprano by a step", _share(moves <= 2), "%"),
        ("pieces that end on a triad over its root", _share(endings), "%"),
        ("from fermata to fermata, median", float(np.median(gaps)) if len(gaps) else 0.0, "beats"),
        ("phrases of 4, 8, 12 or 16 beats", _share(gaps % 4 == 0), "%"),
        ("length of a piece, mean", float(np.mean(lengths)), "beats"),
    )
    return [Figure(name=name, value=value, unit=unit) for name, value, unit in figures]


def _share(true: Sequence[bool] | np.ndarray, weights: Sequence[float] | None = None) -> float:
    """The share of what is true, in percent; 0 of nothing."""
    return 100 * float(np.average(true, weights=weights)) if len(true) else 0.0


def _is_chord(row: np.ndarray) -> bool:
    return frozenset(int(pitch) % 12 for pitch in row) in KNOWN | PARTIAL


def _in_scale(pitch: int, sharps: int) -> bool:
    return (pitch - 7 * sharps) % 12 in MAJOR_SCALE


def _melody_moves(score: Score) -> np.ndarray:
    """The sizes of the soprano's moves in semitones, without repeated notes."""
    melody = [note.pitch for note in sorted(score.notes, key=lambda note: note.start) if note.voice == 0]
    sizes: np.ndarray = np.abs(np.diff(melody))
    return sizes[sizes > 0]


def parallels(beats: np.ndarray) -> tuple[int, int]:
    """Returns how many parallel fifths and octaves there are between beats [N, 4], and how many changes."""
    found = changes = 0
    for before, after in itertools.pairwise(beats):
        if (before < 0).any() or (after < 0).any() or (before == after).all():
            continue
        changes += 1
        for high, low in itertools.combinations(range(len(VOICES)), 2):
            first, second = int(before[high] - before[low]), int(after[high] - after[low])
            moves = int(after[high] - before[high]), int(after[low] - before[low])
            together = moves[0] * moves[1] > 0
            found += together and first % 12 == second % 12 and first % 12 in (0, 7)
    return found, changes


def is_triad_over_its_root(row: np.ndarray) -> bool:
    """Whether the pitches [4] are a major or minor triad over its root; its third or fifth may be missing."""
    if (row < 0).any():
        return False
    over_bass = {int(pitch - row.min()) % 12 for pitch in row}
    return over_bass <= {0, 4, 7} or over_bass <= {0, 3, 7}


def chord_runs(scores: Iterable[Score], length: int) -> set[tuple[tuple[int, ...], ...]]:
    """Returns all runs of `length` chords from beat to beat, in any key."""
    runs = set()
    for score in scores:
        beats = grid(score)[::TICKS]
        for at in range(len(beats) - length + 1):
            piece = beats[at : at + length]
            if (piece >= 0).all():
                runs.add(tuple(tuple((row - piece[0, 3]).tolist()) for row in piece))
    return runs
