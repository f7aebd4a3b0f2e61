"""Four-part music in time: what sounds from when to when, in ticks and in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scheme import TICKS, VOICES, Event

PAUSE = TICKS  # ticks of silence between two pieces
HELD = 1.7  # a beat with a fermata is so much longer


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A stretch of time in which no note begins or ends.

    tick, ticks: where it begins, and its length. seconds: its length. pitches: what each voice sounds, from
    the top; None for silence. begins: the voices whose note begins here. bar, fermata, first, beats, sharps:
    as in `scheme.Event`.
    """

    tick: int
    ticks: int
    seconds: float
    pitches: tuple[int | None, ...]
    begins: frozenset[int] = frozenset()
    bar: bool = False
    fermata: bool = False
    first: bool = False
    beats: int = 4
    sharps: int = 0


def slices(events: Iterable[Event], *, tempo: float) -> Iterator[Slice]:
    """Yields the slices of a stream of events, each as soon as the next event is known.

    tempo: quarter notes a minute. The last event lasts for a beat. A slice in which a chord with a fermata
    begins is longer, and there is a pause between two pieces.
    """
    second = 60 / tempo / TICKS  # of a tick
    pitches: list[int | None] = [None] * len(VOICES)
    last: Event | None = None
    paused = 0  # ticks of all pauses so far

    def until(ticks: int) -> Slice:
        assert last is not None
        seconds = ticks * second * (HELD if last.fermata else 1.0)
        return Slice(
            tick=last.tick + paused, ticks=ticks, seconds=seconds, pitches=tuple(pitches),
            begins=frozenset(voice for voice, pitch in last.pitches.items() if pitch is not None),
            bar=last.bar, fermata=last.fermata, first=last.first, beats=last.beats, sharps=last.sharps,
        )  # fmt: skip

    for event in events:
        if last is not None:
            yield until(event.tick - last.tick)
            if event.first:
                silence = (None,) * len(VOICES)
                yield Slice(tick=event.tick + paused, ticks=PAUSE, seconds=PAUSE * second, pitches=silence)
                paused += PAUSE
        if event.first:
            pitches = [None] * len(VOICES)
        for voice, pitch in event.pitches.items():
            pitches[voice] = pitch
        last = event
    if last is not None:
        yield until(TICKS - last.tick % TICKS)
