"""The sound of the page by its numbers: its pitches, its loudness, and that it ends."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RATE, SECONDS = 44_100, 6
BEGINS, ENDS, SILENT = 0.5, 2.5, 5.5  # seconds: the chord begins and is released, and its echo is over
CHORD = (67, 64, 60, 48)  # soprano, alto, tenor, bass: C major
# What the page's organ plays, computed as fast as possible in place of being heard.
RENDER = """async ({ chord, rate, seconds, begins, ends }) => {
  const { Organ } = await import("./page/sound.js");
  const context = new OfflineAudioContext(2, rate * seconds, rate);
  const organ = new Organ(1, context);
  chord.forEach((pitch, voice) => organ.begin({ voice, pitch, from: begins }).end(ends));
  const buffer = await context.startRendering();
  const bytes = (side) => new Uint8Array(buffer.getChannelData(side).buffer);
  const text = (side) => {
    let all = "";
    for (let at = 0, from = bytes(side); at < from.length; at += 32768)
      all += String.fromCharCode(...from.subarray(at, at + 32768));
    return btoa(all);
  };
  return [text(0), text(1)];
}"""


def frequency(pitch: int) -> float:
    return 440.0 * 2 ** ((pitch - 69) / 12)


def spectrum(sound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hertz and amplitude of the sound between the attack and the release, of both sides together."""
    held = sound[:, round((BEGINS + 0.4) * RATE) : round(ENDS * RATE)]
    held = held.mean(axis=0) * np.hanning(held.shape[1])
    return np.fft.rfftfreq(len(held), 1 / RATE), np.abs(np.fft.rfft(held))


def test_a_chord_has_its_pitches_and_nothing_clips(
    artefacts: dict[str, Path], make_site: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(make_site(artefacts["ring"]))
    asked = {"chord": CHORD, "rate": RATE, "seconds": SECONDS, "begins": BEGINS, "ends": ENDS}
    sides = page.do(RENDER, asked)
    sound = np.stack([np.frombuffer(base64.b64decode(side), np.float32) for side in sides])
    assert np.isfinite(sound).all()
    assert not sound[:, : round(BEGINS * RATE)].any(), "nothing sounds before the chord"
    assert 0.1 < np.abs(sound).max() < 1
    hertz, amplitude = spectrum(sound)
    strongest = amplitude.max()
    partials = {frequency(pitch) * number for pitch in CHORD for number in range(1, 9)}
    for pitch in CHORD:
        near = np.abs(hertz - frequency(pitch)) < 0.03 * frequency(pitch)
        peak = hertz[near][amplitude[near].argmax()]
        assert abs(peak - frequency(pitch)) < 1, "within a hertz, far less than a semitone"
        assert amplitude[near].max() > 0.15 * strongest
    # What is strong is a partial of the four notes: no hum, no distortion.
    for peak in hertz[amplitude > 0.1 * strongest]:
        assert min(abs(peak - partial) for partial in partials) < 4, peak
    # It dies away, and stays silent.
    assert np.abs(sound[:, round(SILENT * RATE) :]).max() < 1e-3
