/**
 * The tokens of four-part music, as in examples/music/scheme.py: which names they have, and what sounds when.
 * Any sequence of tokens has a meaning, so what a model generates can always be played.
 */

const VOICES = "SATB";
const TICKS = 4; // in a beat; a beat is a quarter note
// sharps of a key signature; flats are negative
export const KEYS = Array.from({ length: 12 }, (_, i) => i - 6);
export const END = "end";
const FERMATA = "fermata";
const BEATS = ["|", "2", "3", "4"];
const PARTS_OF_A_BEAT = [".e", ".&", ".a"];
const PAUSE = TICKS; // ticks of silence between two pieces
const FERMATA_FACTOR = 1.7; // a beat with a fermata is so much longer
const NOTE = /^([SATB])(-|\d{2})$/;

/**
 * @typedef {{
 *   tick: number, pitches: Map<number, number | null>, bar: boolean, fermata: boolean, first: boolean,
 * }} Event What begins at a tick: the new MIDI pitch of each voice that changes; null for silence.
 * @typedef {{
 *   seconds: number, pitches: (number | null)[], begins: number[], bar: boolean, fermata: boolean,
 *   first: boolean,
 * }} Slice A stretch of time in which no note begins or ends.
 */

/** Whether a vocabulary is for four-part music. @param {readonly string[] | null} names */
export function isMusic(names) {
  const needed = [END, FERMATA, "4/4", "key+0", ...BEATS, ...PARTS_OF_A_BEAT, "S-", "A-", "T-", "B-"];
  return Array.isArray(names) && needed.every((name) => names.includes(name));
}

/** The name of a key signature's token. @param {number} sharps */
export function keyName(sharps) {
  return `key${sharps < 0 ? "" : "+"}${sharps}`;
}

/** Turns the names of tokens into events as they come, in constant memory. */
export class Reader {
  #tick = -TICKS;
  /** @type {Event | null} */
  #event = null;
  #first = true;

  /**
   * The event that this token completes, by advancing the time; null for other tokens.
   * @param {string} name
   */
  read(name) {
    if (BEATS.includes(name) || PARTS_OF_A_BEAT.includes(name)) return this.#advance(name);
    if (name === END) {
      this.#first = true;
      return this.close();
    }
    if (name.endsWith("/4") || name.startsWith("key")) return null;
    const note = NOTE.exec(name);
    if (this.#event === null) return null; // a note before the first beat of a piece
    if (name === FERMATA) this.#event.fermata = true;
    const voice = note ? VOICES.indexOf(note[1]) : -1;
    if (note && !this.#event.pitches.has(voice))
      this.#event.pitches.set(voice, note[2] === "-" ? null : Number(note[2]));
    return null;
  }

  /** The event that is still open, at the end of a piece or stream. */
  close() {
    const done = this.#event;
    this.#event = null;
    return done;
  }

  /** @param {string} name */
  #advance(name) {
    const beat = Math.floor(this.#tick / TICKS);
    const tick = BEATS.includes(name) ? (beat + 1) * TICKS : beat * TICKS + PARTS_OF_A_BEAT.indexOf(name) + 1;
    if (PARTS_OF_A_BEAT.includes(name) && (this.#first || tick <= this.#tick)) return null;
    const done = this.close();
    this.#tick = tick;
    this.#event = { tick, pitches: new Map(), bar: name === "|", fermata: false, first: this.#first };
    this.#first = false;
    return done;
  }
}

/** Turns events into slices, each as soon as the next event is known. */
export class Performer {
  tempo = 72; // quarter notes a minute
  #pitches = /** @type {(number | null)[]} */ ([null, null, null, null]);
  /** @type {Event | null} */
  #last = null;

  /** @param {Event} event @returns {Slice[]} */
  play(event) {
    const last = this.#last;
    const slices = last ? [this.#until(last, event.tick - last.tick)] : [];
    if (event.first) {
      if (last) slices.push(this.#silence());
      this.#pitches = [null, null, null, null];
    }
    for (const [voice, pitch] of event.pitches) this.#pitches[voice] = pitch;
    this.#last = event;
    return slices;
  }

  /** @param {Event} last @param {number} ticks @returns {Slice} */
  #until(last, ticks) {
    return {
      seconds: ticks * (60 / this.tempo / TICKS) * (last.fermata ? FERMATA_FACTOR : 1),
      pitches: [...this.#pitches],
      begins: [...last.pitches].filter(([, pitch]) => pitch !== null).map(([voice]) => voice),
      bar: last.bar,
      fermata: last.fermata,
      first: last.first,
    };
  }

  /** @returns {Slice} */
  #silence() {
    const seconds = PAUSE * (60 / this.tempo / TICKS);
    const pitches = [null, null, null, null];
    return { seconds, pitches, begins: [], bar: false, fermata: false, first: false };
  }
}
