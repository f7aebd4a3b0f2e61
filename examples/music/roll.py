"""Draws music as a piano roll: time from left to right, pitch from bottom to top, a colour for each voice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perform import Slice
from scheme import TICKS, VOICES

from runtimes.base.files import atomic_file

COLOURS = {"S": "#d1495b", "A": "#edae49", "T": "#00798c", "B": "#30475e"}
NAMES = {"S": "soprano", "A": "alto", "T": "tenor", "B": "bass"}
INK = "#55504a"
BLACK_KEYS = (1, 3, 6, 8, 10)
BEATS_A_ROW = 36


def draw(music: Sequence[Slice], path: Path, *, title: str) -> None:
    """Writes a picture (.png, .svg) of a stretch of music; it needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    notes = _notes(music)
    width = _row_width(music)
    rows = -(-(music[-1].tick + music[-1].ticks) // width)
    pitches = [pitch for _, pitch, _, _ in notes]
    low, high = min(pitches, default=48) - 2, max(pitches, default=72) + 4
    figure = Figure(figsize=(13, 0.7 + 2.35 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    for row, axis in enumerate(axes):
        axis.set(xlim=(row * width, (row + 1) * width), ylim=(low - 0.5, high))
        _draw_paper(axis, music, low, high)
        _draw_notes(axis, notes)
    axes[-1].set_xlabel("bar", fontsize=9, color=INK)
    handles = [Line2D([], [], color=COLOURS[voice], linewidth=6, label=NAMES[voice]) for voice in VOICES]
    figure.legend(handles=handles, loc="upper right", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12)
    metadata = {"Software": None} if path.suffix == ".png" else None
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=110, metadata=metadata)


def _draw_paper(axis: Any, music: Sequence[Slice], low: int, high: int) -> None:
    """Draws the background of the notes in a row: black keys, bar lines with their numbers, fermatas."""
    from matplotlib.patches import Arc

    first, last = axis.get_xlim()
    for pitch in range(low, high):
        if pitch % 12 in BLACK_KEYS:
            axis.axhspan(pitch - 0.5, pitch + 0.5, color="#f4f1ec", zorder=0, linewidth=0)
    bars = [piece.tick for piece in music if piece.bar]
    shown = [(number, tick) for number, tick in enumerate(bars, start=1) if first <= tick < last]
    for _, tick in shown:
        axis.axvline(tick, color="#b8b2a7", linewidth=0.8, zorder=1)
    for piece in music:
        if piece.first and first <= piece.tick < last:
            axis.axvline(piece.tick, color=INK, linewidth=1.6, zorder=1)
        if piece.fermata and first <= piece.tick < last:
            middle, top = piece.tick + TICKS / 2, high - 2.2
            axis.add_patch(Arc((middle, top), 3.2, 2.6, theta1=0, theta2=180, color=INK, linewidth=1.1))
            axis.plot([middle], [top + 0.4], ".", color=INK, markersize=3)
    octaves = range(-(-low // 12) * 12, high, 12)
    axis.set_yticks(list(octaves), [f"C{pitch // 12 - 1}" for pitch in octaves])
    axis.set_xticks([tick for _, tick in shown], [str(number) for number, _ in shown])
    axis.tick_params(length=0, labelsize=8, colors=INK)
    axis.spines[:].set_visible(False)


def _draw_notes(axis: Any, notes: Sequence[tuple[str, int, int, int]]) -> None:
    """Draws the notes of a row. Higher voices are thinner and in front, so that a unison shows both."""
    from matplotlib.patches import FancyBboxPatch

    first, last = axis.get_xlim()
    for voice, pitch, start, end in notes:
        left, right = max(start, first), min(end, last)
        if left < right:
            height = 0.75 + 0.12 * VOICES.index(voice)
            note = FancyBboxPatch(
                (left + 0.12, pitch - height / 2), right - left - 0.24, height,
                boxstyle="round,pad=0,rounding_size=0.3", facecolor=COLOURS[voice], edgecolor="white",
                linewidth=0.4, zorder=7 - VOICES.index(voice),
            )  # fmt: skip
            axis.add_patch(note)


def _row_width(music: Sequence[Slice]) -> int:
    """Ticks in a row: all rows are equally full."""
    ticks = music[-1].tick + music[-1].ticks
    rows = -(-ticks // (BEATS_A_ROW * TICKS))
    return -(-ticks // rows // TICKS) * TICKS or TICKS


def _notes(music: Sequence[Slice]) -> list[tuple[str, int, int, int]]:
    """The notes (voice, pitch, first tick, last tick)."""
    notes, open_notes = [], {}
    for piece in music:
        for voice, pitch in enumerate(piece.pitches):
            if voice in open_notes and (voice in piece.begins or pitch is None):
                old, start = open_notes.pop(voice)
                notes.append((VOICES[voice], old, start, piece.tick))
            if voice in piece.begins and pitch is not None:
                open_notes[voice] = pitch, piece.tick
    end = music[-1].tick + music[-1].ticks
    return notes + [(VOICES[voice], pitch, start, end) for voice, (pitch, start) in open_notes.items()]
