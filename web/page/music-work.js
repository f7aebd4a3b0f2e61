/** Playing what a music model generates: a little ahead of the clock, for as long as one listens. */
import { Organ } from "./sound.js";
import { Roll } from "./roll.js";
import { midiFile, wavFile } from "./music-file.js";
import { END, KEYS, Performer, Reader, keyName } from "./scheme.js";
import { button, colour, download, fail, hideError, linkOf, part, say, settings } from "./side.js";
import { colourOf, inBits } from "./tokens.js";

const AHEAD_SECONDS = 4; // seconds of music that are ready before they sound
const FILL_SECONDS = 9; // seconds of a new piece that are written before it plays: they fill the picture
const REQUEST_TOKENS = 24; // tokens that are asked for at a time
const SHOWN_TOKENS = 240; // tokens that are shown
const START_SECONDS = 0.25; // seconds until the first note
const MAX_NOTES = 2500; // notes for the files

export class MusicWork {
  /** @type {import("./back-end.d.ts").Handle} the stream of the piece, which `begin` starts */
  handle = /** @type {any} */ (null);
  // What belongs to one piece; `#fresh` begins another one.
  reader = new Reader();
  performer = new Performer();
  /** @type {import("./roll.js").Note[]} what the files of MIDI and WAV hold */
  notes = [];
  /** Seconds on the clock at which the piece begins. */
  start = 0;
  /** Up to which second everything is scheduled. */
  cursor = 0;
  /** @type {(import("./roll.js").Note | null)[]} the notes that sound there */
  open = [];
  /** @type {number[]} the tokens that come before what is generated next */
  opening = [];
  pieces = 0;

