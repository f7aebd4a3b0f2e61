/** Music as files: MIDI with a channel for each voice, and WAV as the organ plays it. */
import { Organ } from "./sound.js";

const TICKS_PER_QUARTER = 480; // MIDI ticks in a quarter note
const ORGAN_PROGRAM = 19; // "church organ" of General MIDI, counted from 0
const LOUDNESS = 84;
const SAMPLE_RATE = 44_100; // samples per second
const ECHO_SECONDS = 3; // seconds after the last note

/** @typedef {{voice: number, pitch: number, from: number, to: number}} Note in seconds */

/** @param {Note[]} notes @param {number} tempo quarter notes per minute */
export function midiFile(notes, tempo) {
  const ticks = (/** @type {number} */ seconds) => Math.round((seconds * tempo * TICKS_PER_QUARTER) / 60);
  const events = notes.flatMap(({ voice, pitch, from, to }) => [
    { at: ticks(from), order: 1, bytes: [0x90 | voice, pitch, LOUDNESS] },
    { at: ticks(to), order: 0, bytes: [0x80 | voice, pitch, 0] },
  ]);
  events.sort((a, b) => a.at - b.at || a.order - b.order);
  const quarter = Math.round(60e6 / tempo); // microseconds
  const track = [0, 0xff, 0x51, 3, ...bigEndian(quarter, 3)];
  for (let voice = 0; voice < 4; voice++)
    track.push(0, 0xc0 | voice, ORGAN_PROGRAM, 0, 0xb0 | voice, 10, 40 + 16 * voice);
  let now = 0;
  for (const { at, bytes } of events) {
    track.push(...variable(at - now), ...bytes);
    now = at;
  }
  track.push(0, 0xff, 0x2f, 0);
  const head = [...ascii("MThd"), ...bigEndian(6, 4), 0, 0, 0, 1, ...bigEndian(TICKS_PER_QUARTER, 2)];
  const bytes = Uint8Array.from([...head, ...ascii("MTrk"), ...bigEndian(track.length, 4), ...track]);
  return new Blob([bytes], { type: "audio/midi" });
}

/** @param {Note[]} notes */
export async function wavFile(notes) {
  const seconds = Math.max(0, ...notes.map(({ to }) => to)) + ECHO_SECONDS;
  const organ = new Organ(
    1,
    /** @type {any} */ (new OfflineAudioContext(2, Math.ceil(seconds * SAMPLE_RATE), SAMPLE_RATE)),
  );
  for (const note of notes) organ.begin(note).end(note.to);
  const buffer = await /** @type {any} */ (organ.context).startRendering();
  const sides = [0, 1].map((side) => buffer.getChannelData(side));
  const samples = new Int16Array(2 * buffer.length);
  for (let i = 0; i < buffer.length; i++)
    for (const side of [0, 1]) samples[2 * i + side] = 32767 * Math.max(-1, Math.min(1, sides[side][i]));
  const head = new DataView(new ArrayBuffer(44));
  ascii("RIFF").forEach((code, i) => head.setUint8(i, code));
  head.setUint32(4, 36 + samples.byteLength, true);
  ascii("WAVEfmt ").forEach((code, i) => head.setUint8(8 + i, code));
  head.setUint32(16, 16, true); // bytes of the format
  head.setUint16(20, 1, true); // integers
  head.setUint16(22, 2, true); // channels
  head.setUint32(24, SAMPLE_RATE, true);
  head.setUint32(28, 4 * SAMPLE_RATE, true);
  head.setUint16(32, 4, true); // bytes of a frame
  head.setUint16(34, 16, true); // bits of a sample
  ascii("data").forEach((code, i) => head.setUint8(36 + i, code));
  head.setUint32(40, samples.byteLength, true);
  return new Blob([head, samples], { type: "audio/wav" });
}

/** @param {string} text */
function ascii(text) {
  return Array.from(text, (letter) => letter.charCodeAt(0));
}

/** @param {number} value @param {number} count of bytes */
function bigEndian(value, count) {
  return Array.from({ length: count }, (_, i) => (value >>> (8 * (count - 1 - i))) & 255);
}

/** A number as MIDI writes delays: seven bits in each byte. @param {number} value */
function variable(value) {
  const bytes = [value & 127];
  while ((value >>>= 7)) bytes.unshift((value & 127) | 128);
  return bytes;
}
