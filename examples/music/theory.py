"""What counterpoint says about four-part music, in figures: crossings, chords, keys, parallels, phrases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scheme import TICKS, VOICES, Score

MAJOR_SCALE = (0, 2, 4, 5, 7, 9, 11)
# Triads and seventh chords as intervals over a root, as in a textbook of harmony.
CHORDS = ((0, 4, 7), (0, 3, 7), (0, 3, 6), (0, 4, 8), (0, 4, 7, 10), (0, 3, 7, 10), (0, 4, 7, 11), (0, 3, 6, 10), (0, 3, 6, 9))
KNOWN = {frozenset((root + step) % 12 for step in chord) for chord in CHORDS for root in range(12)}
PARTIAL = {frozenset(part) for chord in KNOWN for size in (1, 2) for part in itertools.combinations(chord, size) if len(chord) == 3}


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A property as a share of occasions. decimals, unit: how it is printed."""

    name: str
    count: float
    of: float
    unit: str = "%"

    @property
    def value(self) -> float:
        return (100 if "%" in self.unit or "100" in self.unit else 1) * self.count / max(self.of, 1)


def grid(score: Score) -> np.ndarray:
    """Returns what sounds, int64 [ticks, 4]: MIDI pitches, and -1 for silence."""
    sounding = np.full((score.ticks, len(VOICES)), -1)
    for note in score.notes:
        sounding[note.start : note.start + note.length, note.voice] = note.pitch
    return sounding


def describe(scores: Sequence[Score]) -> list[Counted]:
    """Returns the figures of a set of pieces."""
    crossed = sounding = chords = beats = inside = notes = fifths = changes = steps = moves = 0
    endings = phrases = eights = 0
    lengths: list[int] = []
    for score in scores:
        ticks = grid(score)
        full = ticks[(ticks >= 0).all(1)]
        crossed += int((np.diff(full, axis=1) > 0).any(1).sum())
        sounding += len(full)
        at_beats = [row for row in ticks[::TICKS] if (row >= 0).all()]
        chords += sum(frozenset(int(p) % 12 for p in row) in KNOWN | PARTIAL for row in at_beats)
        beats += len(at_beats)
        scale = {(step + 7 * score.sharps) % 12 for step in MAJOR_SCALE}
        inside += sum(note.length for note in score.notes if note.pitch % 12 in scale)
        notes += sum(note.length for note in score.notes)
        found, seen = parallels(ticks[::TICKS])
        fifths, changes = fifths + found, changes + seen
        melody = [note.pitch for note in sorted(score.notes, key=lambda note: note.start) if note.voice == 0]
        intervals = np.abs(np.diff(melody))
        steps, moves = steps + int(((intervals > 0) & (intervals <= 2)).sum()), moves + int((intervals > 0).sum())
        endings += is_triad_over_its_root(ticks[-1])
        ends = [tick // TICKS for tick in score.fermatas]
        gaps = np.diff(ends)
        phrases, eights = phrases + len(gaps), eights + int((gaps % 4 == 0).sum())
        lengths += gaps.tolist()
    return [
        Counted(name="sixteenths in which voices cross", count=crossed, of=sounding),
        Counted(name="beats on a triad or a seventh chord", count=chords, of=beats),
        Counted(name="time in the scale of the key signature", count=inside, of=notes),
        Counted(name="parallel fifths and octaves from beat to beat", count=fifths, of=changes, unit="of 100 changes"),
        Counted(name="moves of the soprano by a step", count=steps, of=moves),
        Counted(name="pieces that end on a triad over its root", count=endings, of=len(scores)),
        Counted(name="beats from fermata to fermata, median", count=float(np.median(lengths or [0])), of=1, unit=""),
        Counted(name="phrases of 4, 8, 12 or 16 beats", count=eights, of=phrases),
        Counted(name="beats in a piece, mean", count=sum(score.ticks for score in scores) / TICKS, of=len(scores), unit=""),
    ]  # fmt: skip


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
    """Whether the pitches [4] are a major or minor triad, its third or fifth perhaps missing, over its root."""
    if (row < 0).any():
        return False
    over_bass = {int(pitch - row.min()) % 12 for pitch in row}
    return over_bass <= {0, 4, 7} or over_bass <= {0, 3, 7}


def chord_runs(scores: Iterable[Score], length: int) -> set[tuple[tuple[int, ...], ...]]:
    """Returns all runs of so many chords from beat to beat, whatever their key."""
    runs = set()
    for score in scores:
        beats = grid(score)[::TICKS]
        for at in range(len(beats) - length + 1):
            piece = beats[at : at + length]
            if (piece >= 0).all():
                runs.add(tuple(tuple((row - piece[0, 3]).tolist()) for row in piece))
    return runs
