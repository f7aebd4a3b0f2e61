/** The piano roll: notes of four voices over time, moving under a line that marks now. */
import { sized } from "./plots.js";

const SHOWN_SECONDS = 14; // of music that the picture shows
const PAST_SHARE = 0.25; // share of the picture that has sounded already
const [LOWEST, HIGHEST] = [33, 82]; // MIDI pitches
const TOP_PIXELS = 26; // pixels above the highest pitch, for fermatas
const BLACK = [1, 3, 6, 8, 10]; // keys of an octave

/**
 * @typedef {{
 *   voice: number, pitch: number, from: number, to: number, end: ((at: number) => void) | null,
 * }} Note in seconds. `end`: ends the sound of it; null if it does not sound yet
 * @typedef {{at: number, kind: "bar" | "piece" | "fermata"}} Line
 */

/** What the picture shows; what has left it is forgotten. */
export class Roll {
  /** @type {Note[]} */
  notes = [];
  /** @type {Line[]} */
  lines = [];

  /** @param {number} now */
  forget(now) {
    const before = now - SHOWN_SECONDS;
    this.notes = this.notes.filter((note) => note.to > before);
    this.lines = this.lines.filter((line) => line.at > before);
  }

  clear() {
    this.notes = [];
    this.lines = [];
  }

  /**
   * @param {HTMLCanvasElement} canvas @param {number} now
   * @param {{voices: string[], ink: string, soft: string, line: string, sheet: string}} colours
   */
  draw(canvas, now, colours) {
    const { context, width, height } = sized(canvas);
    if (!context) return;
    const from = now - SHOWN_SECONDS * PAST_SHARE;
    const x = (/** @type {number} */ at) => ((at - from) / SHOWN_SECONDS) * width;
    const step = (height - TOP_PIXELS) / (HIGHEST - LOWEST + 5);
    const y = (/** @type {number} */ pitch) => TOP_PIXELS + (HIGHEST + 2 - pitch) * step;
    context.clearRect(0, 0, width, height);
    context.fillStyle = colours.sheet;
    for (let pitch = LOWEST - 2; pitch <= HIGHEST + 2; pitch++) {
      if (!BLACK.includes(((pitch % 12) + 12) % 12)) context.fillRect(0, y(pitch), width, step - 0.5);
    }
    for (const line of this.lines) {
      context.fillStyle = line.kind === "fermata" ? colours.ink : colours.line;
      if (line.kind === "fermata") drawFermata(context, x(line.at), TOP_PIXELS - 5, colours.ink);
      else context.fillRect(Math.round(x(line.at)), 0, line.kind === "piece" ? 2.5 : 1, height);
    }
    for (const note of this.notes) {
      const sounding = note.from <= now && now < note.to;
      context.globalAlpha = note.to <= now ? 0.5 : sounding ? 1 : 0.82;
      context.fillStyle = colours.voices[note.voice];
      const left = x(note.from);
      const wide = Math.max(2, x(note.to) - left - 1.5);
      const high = Math.max(4, step * 1.35);
      context.beginPath();
      context.roundRect(left, y(note.pitch) + step / 2 - high / 2, wide, high, Math.min(3, high / 2));
      context.fill();
      if (sounding) {
        context.lineWidth = 1.5;
        context.strokeStyle = colours.ink;
        context.stroke();
      }
    }
    context.globalAlpha = 1;
    context.fillStyle = colours.ink;
    context.fillRect(Math.round(x(now)), 0, 1.5, height);
  }
}

/**
 * A fermata: half a circle with a dot in it, over the beginning of its chord.
 * @param {CanvasRenderingContext2D} context @param {number} left @param {number} bottom
 * @param {string} colour
 */
function drawFermata(context, left, bottom, colour) {
  const radius = 9;
  context.beginPath();
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.arc(left + radius + 3, bottom, radius, Math.PI, 0);
  context.stroke();
  context.beginPath();
  context.arc(left + radius + 3, bottom - 2, 2, 0, 2 * Math.PI);
  context.fill();
}
