"""Draws music as a piano roll: time from left to right, pitch from bottom to top, a colour for each voice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perform import Slice
from scheme import TICKS, VOICES

COLOURS = {"S": "#d1495b", "A": "#edae49", "T": "#00798c", "B": "#30475e"}
NAMES = {"S": "soprano", "A": "alto", "T": "tenor", "B": "bass"}
BEATS_A_ROW = 36


def draw(music: Sequence[Slice], path: Path, *, title: str) -> None:
    """Writes a picture (.png, .svg) of a stretch of music; it needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Arc, FancyBboxPatch

    notes = _notes(music)
    width = _row_width(music)
    rows = -(-(music[-1].tick + music[-1].ticks) // width)
    low = min(pitch for _, pitch, _, _ in notes) - 2
    high = max(pitch for _, pitch, _, _ in notes) + 3
    figure, axes = plt.subplots(rows, 1, figsize=(13, 0.7 + 2.35 * rows), squeeze=False, layout="constrained")
    for row, axis in enumerate(axes[:, 0]):
        first, last = row * width, (row + 1) * width
        for pitch in range(low, high):
            if pitch % 12 in (1, 3, 6, 8, 10):  # the black keys
                axis.axhspan(pitch - 0.5, pitch + 0.5, color="#f4f1ec", zorder=0, linewidth=0)
        for tick in (piece.tick for piece in music if piece.bar and first <= piece.tick < last):
            axis.axvline(tick, color="#9a958c", linewidth=0.8, zorder=1)
        for piece in music:
            if piece.fermata and first <= piece.tick < last:
                middle = piece.tick + TICKS / 2
                arc = Arc((middle, high - 1.9), 3.2, 2.4, theta1=0, theta2=180, color="#55504a", linewidth=1.1)
                axis.add_patch(arc)
                axis.plot([middle], [high - 1.6], ".", color="#55504a", markersize=3)
            if piece.first and first <= piece.tick < last:
                axis.axvline(piece.tick, color="#55504a", linewidth=1.6, zorder=1)
        for voice, pitch, start, end in notes:
            left, right = max(start, first), min(end, last)
            if left < right:
                shape = FancyBboxPatch(
                    (left + 0.12, pitch - 0.36), right - left - 0.24, 0.72, boxstyle="round,pad=0,rounding_size=0.3",
                    facecolor=COLOURS[voice], edgecolor="white", linewidth=0.4, zorder=3,
                )  # fmt: skip
                axis.add_patch(shape)
        axis.set(xlim=(first, last), ylim=(low - 0.5, high))
        axis.set_yticks(range(-(-low // 12) * 12, high, 12))
        axis.set_yticklabels([f"C{pitch // 12 - 1}" for pitch in range(-(-low // 12) * 12, high, 12)])
        bars = [(number, piece.tick) for number, piece in enumerate((p for p in music if p.bar), start=1)]
        shown = [(number, tick) for number, tick in bars if first <= tick < last]
        axis.set_xticks([tick for _, tick in shown], [str(number) for number, _ in shown])
        axis.tick_params(length=0, labelsize=8, colors="#55504a")
        for side in axis.spines.values():
            side.set_visible(False)
    handles = [plt.Line2D([], [], color=COLOURS[voice], linewidth=6, label=NAMES[voice]) for voice in VOICES]
    figure.suptitle(title, x=0.012, ha="left", fontsize=12)
    figure.legend(handles=handles, loc="upper right", ncols=4, frameon=False, fontsize=9)
    axes[-1, 0].set_xlabel("bar", fontsize=9, color="#55504a")
    figure.savefig(path, dpi=130, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


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
