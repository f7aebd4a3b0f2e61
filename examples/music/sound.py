"""Makes music audible without a synthesiser: a small organ in a church, by additive synthesis.

Each note is a sum of partials with an attack and a release, each voice has its place from left to right, and
all of it goes through an echo of decaying noise. Everything is computed in pieces, in constant memory.
"""

from __future__ import annotations

import functools
import struct
import wave
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from perform import Slice
from scheme import VOICES

RATE = 44_100  # samples a second
PERIOD = 1 << 14  # points of a waveform
PARTIALS = np.array([1.0, 0.55, 0.26, 0.22, 0.07, 0.10, 0.03, 0.06])
DETUNED = (0.9992, 1.0, 1.0009)  # ranks of pipes that are never quite in tune make the tone alive
PLACES = (0.35, 0.62, 0.40, 0.55)  # of the voices from the top: 0 is left and 1 is right
LOUDNESS = (1.0, 0.82, 0.86, 1.1)
ATTACK, RELEASE = 0.045, 0.16  # seconds
ECHO_SECONDS, ECHO_SHARE = 2.2, 0.30
GAIN = 0.25  # four loud voices and their echo stay below full scale
BLOCK_SAMPLES = 1 << 15  # samples of a piece of the echo


@functools.lru_cache(maxsize=128)
def _waveform(pitch: int) -> np.ndarray:
    """One period of a pipe of this MIDI pitch, float64 [PERIOD]; high pipes have weaker partials."""
    turn = 2 * np.pi * np.arange(PERIOD) / PERIOD
    wave = np.zeros(PERIOD)
    for number, amplitude in enumerate(PARTIALS, start=1):
        duller = min(1.0, (2400 / (frequency(pitch) * number)) ** 0.7)
        wave += amplitude * duller * np.sin(number * turn + 1.7 * number)
    return wave


def frequency(pitch: int) -> float:
    """Returns the frequency of a MIDI pitch, in hertz."""
    return 440.0 * 2 ** ((pitch - 69) / 12)


@dataclass(kw_only=True)
class _Tone:
    """A note that sounds: its age in samples, and how many samples remain once it is released."""

    voice: int
    pitch: int
    age: int = 0
    remaining: int | None = None  # None while the note is held

    def render(self, count: int) -> np.ndarray:
        """Returns the next samples [count]; what lies behind the release is silence."""
        at = (self.age + np.arange(count)) / RATE
        tone = np.zeros(count)
        for rank, detuned in enumerate(DETUNED):
            turns = at * (frequency(self.pitch) * detuned) + rank / len(DETUNED)
            tone += _waveform(self.pitch)[(turns * PERIOD).astype(np.int64) % PERIOD]
        tone *= 1 - np.exp(-at / (ATTACK / 3))
        if self.remaining is not None:
            left = (self.remaining - np.arange(count)) / (RELEASE * RATE)
            tone *= np.clip(left, 0, 1) ** 2
            self.remaining -= count
        self.age += count
        return tone


def samples(music: Iterable[Slice]) -> Iterator[np.ndarray]:
    """Yields the sound of a stream of slices as stereo samples float64 [n, 2], about from -1 to 1."""
    return _echoed(_dry(music))


def _dry(music: Iterable[Slice]) -> Iterator[np.ndarray]:
    tones: list[_Tone] = []
    owed = 0.0  # fractions of a sample
    for piece in music:
        for tone in tones:
            ends = tone.voice in piece.begins or piece.pitches[tone.voice] is None
            if ends and tone.remaining is None:
                tone.remaining = round(RELEASE * RATE)
        for voice in sorted(piece.begins):
            pitch = piece.pitches[voice]
            assert pitch is not None
            tones.append(_Tone(voice=voice, pitch=pitch))
        owed += piece.seconds * RATE
        count, owed = int(owed), owed % 1
        yield _mixed(tones, count)
        tones = [tone for tone in tones if tone.remaining is None or tone.remaining > 0]
    for tone in tones:
        tone.remaining = round(RELEASE * RATE) if tone.remaining is None else tone.remaining
    yield _mixed(tones, round(RELEASE * RATE))


def _mixed(tones: list[_Tone], count: int) -> np.ndarray:
    stereo = np.zeros((count, 2))
    for tone in tones:
        place = PLACES[tone.voice]
        sides = np.array([np.cos(place * np.pi / 2), np.sin(place * np.pi / 2)])
        stereo += GAIN * LOUDNESS[tone.voice] / len(VOICES) * tone.render(count)[:, None] * sides
    return stereo


def _impulse() -> np.ndarray:
    """The answer of the room, float64 [n, 2]: decaying noise, different on both sides, dull like stone."""
    draw, count = np.random.default_rng(0), int(ECHO_SECONDS * RATE)
    noise = draw.standard_normal((count, 2)) * np.exp(-6.9 * np.arange(count) / count)[:, None]
    spectrum = np.fft.rfft(noise, axis=0)
    frequencies = np.fft.rfftfreq(count, 1 / RATE)[:, None]
    spectrum *= 1 / (1 + (frequencies / 2500) ** 2) * (frequencies > 80)
    room = np.fft.irfft(spectrum, count, axis=0) * np.minimum(1, np.arange(count) / (0.02 * RATE))[:, None]
    return room * ECHO_SHARE / np.sqrt((room**2).sum(0))


def _echoed(dry: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Adds the echo to sound, in blocks, by products of spectra (overlap-add)."""
    room = _impulse()
    size = 1 << (BLOCK_SAMPLES + len(room) - 1).bit_length()
    answer = np.fft.rfft(room, size, axis=0)
    tail = np.zeros((size, 2))
    for block in _blocks(dry):
        wet = tail + np.fft.irfft(np.fft.rfft(block, size, axis=0) * answer, size, axis=0)
        yield block + wet[: len(block)]
        tail = np.concatenate([wet[len(block) :], np.zeros((len(block), 2))])
    yield tail[: len(room)]


def _blocks(pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    waiting = np.zeros((0, 2))
    for piece in pieces:
        waiting = np.concatenate([waiting, piece])
        while len(waiting) >= BLOCK_SAMPLES:
            yield waiting[:BLOCK_SAMPLES]
            waiting = waiting[BLOCK_SAMPLES:]
    yield waiting


def as_integers(sound: np.ndarray) -> np.ndarray:
    """Returns 16-bit samples. Loud peaks are bent below full scale and never cut."""
    knee = 0.8
    over = np.maximum(np.abs(sound) - knee, 0)
    bent = np.where(over > 0, np.sign(sound) * (knee + (1 - knee) * np.tanh(over / (1 - knee))), sound)
    return np.round(bent * 32767).astype("<i2")


def write_wav(path: str, sound: Iterable[np.ndarray]) -> None:
    """Writes a WAV file; its length is corrected in the header at the end."""
    with wave.open(path, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        for block in sound:
            file.writeframes(as_integers(block).tobytes())


def stream_wav(out: BinaryIO, sound: Iterable[np.ndarray]) -> None:
    """Writes sound to a pipe, after the header of a WAV file whose length is the largest that there is."""
    most = 0xFFFFFFFF
    form = struct.pack("<HHIIHH", 1, 2, RATE, RATE * 4, 4, 16)
    out.write(b"RIFF" + struct.pack("<I", most) + b"WAVEfmt " + struct.pack("<I", len(form)) + form)
    out.write(b"data" + struct.pack("<I", most - 36))
    for block in sound:
        out.write(as_integers(block).tobytes())
        out.flush()
