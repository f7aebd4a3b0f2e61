/** Playing what a music model generates: a little ahead of the clock, for as long as one listens. */
import { Organ } from "./sound.js";
import { Roll } from "./roll.js";
import { END, KEYS, Performer, Reader, keyName } from "./scheme.js";
import { colour, drawing, part } from "./side.js";
import { colourOf, inBits } from "./tokens.js";

const AHEAD = 4; // seconds of music that are ready before they sound
const AT_ONCE = 24; // tokens that are asked for at a time
const LATEST = 240; // tokens that are shown
const START = 0.25; // seconds until the first note

/** @typedef {import("./text-work.js").Page} Page */

export class MusicWork {
  /**
   * @param {import("../index.js").Model} model @param {import("../index.js").Memory} memory
   * @param {readonly string[]} names of the tokens @param {Page} page
   */
  constructor(model, memory, names, page) {
    this.model = model;
    this.memory = memory;
    this.names = names;
    this.page = page;
    this.roll = new Roll();
    /** @type {Organ | null} made with the first click, as browsers ask */
    this.organ = null;
    /** Ends what was asked for last. */
    this.control = new AbortController();
    this.control.abort();
    /** @type {Promise<unknown>} What was asked for last, and with it everything before. */
    this.turn = Promise.resolve();
    this.seed = 0;
    this.#fresh();
    this.#keys();
    part("play").addEventListener("click", () => this.toggle().catch(page.fail));
    part("piece").addEventListener("click", () => this.piece().catch(page.fail));
    part("volume").addEventListener("input", () => this.organ && (this.organ.volume = this.#volume));
    part("tempo").addEventListener("change", () => (this.performer.tempo = this.#tempo));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(part("roll"));
    this.#draw();
  }

  /** Whether music plays, or was asked for and begins soon. */
  get running() {
    return !this.control.signal.aborted;
  }

  /** Plays on, or pauses. */
  async toggle() {
    if (this.running) return this.stop();
    if (this.memory.position === 0) return this.piece();
    await this.#instead((signal) => this.#play([], signal));
  }

  /** Begins a new piece, in the metre and key that were chosen. */
  async piece() {
    await this.#instead((signal) => this.#piece(signal));
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

  /** @param {AbortSignal} signal */
  async #piece(signal) {
    if (signal.aborted) return;
    this.organ?.hush();
    await this.memory.restart();
    this.roll.clear();
    this.#fresh();
    this.page.side.speed.clear();
    part("tokens").replaceChildren();
    const header = [/** @type {HTMLSelectElement} */ (part("metre")).value];
    const key = /** @type {HTMLSelectElement} */ (part("key")).value;
    if (key) header.push(key);
    const ids = [END, ...header].map((name) => this.names.indexOf(name));
    this.seed = drawing().seed;
    for (const name of header) this.#take(name, NaN);
    await this.#play(ids, signal);
  }

  /** Pauses; what is ready already sounds when it goes on. */
  async stop() {
    this.control.abort();
    await this.turn;
    if (!this.running) await this.organ?.context.suspend();
  }

  /** The same as `stop`. */
  async pause() {
    await this.stop();
  }

  /** The stream as a file. */
  async save() {
    await this.stop();
    return { file: await this.model.saveMemory(this.memory), note: { page: 1, seed: this.seed } };
  }

  /** @param {Uint8Array} file */
  async load(file) {
    await this.stop();
    await this.#instead(() => this.#load(file));
  }

  /** @param {Uint8Array} file */
  async #load(file) {
    const memory = await this.model.loadMemory(file);
    await this.memory.dispose();
    this.memory = memory;
    this.organ?.hush();
    this.roll.clear();
    this.#fresh();
    part("tokens").replaceChildren();
    // the beat and the voices that sound are not in the file: a bar line begins the rest
    this.opening = [this.names.indexOf("|")];
    this.#take("|", NaN);
    this.page.hideError();
    this.#show();
    this.#draw();
    part("music-state").textContent = `loaded at position ${memory.position.toLocaleString("en")}`;
  }

  #fresh() {
    this.reader = new Reader();
    this.performer = new Performer();
    this.performer.tempo = this.#tempo;
    this.cursor = 0; // seconds on the clock up to which everything is scheduled
    /** @type {({note: import("./roll.js").Note, tone: {end: (at: number) => void}} | null)[]} */
    this.open = [null, null, null, null];
    /** @type {number[]} */
    this.opening = [];
    this.pieces = 0;
  }

  /** Plays until it is aborted. @param {number[]} prompt @param {AbortSignal} signal */
  async #play(prompt, signal) {
    if (signal.aborted) return;
    this.#button(true);
    this.page.hideError();
    this.page.say("Playing.");
    try {
      this.organ ??= new Organ(this.#volume);
      await this.organ.resume();
      this.#animate(signal);
      await this.#ahead([...this.opening, ...prompt], signal);
    } catch (error) {
      if (/** @type {Error} */ (error).name !== "AbortError") throw error;
    } finally {
      this.#button(false);
      this.page.say("Paused.");
    }
  }

  /** Generates until aborted, `AHEAD` of what sounds. @param {number[]} prompt @param {AbortSignal} signal */
  async #ahead(prompt, signal) {
    const organ = /** @type {Organ} */ (this.organ);
    const { side } = this.page;
    while (!signal.aborted) {
      if (this.cursor - organ.now > AHEAD) {
        await rest(100, signal);
        continue;
      }
      const { seed: _, ...options } = drawing();
      side.begin(this.memory.position);
      const before = this.memory.position;
      const given = {
        ...options,
        seed: this.seed++,
        signal,
        maxTokens: AT_ONCE,
        memory: this.memory,
        text: false,
      };
      try {
        for await (const { token, nats } of this.model.generate(prompt, given)) {
          side.reach(this.memory.position);
          this.#take(this.names[token], nats / Math.LN2);
        }
      } finally {
        if (this.memory.position > before) this.opening = [];
      }
      prompt = [];
      this.#show();
    }
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
    while (tokens.childNodes.length > 2 * LATEST) tokens.firstChild?.remove();
    tokens.scrollTop = tokens.scrollHeight;
    const event = this.reader.read(name);
    for (const slice of event ? this.performer.play(event) : []) this.#schedule(slice);
  }

  /** @param {import("./scheme.js").Slice} slice */
  #schedule(slice) {
    const { organ, roll } = this;
    if (!organ) return;
    // the beginning, or the model is too slow
    if (this.cursor < organ.now + START / 2) this.cursor = organ.now + START;
    const at = this.cursor;
    for (const voice of slice.pitches.keys()) {
      const open = this.open[voice];
      const begins = slice.begins.includes(voice);
      if (open && (begins || slice.pitches[voice] === null)) {
        open.tone.end(at);
        open.note.to = at;
        this.open[voice] = null;
      }
      const pitch = slice.pitches[voice];
      if (begins && pitch !== null) {
        const note = { voice, pitch, from: at, to: at };
        roll.notes.push(note);
        this.open[voice] = { note, tone: organ.begin(note) };
      }
    }
    this.cursor += slice.seconds;
    for (const open of this.open) if (open) open.note.to = this.cursor;
    if (slice.first) {
      roll.lines.push({ at, kind: "piece" });
      this.pieces++;
    } else if (slice.bar) roll.lines.push({ at, kind: "bar" });
    if (slice.fermata) roll.lines.push({ at, kind: "fermata" });
  }

  #show() {
    const { position } = this.memory;
    this.page.side.show(position);
    this.roll.forget(this.organ?.now ?? 0);
    const pieces = this.pieces > 1 ? ` · piece ${this.pieces}` : "";
    part("music-state").textContent = `position ${position.toLocaleString("en")}${pieces}`;
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
