"""The tokens of four-part music: what they are called, and how a score becomes ids and ids become notes.

Time goes in beats (quarter notes) and in four ticks a beat (sixteenth notes). A piece reads, token by token:

    4/4 key-1  4 S65 A60 T57 B53  | S69 A65 T60 B53 .& B52  2 fermata S67 A64 T60 B48  3  4  end

- `4/4` or `3/4` is the metre, and `key-1` the key signature (one flat). They open a piece.
- `|`, `2`, `3` and `4` move to the next beat, which is this one of its bar. Every beat is written.
- `.e`, `.&` and `.a` move to the second, third or fourth sixteenth of the beat, if a note begins there.
- `fermata` says that the chord which begins here ends a phrase.
- `S67` begins a note in the soprano, of MIDI pitch 67. It lasts until the next `S…`; `S-` is silence.
- `end` moves to the next beat and ends the piece.

Any sequence of these tokens has a meaning, so what a model generates can always be played (see `Reader`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

VOICES = "SATB"
TICKS = 4  # in a beat; a beat is a quarter note
METRES = (3, 4)  # beats in a bar
LOWEST = {"S": 57, "A": 50, "T": 45, "B": 33}
HIGHEST = {"S": 82, "A": 76, "T": 71, "B": 65}
SHARPS = range(-6, 6)  # of a key signature; flats are negative

END = "end"
FERMATA = "fermata"
BEATS = ("|", "2", "3", "4")
PARTS_OF_A_BEAT = (".e", ".&", ".a")


def _names() -> tuple[str, ...]:
    header = [f"{beats}/4" for beats in METRES] + [f"key{sharps:+d}" for sharps in SHARPS]
    notes = [
        f"{voice}{pitch}" for voice in VOICES for pitch in ("-", *range(LOWEST[voice], HIGHEST[voice] + 1))
    ]
    return (END, *header, *BEATS, *PARTS_OF_A_BEAT, FERMATA, *notes)


NAMES = _names()
IDS = {name: number for number, name in enumerate(NAMES)}


@dataclass(frozen=True, kw_only=True)
class Note:
    """A note of one voice (0 to 3, from the top): MIDI pitch, first tick, and length in ticks."""

    voice: int
    pitch: int
    start: int
    length: int


@dataclass(kw_only=True)
class Score:
    """A piece for four voices.

    beats: in a bar (3 or 4). sharps: of the key signature; flats are negative. bars: the ticks at which bars
    begin. fermatas: the ticks of chords that end a phrase. ticks: the length of the piece. Each beat is four
    ticks, and tick 0 is on a beat.
    """

    beats: int
    sharps: int
    ticks: int
    notes: list[Note] = field(default_factory=list)
    bars: list[int] = field(default_factory=list)
    fermatas: list[int] = field(default_factory=list)


def encode(score: Score) -> list[int]:
    """Returns the ids of a piece; the end of the document is the last of them.

    Raises KeyError for a pitch, metre or key that has no token.
    """
    begins: dict[int, dict[int, str]] = {}
    for voice in range(4):
        free = 0  # the tick from which the voice is silent
        for note in sorted(
            (note for note in score.notes if note.voice == voice), key=lambda note: note.start
        ):
            if note.start > free:
                begins.setdefault(free, {})[voice] = "-"
            begins.setdefault(note.start, {})[voice] = str(note.pitch)
            free = note.start + note.length
        if free < score.ticks:
            begins.setdefault(free, {})[voice] = "-"

    bars, fermatas = set(score.bars), set(score.fermatas)
    names = [f"{score.beats}/4", f"key{score.sharps:+d}"]
    first = min(bars, default=0) // TICKS  # beats before the first bar line
    beat = -first % score.beats
    for tick in range(-(-score.ticks // TICKS) * TICKS):
        if tick % TICKS == 0:
            beat = 0 if tick in bars else beat
            names.append(BEATS[min(beat, len(BEATS) - 1)])
            beat += 1
        elif tick in begins or tick in fermatas:
            names.append(PARTS_OF_A_BEAT[tick % TICKS - 1])
        if tick in fermatas:
            names.append(FERMATA)
        names += [f"{VOICES[voice]}{pitch}" for voice, pitch in sorted(begins.get(tick, {}).items())]
    return [IDS[name] for name in [*names, END]]


@dataclass(kw_only=True)
class Event:
    """What begins at a tick of an endless stream.

    pitches: the new MIDI pitch of each voice that changes here; None for silence. bar: a bar begins here.
    first: a piece begins here, with the metre `beats` and the key signature `sharps`.
    """

    tick: int
    pitches: dict[int, int | None] = field(default_factory=dict)
    bar: bool = False
    fermata: bool = False
    first: bool = False
    beats: int = 4
    sharps: int = 0


class Reader:
    """Turns ids into events as they come, in constant memory.

    A token that is not valid at its place changes nothing: a second note of the same voice at a tick, or
    a part of a beat that is over already. `ignored` counts them.
    """

    def __init__(self) -> None:
        self.ignored = 0
        self._tick = -TICKS  # before the first beat
        self._event: Event | None = None
        self._first = True
        self._beats, self._sharps = 4, 0

    def read(self, token: int) -> Event | None:
        """Returns the event that this token completes by advancing the time; None for other tokens."""
        name = NAMES[token]
        if name in BEATS or name in PARTS_OF_A_BEAT:
            return self._advance(name)
        if name == END:
            done = self.close()
            # Silence, or the first chord of the next piece, begins at the next beat.
            self._event = None
            self._first = True
            return done
        if name.endswith("/4"):
            self._beats = int(name[0])
        elif name.startswith("key"):
            self._sharps = int(name[3:])
        elif self._event is None:
            self.ignored += 1  # a note before the first beat of a piece
        elif name == FERMATA:
            self._event.fermata = True
        else:
            voice = VOICES.index(name[0])
            self.ignored += voice in self._event.pitches
            self._event.pitches.setdefault(voice, None if name[1:] == "-" else int(name[1:]))
        return None

    def close(self) -> Event | None:
        """Returns the event that is still open, at the end of a stream."""
        done, self._event = self._event, None
        return done

    @property
    def next_beat(self) -> int:
        """The tick of the next beat: where a piece ends that ends now."""
        return (self._tick // TICKS + 1) * TICKS

    def _advance(self, name: str) -> Event | None:
        if name in BEATS:
            tick = self.next_beat
        else:
            tick = self._tick // TICKS * TICKS + PARTS_OF_A_BEAT.index(name) + 1
            if self._first or tick <= self._tick:
                self.ignored += 1
                return None
        done = self.close()
        self._tick = tick
        self._event = Event(
            tick=tick, bar=name == "|", first=self._first, beats=self._beats, sharps=self._sharps
        )
        self._first = False
        return done


def events(ids: Iterable[int]) -> Iterator[Event]:
    """Yields the events of a stream of ids, each as soon as it is complete."""
    reader = Reader()
    for token in ids:
        if (event := reader.read(token)) is not None:
            yield event
    if (event := reader.close()) is not None:
        yield event


def decode(ids: Iterable[int]) -> Score:
    """Returns the score of the first piece in `ids`: the inverse of `encode`."""
    reader, score = Reader(), Score(beats=4, sharps=0, ticks=0)
    sounding: dict[int, tuple[int, int]] = {}  # voice: pitch and start

    def end(voice: int, tick: int) -> None:
        if voice in sounding:
            pitch, start = sounding.pop(voice)
            score.notes.append(Note(voice=voice, pitch=pitch, start=start, length=tick - start))

    def take(event: Event | None) -> None:
        if event is None:
            return
        score.beats, score.sharps = event.beats, event.sharps
        score.bars += [event.tick] * event.bar
        score.fermatas += [event.tick] * event.fermata
        for voice, pitch in event.pitches.items():
            end(voice, event.tick)
            if pitch is not None:
                sounding[voice] = pitch, event.tick

    for token in ids:
        take(reader.read(token))
        if token == IDS[END]:
            break
    take(reader.close())
    score.ticks = reader.next_beat
    for voice in range(4):
        end(voice, score.ticks)
    score.notes.sort(key=lambda note: (note.start, note.voice))
    return score