  /** @param {import("./back-end.d.ts").BackEnd} backEnd @param {import("./side.js").Side} side */
  constructor(backEnd, side) {
    this.backEnd = backEnd;
    this.names = /** @type {string[]} */ (backEnd.describe().names);
    this.side = side;
    this.roll = new Roll();
    /** @type {Organ | null} made with the first click, as browsers ask */
    this.organ = null;
    /** Ends what was asked for last. */
    this.control = new AbortController();
    this.control.abort();
    /** @type {Promise<unknown>} What was asked for last, and with it everything before. */
    this.turn = Promise.resolve();
    /** @type {any} the settings of the piece: what a link carries */
    this.origin = {};
    this.seed = 0;
    this.#fresh();
    this.#keys();
    for (const id of ["streams", "fork", "rename", "delete", "count-field"]) part(id).hidden = true;
    part("music-settings").hidden = false;
    part("streams-title").textContent = "This piece";
    part("play").addEventListener("click", () => this.toggle().catch(fail));
    button("piece", () => void this.piece().catch(fail));
    button("midi", () => download("chorale.mid", midiFile(this.#written, this.#tempo)));
    button("wav", async () => download("chorale.wav", await wavFile(this.#written)));
    part("volume").addEventListener("input", () => this.organ && (this.organ.volume = this.#volume));
    part("tempo").addEventListener("change", () => (this.performer.tempo = this.#tempo));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(part("roll"));
  }

  /** Writes the beginning of a piece, so that there is one to see; nothing sounds yet. @param {any} link */
  async begin(link) {
    this.handle = await this.backEnd.start();
    for (const id of ["metre", "key"])
      if (link?.[id]) /** @type {HTMLSelectElement} */ (part(id)).value = link[id];
    await this.#piece(new AbortController().signal, link?.seed ?? settings().seed);
    this.#draw();
  }

  /** Whether music plays, or was asked for and begins soon. */
  get running() {
    return !this.control.signal.aborted;
  }

  /** Plays on, or pauses. */
  async toggle() {
    if (this.running) return this.stop();
    await this.#instead((signal) => this.#play(signal));
  }

  /** Begins a new piece, in the metre and key that were chosen. */
  async piece() {
    await this.#instead(async (signal) => {
      await this.#piece(signal, settings().seed);
      await this.#play(signal);
    });
  }

  /**
   * Ends what plays, and then does some work; one work at a time.
   * @param {(signal: AbortSignal) => Promise<void>} work
   */
  async #instead(work) {
    this.control.abort();
    const control = new AbortController();
    this.control = control;
    const mine = this.turn.then(() => work(control.signal)).finally(() => control.abort());
    this.turn = mine.catch(() => {});
    return mine;
  }

  /** @param {AbortSignal} signal @param {number} seed */
  async #piece(signal, seed) {
    if (signal.aborted) return;
    this.organ?.hush();
    if (this.handle.position) await this.handle.restart();
    this.#fresh();
    this.side.speed.cut();
    const { tokens: _, seed: __, ...options } = settings();
    const [metre, key] = ["metre", "key"].map((id) => /** @type {HTMLSelectElement} */ (part(id)).value);
    this.seed = seed;
    this.origin = { ...options, metre, key: key || null, seed };
    const header = key ? [metre, key] : [metre];
    for (const name of header) this.#take(name, NaN);
    this.opening = [END, ...header].map((name) => this.names.indexOf(name));
    while (!signal.aborted && this.cursor - this.start < FILL_SECONDS) await this.#more();
  }

  /** Pauses; what is ready already sounds when it resumes. */
  async stop() {
    this.control.abort();
    await this.turn;
    if (!this.running) await this.organ?.context.suspend();
  }

  /** The same as `stop`. */
  async pause() {
    await this.stop();
  }

  /** The page is closed: this piece cannot be heard again. */
  leave() {
    this.backEnd.forget?.(this.handle);
  }

  /** A link to this page that makes the same piece. */
  link() {
    return linkOf(this.origin);
  }

  /** The stream as a file. */
  async save() {
    await this.stop();
    return this.handle.save({ page: 1, seed: this.seed });
  }

  /** @param {Uint8Array} file */
  async load(file) {
    await this.stop();
    await this.#instead(async () => {
      const { handle } = await this.backEnd.load(file);
      await this.handle.dispose();
      this.handle = handle;
      this.organ?.hush();
      this.#fresh();
      // the beat and the voices that sound are not in the file: a bar line begins the rest
      this.opening = [this.names.indexOf("|")];
      this.#take("|", NaN);
      hideError();
      this.#show();
      this.#draw();
      part("music-state").textContent = `loaded, ${handle.position.toLocaleString("en")} tokens`;
    });
  }

  #fresh() {
    this.reader = new Reader();
    this.performer = new Performer();
    this.performer.tempo = this.#tempo;
    this.roll.clear();
    this.notes = [];
    this.start = this.organ?.now ?? 0;
    this.cursor = this.start + START_SECONDS;
    this.open = [null, null, null, null];
    this.opening = [];
    this.pieces = 0;
    part("tokens").replaceChildren();
  }

  /** Plays until it is aborted. @param {AbortSignal} signal */
  async #play(signal) {
    if (signal.aborted) return;
    this.#button(true);
    hideError();
    say("Playing.");
    try {
      this.organ ??= new Organ(this.#volume);
      await this.organ.resume();
      for (const note of this.roll.notes) this.#sound(note);
      this.#animate(signal);
      while (!signal.aborted) {
        if (this.cursor - this.organ.now > AHEAD_SECONDS) await rest(100, signal);
        else await this.#more();
      }
    } finally {
      this.#button(false);
      say("Paused.");
    }
  }

  /** Generates some tokens. They are never cut short, so that a seed always makes the same piece. */
  async #more() {
    const { side } = this;
    const { tokens: _, ...options } = settings();
    side.begin(this.handle.position);
    const prompt = this.opening;
    this.opening = [];
    const given = { ...options, seed: this.seed++, max_tokens: REQUEST_TOKENS };
    for await (const { token, bits } of this.handle.generate(prompt, given)) {
      side.reach(this.handle.position);
      this.#take(this.names[token], bits);
    }
    this.#show();
  }

  /** One more token: it may complete what sounds next. @param {string} name @param {number} bits */
  #take(name, bits) {
    const tokens = part("tokens");
    const span = document.createElement("span");
    span.textContent = name;
    span.title = inBits(bits);
    const step = colourOf(bits);
    if (step > 0) span.className = `s${step}`;
    tokens.append(span, " ");
    while (tokens.childNodes.length > 2 * SHOWN_TOKENS) tokens.firstChild?.remove();
    tokens.scrollTop = tokens.scrollHeight;
    const event = this.reader.read(name);
    for (const slice of event ? this.performer.play(event) : []) this.#schedule(slice);
  }

  /** @param {import("./scheme.js").Slice} slice */
  #schedule(slice) {
    const { organ, roll } = this;
    // the model is too slow
    if (organ && this.cursor < organ.now + START_SECONDS / 2) this.cursor = organ.now + START_SECONDS;
    const at = this.cursor;
    for (const [voice, pitch] of slice.pitches.entries()) {
      const begins = slice.begins.includes(voice);
      if (begins || pitch === null) {
        this.open[voice]?.end?.(at);
        this.open[voice] = null;
      }
      if (begins && pitch !== null) {
        const note = { voice, pitch, from: at, to: at, end: null };
        roll.notes.push(note);
        this.notes.push(note);
        this.open[voice] = note;
        this.#sound(note);
      }
    }
    this.cursor += slice.seconds;
    for (const note of this.open) if (note) note.to = this.cursor;
    if (slice.first) {
      roll.lines.push({ at, kind: "piece" });
      this.pieces++;
    } else if (slice.bar) roll.lines.push({ at, kind: "bar" });
    if (slice.fermata) roll.lines.push({ at, kind: "fermata" });
    if (this.notes.length > MAX_NOTES) this.notes.splice(0, MAX_NOTES / 10);
  }

