"""What the music example writes: a MIDI file that is parsed again, sound of the right pitch, a picture."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from midi import MidiFile
from perform import Slice, slices
from scheme import IDS, events
from sound import RATE, samples, stream_wav, write_wav

LINE = "4/4 key+2 | S74 A69 T66 B50 2 S76 .& B52 3 fermata S- B45 4 S74 end 3/4 key-3 | S72 A67 T60 B48 end"


def music(line: str = LINE, *, tempo: float = 120) -> list[Slice]:
    return list(slices(events([IDS[name] for name in line.split()]), tempo=tempo))


def parsed(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The messages of a MIDI file of one track, each with its time in ticks: an independent reader."""
    assert content[:4] == b"MThd"
    assert content[8:14] == b"\x00\x00\x00\x01\x01\xe0"  # format 0, one track, 480 ticks a quarter note
    assert content[14:18] == b"MTrk"
    assert int.from_bytes(content[18:22], "big") == len(content) - 22
    at, tick = 22, 0
    while at < len(content):
        delta = 0
        while True:
            byte = content[at]
            at, delta = at + 1, delta << 7 | byte & 127
            if byte < 128:
                break
        tick += delta
        size = 3 + content[at + 2] if content[at] == 0xFF else 2 if content[at] >> 4 == 0xC else 3
        yield tick, content[at : at + size]
        at += size


def test_midi_holds_the_notes_of_the_music(tmp_path: Path) -> None:
    with MidiFile(tmp_path / "a.mid", tempo=120) as file:
        for piece in music():
            file.write(piece)
    messages = list(parsed((tmp_path / "a.mid").read_bytes()))
    started: dict[tuple[int, int], int] = {}
    notes = []
    for tick, message in messages:
        if message[0] >> 4 == 9:
            started[message[0] & 15, message[1]] = tick
        elif message[0] >> 4 == 8:
            notes.append((message[0] & 15, message[1], started.pop((message[0] & 15, message[1])), tick))
    assert not started
    assert sorted(notes) == [
        (0, 72, 2400, 2880), (0, 74, 0, 480), (0, 74, 1440, 1920), (0, 76, 480, 960),
        (1, 67, 2400, 2880), (1, 69, 0, 1920),
        (2, 60, 2400, 2880), (2, 66, 0, 1920),
        (3, 45, 960, 1920), (3, 48, 2400, 2880), (3, 50, 0, 720), (3, 52, 720, 960),
    ]  # fmt: skip
    assert messages[-1] == (2880, b"\xff\x2f\x00")
    tempos = [(tick, int.from_bytes(m[3:], "big")) for tick, m in messages if m[:2] == b"\xff\x51"]
    assert tempos == [(0, 500_000), (960, 850_000), (1440, 500_000)]
    assert [m[3:] for _, m in messages if m[:2] == b"\xff\x58"] == [b"\x04\x02\x18\x08", b"\x03\x02\x18\x08"]
    assert [m[3:] for _, m in messages if m[:2] == b"\xff\x59"] == [b"\x02\x00", b"\xfd\x00"]


@pytest.mark.parametrize("tempo", [58, 76])
def test_a_fermata_slows_its_own_beat_at_every_tempo(tmp_path: Path, tempo: float) -> None:
    with MidiFile(tmp_path / "a.mid", tempo=tempo) as file:
        for piece in music(tempo=tempo):
            file.write(piece)
    messages = parsed((tmp_path / "a.mid").read_bytes())
    found = [(tick, int.from_bytes(m[3:], "big")) for tick, m in messages if m[:2] == b"\xff\x51"]
    quarter = 60e6 / tempo
    assert found == [(0, round(quarter)), (960, round(1.7 * quarter)), (1440, round(quarter))]


def test_sound_has_the_right_pitch_and_length_and_never_clips(tmp_path: Path) -> None:
    write_wav(str(tmp_path / "a.wav"), samples(music("4/4 key+0 | S69 2 3 4 end", tempo=60)))
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, RATE)
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2)
    assert 4.0 < len(sound) / RATE < 7.0  # four beats, and the echo
    spectrum = np.abs(np.fft.rfft(sound[RATE : 3 * RATE, 0].astype(float)))
    assert abs(spectrum.argmax() / 2 - 440) <= 1
    assert np.abs(sound[-RATE // 10 :]).max() < 0.01 * np.abs(sound).max()  # it has died away
    loud = np.concatenate(list(samples(music("4/4 key+0 | S81 A76 T69 B57 2 S81 A76 T69 B57 3 end"))))
    assert 0.2 < np.abs(loud).max() < 1.0


def test_streamed_sound_is_the_file_without_a_length(tmp_path: Path) -> None:
    pipe = io.BytesIO()
    stream_wav(pipe, samples(music()))
    write_wav(str(tmp_path / "a.wav"), samples(music()))
    streamed, written = pipe.getvalue(), (tmp_path / "a.wav").read_bytes()
    assert streamed[44:] == written[44:]
    assert streamed[8:40] == written[8:40]
    assert streamed[4:8] == b"\xff" * 4
