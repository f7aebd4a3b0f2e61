"""Four-part music as tokens: scores become ids and notes again, and any ids can be played."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from perform import PAUSE, slices
from scheme import IDS, NAMES, TICKS, Note, Score, decode, encode, events

LINE = (
    "4/4 key-1 4 S65 A60 T57 B53 | S69 A65 T60 B53 .& B52 2 fermata S67 A64 T60 B48 3 S- A- T- B- "
    "4 S67 A64 T60 B48 | fermata S65 A60 T57 B53 2 end"
)


def test_scores_and_ids_are_the_same_music() -> None:
    ids = [IDS[name] for name in LINE.split()]
    score = decode(ids)
    assert (score.beats, score.sharps, score.ticks) == (4, -1, 7 * TICKS)
    assert score.bars == [4, 20]
    assert score.fermatas == [8, 20]
    bass = [(note.pitch, note.start, note.length) for note in score.notes if note.voice == 3]
    assert bass == [(53, 0, 4), (53, 4, 2), (52, 6, 2), (48, 8, 4), (48, 16, 4), (53, 20, 8)]
    assert encode(score) == ids


def random_score(draw: np.random.Generator) -> Score:
    """A score with rests, ties over bar lines, a pickup, and an irregular bar in the middle."""
    beats, pickup, bars = int(draw.choice([3, 4])), int(draw.integers(3)), int(draw.integers(2, 6))
    lines = [(pickup + beats * bar) * TICKS for bar in range(bars)]
    lines[-1] -= TICKS  # a short bar
    ticks = lines[-1] + beats * TICKS
    notes = []
    for voice in range(4):
        at = 0
        while at < ticks:
            length = min(int(draw.integers(1, 9)), ticks - at)
            if draw.random() > 0.2:
                notes.append(Note(voice=voice, pitch=60 + int(draw.integers(5)), start=at, length=length))
            at += length
    fermatas = sorted({int(note.start) for note in notes if draw.random() > 0.8})
    sharps = int(draw.integers(-6, 6))
    notes.sort(key=lambda note: (note.start, note.voice))
    return Score(beats=beats, sharps=sharps, ticks=ticks, notes=notes, bars=lines, fermatas=fermatas)


@pytest.mark.parametrize("seed", range(5))
def test_random_scores_come_back(seed: int) -> None:
    score = random_score(np.random.default_rng(seed))
    assert decode(encode(score)) == score


def test_any_ids_can_be_played() -> None:
    ids = np.random.default_rng(0).integers(0, len(NAMES), 5000).tolist()
    music = list(slices(events(ids), tempo=90))
    assert len(music) > 200
    assert all(piece.ticks > 0 and piece.seconds > 0 for piece in music)
    assert all(a.tick + a.ticks == b.tick for a, b in itertools.pairwise(music))
    assert all(piece.pitches[voice] is not None for piece in music for voice in piece.begins)


def test_pieces_are_parted_by_silence_and_nothing_sounds_on() -> None:
    first, second = "4/4 key+0 | S70 A65 T60 B50 end", "3/4 key+0 | S72 2 S74 end"
    music = list(slices(events([IDS[name] for name in f"{first} {second}".split()]), tempo=60))
    assert [piece.pitches for piece in music] == [
        (70, 65, 60, 50),
        (None,) * 4,
        (72, None, None, None),
        (74, None, None, None),
    ]
    assert [piece.ticks for piece in music] == [4, PAUSE, 4, 4]
    assert [piece.first for piece in music] == [True, False, True, False]
    assert [piece.beats for piece in music if piece.first] == [4, 3]