  /** Makes a note sound, unless it already does or is over. @param {import("./roll.js").Note} note */
  #sound(note) {
    if (!this.organ || note.end || note.to < this.organ.now) return;
    note.end = this.organ.begin(note).end;
    if (!this.open.includes(note)) note.end(note.to);
  }

  /** The notes so far, from the beginning of the piece. */
  get #written() {
    const first = this.notes[0]?.from ?? 0;
    return this.notes.map(({ voice, pitch, from, to }) => ({
      voice,
      pitch,
      from: from - first,
      to: to - first,
    }));
  }

  #show() {
    const { position } = this.handle;
    this.side.show();
    this.roll.forget(this.organ?.now ?? 0);
    const pieces = this.pieces > 1 ? ` · piece ${this.pieces}` : "";
    part("music-state").textContent = `${position.toLocaleString("en")} tokens${pieces}`;
  }

  #draw() {
    const canvas = /** @type {HTMLCanvasElement} */ (part("roll"));
    const colours = {
      voices: [0, 1, 2, 3].map((voice) => colour(`v${voice}`)),
      ink: colour("ink"),
      soft: colour("soft"),
      line: colour("line"),
      sheet: colour("sheet"),
    };
    this.roll.draw(canvas, this.organ?.now ?? 0, colours);
  }

  /** Draws until it is aborted, and once more. @param {AbortSignal} signal */
  #animate(signal) {
    this.#draw();
    if (signal.aborted) return;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (calm) setTimeout(() => this.#animate(signal), 500);
    else requestAnimationFrame(() => this.#animate(signal));
  }

  #keys() {
    const select = part("key");
    const any = document.createElement("option");
    any.value = "";
    any.textContent = "any";
    select.replaceChildren(any);
    for (const sharps of KEYS.filter((each) => this.names.includes(keyName(each)))) {
      const option = document.createElement("option");
      option.value = keyName(sharps);
      const count = Math.abs(sharps);
      option.textContent =
        sharps === 0
          ? "no sharps or flats"
          : `${count} ${sharps < 0 ? "flat" : "sharp"}${count > 1 ? "s" : ""}`;
      select.append(option);
    }
  }

  get #tempo() {
    return Math.min(200, Math.max(30, Number(/** @type {HTMLInputElement} */ (part("tempo")).value) || 72));
  }

  get #volume() {
    return Number(/** @type {HTMLInputElement} */ (part("volume")).value);
  }

  /** @param {boolean} running */
  #button(running) {
    const button = part("play");
    button.textContent = running ? "Pause" : "Play";
    button.classList.toggle("running", running);
  }
}

/**
 * Waits, but no longer than until a signal is aborted.
 * @param {number} milliseconds @param {AbortSignal} signal
 */
function rest(milliseconds, signal) {
  return new Promise((/** @type {(value?: unknown) => void} */ resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
