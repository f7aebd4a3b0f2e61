"""Figures of counterpoint on chords that were set by hand, families of melodies, and the split by them."""

from __future__ import annotations

import numpy as np
import pytest
from chorales import NotAChoraleError, families, fingerprint, pitch_ranges, transpositions
from prepare import split_by_melody
from scheme import TICKS, Note, Score
from theory import chord_runs, describe, parallels


def piece(*chords: tuple[int, int, int, int], sharps: int = 0) -> Score:
    """A chord on each beat, with a fermata on every eighth and a bar line on every fourth."""
    notes = [
        Note(voice=voice, pitch=pitch, start=TICKS * beat, length=TICKS)
        for beat, chord in enumerate(chords)
        for voice, pitch in enumerate(chord)
    ]
    ticks = len(chords) * TICKS
    return Score(
        beats=4, sharps=sharps, ticks=ticks, notes=notes, bars=list(range(0, ticks, 4 * TICKS)),
        fermatas=list(range(7 * TICKS, ticks, 8 * TICKS)),
    )  # fmt: skip


def tune(seed: int, length: int = 32) -> list[tuple[int, int, int, int]]:
    draw = np.random.default_rng(seed)
    melody = 67 + np.cumsum(draw.choice([-2, -1, 1, 2], length)) % 7
    return [(int(pitch), 62, 57, 50) for pitch in melody]


def test_figures_of_chords_set_by_hand() -> None:
    tonic, dominant = (72, 67, 64, 48), (74, 67, 59, 55)
    figures = {c.name: c.value for c in describe([piece(*[tonic, dominant] * 8, tonic)])}
    assert figures["beats on a triad or a seventh chord"] == 100
    assert figures["time in the scale of the key signature"] == 100
    assert figures["sixteenths in which voices cross"] == 0
    assert figures["pieces that end on a triad over its root"] == 100
    assert figures["from fermata to fermata, median"] == 8
    assert figures["moves of the soprano by a step"] == 100
    worse = {c.name: c.value for c in describe([piece(*[tonic, (66, 69, 61, 60)] * 4)])}
    assert worse["sixteenths in which voices cross"] == 50
    assert worse["beats on a triad or a seventh chord"] == 50
    assert worse["time in the scale of the key signature"] == pytest.approx(75)
    assert worse["pieces that end on a triad over its root"] == 0


def test_parallels_are_fifths_and_octaves_that_move_the_same_way() -> None:
    def count(*beats: tuple[int, int, int, int]) -> tuple[int, int]:
        return parallels(np.array(beats))

    assert count((72, 66, 64, 48), (74, 69, 65, 50)) == (1, 1)  # soprano and bass, an octave
    assert count((72, 69, 65, 53), (72, 67, 64, 60)) == (0, 1)  # contrary motion
    assert count((60, 57, 52, 48), (65, 57, 52, 41)) == (0, 1)  # an octave, then two, in contrary motion
    assert count((72, 69, 65, 53), (72, 69, 65, 53)) == (0, 0)  # nothing changes
    assert count((74, 67, 64, 57), (76, 69, 65, 55)) == (1, 1)  # soprano and alto, a fifth


def test_a_transposed_melody_stays_in_the_same_part() -> None:
    first = piece(*tune(0))
    other_key = piece(*[(s + 2, a + 1, t + 2, b + 2) for s, a, t, b in tune(0)])
    assert families([first, other_key, piece(*tune(1))]) == [0, 0, 2]

    scores = {f"{seed}": piece(*tune(seed)) for seed in range(30)}
    scores |= {f"{seed}-again": piece(*[(s, 60, 57, 45) for s, *_ in tune(seed)]) for seed in range(30)}
    scores["copy-of-3"] = piece(*[tuple(pitch - 3 for pitch in chord) for chord in tune(3)])  # type: ignore[misc]
    assert fingerprint(scores["copy-of-3"]) == fingerprint(scores["3"])
    split = split_by_melody(scores)
    part_of = {name: part for part, names in split.items() for name in names}
    assert sorted(part_of) == sorted(set(scores) - {"copy-of-3"})
    assert all(part_of[f"{seed}"] == part_of[f"{seed}-again"] for seed in range(30))
    assert all(6 <= len(split[part]) <= 8 for part in ("valid", "test"))


def test_pieces_are_transposed_within_the_ranges_with_their_key_signature() -> None:
    score = piece((72, 67, 64, 48), (74, 67, 62, 55))
    ranges = pitch_ranges([score])
    assert [other.notes for other in transpositions(score, ranges)] == [score.notes]
    wider = {voice: (low - 2, high + 1) for voice, (low, high) in ranges.items()}
    moved = transpositions(score, wider)
    assert [other.notes[0].pitch for other in moved] == [70, 71, 72, 73]
    assert [other.sharps for other in moved] == [-2, 5, 0, -5]
    assert chord_runs([score], 2) == chord_runs(moved[:1], 2)


def test_a_chorale_of_music21_is_read() -> None:
    pytest.importorskip("music21", reason="needs music21: pip install '.[music]'")
    from chorales import chorale_files, read_chorale

    files = {path.stem: path for path in chorale_files()}
    score = read_chorale(files["bwv66.6"])
    assert (score.beats, score.sharps, score.ticks) == (4, 3, 36 * TICKS)
    assert score.bars[:2] == [TICKS, 5 * TICKS]
    assert [note.pitch for note in score.notes if note.start == 0] == [73, 64, 57, 57]
    assert len(score.fermatas) == 6
    with pytest.raises(NotAChoraleError, match="parts"):
        read_chorale(files["bwv846"])
