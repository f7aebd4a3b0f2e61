/**
 * A text and the model's memory of it: they change together, one after the other. Nothing here knows the
 * page.
 */
import { XLExportError } from "../src/index.js";
import { changeTo } from "./changes.js";

/**
 * @typedef {import("../index.js").Model} Model
 * @typedef {import("../index.js").Memory} Memory
 */

const NOTED = 1500; // tokens of the text that go into the file
const CONTEXT = 256; // characters before the shown text from which its first tokens are encoded
const FIRST = ["end_of_document", "beginning", "end_of_line"]; // what a text without a beginning follows on

/** What cannot be done with a text, in one sentence. */
export class Refusal extends Error {}

export class Stream {
  /** @param {Model} model @param {Memory} memory of one stream at position 0 */
  constructor(model, memory) {
    this.model = model;
    this.memory = memory;
    this.text = "";
    /** @type {number[]} Tokens of the text. */
    this.ids = [];
    /** @type {number[]} Where each of them ends in the text. */
    this.ends = [];
    /** @type {number[]} Their surprisals in bits; not a number where there is none. */
    this.bits = [];
    /** @type {number[]} Tokens before the text: they left the page, and the memory goes on from them. */
    this.earlier = [];
    /** How many tokens came before these: they are known to the file alone that was loaded. */
    this.base = 0;
    /** @type {Uint8Array | null} The file that the stream was loaded from. */
    this.file = null;
    /**
     * How many of these tokens the memory of that file has seen, and how many of those are still the same.
     */
    this.inFile = 0;
    this.sameAsFile = 0;
    /** Characters of the text before the shown one, without which its first tokens might be others. */
    this.context = "";
    /**
     * How many of the shown tokens stand before the text: those on which a text without a beginning follows.
     */
    this.lead = 0;
    /** How many of the shown tokens were generated or loaded, up to the last of them. */
    this.given = 0;
    /**
     * Whether the model's prediction of the next token is known: false after loading a file of another
     * program.
     */
    this.hasNext = true;
    /** How many tokens the model was given since the page was opened. */
    this.fed = 0;
    /** @type {Promise<unknown>} */
    this.turn = Promise.resolve();
  }

  /** The number of tokens that came before the next one. */
  get position() {
    return this.base + this.earlier.length + this.ids.length;
  }

  /**
   * Work on the stream, after the work that was asked for before.
   * @template T @param {() => Promise<T>} work @returns {Promise<T>}
   */
  async inTurn(work) {
    const before = this.turn;
    const mine = before.catch(() => {}).then(work);
    this.turn = mine.catch(() => {});
    return mine;
  }

  /**
   * Makes the text another one, and computes what is new in it. Returns the index of the first token that is
   * another one, or covers another part of the text. Raises an XLExportError, and changes nothing, for a text
   * that the vocabulary does not know. After an abort the text is the old one, or a beginning of it.
   * @param {string} text @param {{signal?: AbortSignal}} [options]
   */
  async edit(text, { signal } = {}) {
    const { keep, ids, from, ends } = changeTo(this.model.vocabulary, this, text);
    if (keep < this.ids.length || this.#differs()) await this.#rewind(keep, signal);
    const bits = ids.length ? await this.#score(ids, signal) : [];
    this.ids = this.ids.concat(ids);
    this.bits = this.bits.concat(bits);
    this.ends = this.ends.slice(0, from).concat(ends);
    this.text = text;
    this.lead = Math.min(this.lead, keep);
    this.given = Math.min(this.given, keep);
    return Math.min(keep, from);
  }

  /**
   * Continues the text; yields after each token, when the stream has it already.
   * @param {import("../index.js").GenerateOptions} options
   */
  async *generate(options) {
    await this.repair(options.signal);
    const prompt = this.position === 0 ? this.#beginning() : [];
    this.fed += prompt.length;
    if (prompt.length) {
      this.ids.push(...prompt);
      this.ends.push(...prompt.map(() => 0));
      this.bits.push(...prompt.map(() => NaN));
      this.lead = this.given = prompt.length;
    }
    for await (const piece of this.model.generate(prompt, { ...options, memory: this.memory })) {
      this.fed++;
      this.text += piece.text;
      this.ids.push(piece.token);
      this.ends.push(this.text.length);
      this.bits.push(piece.nats / Math.LN2);
      this.given = this.ids.length;
      yield piece;
    }
  }

  /**
   * Makes the memory that of the text again, where work that failed or was stopped had fed a part of it.
   * @param {AbortSignal} [signal]
   */
  async repair(signal) {
    if (this.#differs()) await this.#rewind(this.ids.length, signal);
  }

  /** Begins again with an empty text. */
  async clear() {
    await this.memory.restart();
    this.hasNext = true;
    this.#forget();
    [this.file, this.inFile, this.sameAsFile, this.base] = [null, 0, 0, 0];
  }

  /**
   * Takes about so many first tokens off the text; returns how many characters. The memory still knows them.
   * @param {number} count
   */
  shorten(count) {
    count = wholeTokens(this.ends, count);
    const cut = this.ends[count - 1] ?? 0;
    for (const id of this.ids.slice(0, count)) this.earlier.push(id);
    this.ids = this.ids.slice(count);
    this.bits = this.bits.slice(count);
    this.ends = this.ends.slice(count).map((end) => end - cut);
    this.context = (this.context + this.text.slice(0, cut)).slice(-CONTEXT);
    this.text = this.text.slice(cut);
    this.lead = Math.max(0, this.lead - count);
    this.given = Math.max(0, this.given - count);
    return { count, cut };
  }

  /** Exchanges the memory for one that was loaded. @param {Uint8Array} file @param {any} note see `note` */
  async load(file, note) {
    const memory = await this.model.loadMemory(file);
    await this.memory.dispose();
    this.memory = memory;
    this.#forget();
    this.file = file;
    [this.inFile, this.sameAsFile, this.base] = [0, 0, memory.position];
    this.hasNext = false;
    if (!fits(note, memory.position, this.model.vocabulary.size)) return;
    ({ text: this.text, ids: this.ids, ends: this.ends } = note);
    this.bits = note.bits.map((/** @type {number | null} */ bits) => bits ?? NaN);
    this.context = typeof note.context === "string" ? note.context.slice(-CONTEXT) : "";
    this.lead = Number.isInteger(note.lead) ? Math.max(0, Math.min(note.lead, this.ids.length)) : 0;
    this.given = this.inFile = this.sameAsFile = this.ids.length;
    this.base -= this.ids.length;
    this.hasNext = await this.#goBack(this.ids);
  }

  /** What the page wants to know when it loads the file of this stream again: the end of the text. */
  note() {
    const from = wholeTokens(this.ends, Math.max(0, this.ids.length - NOTED));
    const cut = this.ends[from - 1] ?? 0;
    return {
      page: 1,
      position: this.position,
      text: this.text.slice(cut),
      context: (this.context + this.text.slice(0, cut)).slice(-CONTEXT),
      lead: Math.max(0, this.lead - from),
      ids: this.ids.slice(from),
      ends: this.ends.slice(from).map((end) => end - cut),
      bits: this.bits.slice(from).map((value) => (Number.isFinite(value) ? Number(value.toFixed(2)) : null)),
    };
  }

  #forget() {
    [this.ids, this.ends, this.bits, this.earlier] = [[], [], [], []];
    [this.text, this.context, this.lead, this.given] = ["", "", 0, 0];
  }

  /** The token that a text without a beginning follows on. */
  #beginning() {
    const special = /** @type {Record<string, number | undefined>} */ (this.model.vocabulary.special);
    const known = FIRST.map((name) => special[name]).find((id) => id !== undefined);
    if (known !== undefined) return [known];
    try {
      return this.model.vocabulary.encode("\n");
    } catch {
      return [0]; // characters without a new line
    }
  }

  /** Whether the memory has seen other tokens than those of the text. */
  #differs() {
    return this.memory.position !== this.position;
  }

  /** @param {number[]} ids @param {AbortSignal | undefined} signal */
  async #score(ids, signal) {
    this.fed += ids.length;
    const { surprisals } = await this.model.score(ids, { memory: this.memory, signal });
    this.hasNext = true;
    return Array.from(surprisals);
  }

  /**
   * Makes the memory what it was after the first tokens of the text.
   * @param {number} keep @param {AbortSignal | undefined} signal
   */
  async #rewind(keep, signal) {
    const all = this.earlier.concat(this.ids.slice(0, keep));
    if (await this.#goBack(all, signal)) this.hasNext = all.length > 0;
    else await this.#feedAgain(all, signal);
    this.sameAsFile = Math.min(this.sameAsFile, all.length);
    this.text = this.text.slice(0, this.ends[keep - 1] ?? 0);
    this.ids = this.ids.slice(0, keep);
    this.ends = this.ends.slice(0, keep);
    this.bits = this.bits.slice(0, keep);
    this.lead = Math.min(this.lead, keep);
    this.given = Math.min(this.given, keep);
  }

  /**
   * Takes tokens back where the memory can: a ring still holds what came before them. The last one that stays
   * is fed again, so that the next token is predicted. Returns whether this could be done.
   * @param {number[]} all the known tokens that stay @param {AbortSignal} [signal]
   */
  async #goBack(all, signal) {
    if (!all.length && this.base === 0) return false; // a restart does it
    const fedAgain = all.slice(-1);
    if (!(await this.#takeBack(this.memory, this.memory.position - this.base - all.length + fedAgain.length)))
      return false;
    await this.#feed(fedAgain, signal);
    return true;
  }

  /** Whether the last tokens could be taken back. @param {Memory} memory @param {number} count */
  async #takeBack(memory, count) {
    if (count < 0 || count > memory.position) return false;
    try {
      await this.model.rewind(memory, count);
      return true;
    } catch (error) {
      if (error instanceof XLExportError) return false; // too many for the ring, or no ring
      throw error;
    }
  }

  /**
   * Begins again, from the file if there is one, and feeds what it has not seen.
   * @param {number[]} all @param {AbortSignal | undefined} signal
   */
  async #feedAgain(all, signal) {
    if (!this.file) {
      await this.memory.restart();
      await this.#feed(all, signal);
      this.hasNext = true;
      return;
    }
    const same = Math.min(this.sameAsFile, all.length);
    const memory = await this.model.loadMemory(this.file);
    // Where nothing new follows, the last token is fed again, so that the next one is predicted.
    const again = same === all.length && same > 0 ? 1 : 0;
    const back = this.inFile - same + again;
    if (!(await this.#takeBack(memory, back))) {
      if (again && back === 1) {
        return this.#become(memory, false); // the text of the file itself: only the prediction is missing
      }
      await memory.dispose();
      throw new Refusal(
        "this part of the text came with the loaded file, and the memory in it cannot go back that far; " +
          "undo the change, or begin a new text.",
      );
    }
    await this.#become(memory, all.length > 0);
    await this.#feed(all.slice(same - again), signal);
  }

  /** Exchanges the memory. @param {Memory} memory @param {boolean} hasNext */
  async #become(memory, hasNext) {
    await this.memory.dispose();
    this.memory = memory;
    this.hasNext = hasNext;
  }

  /** @param {number[]} ids @param {AbortSignal | undefined} signal */
  async #feed(ids, signal) {
    if (!ids.length) return;
    this.fed += ids.length;
    await this.model.feed(ids, this.memory, { signal });
  }
}

/**
 * The largest number of tokens, up to so many, that end with a whole character.
 * @param {number[]} ends @param {number} count
 */
function wholeTokens(ends, count) {
  while (count > 0 && ends[count - 1] === (ends[count - 2] ?? 0)) count--;
  return count;
}

/**
 * Whether a note is one of this page, and belongs to the file it came with.
 * @param {any} note @param {number} position @param {number} size
 */
function fits(note, position, size) {
  const { ids, ends, bits, text } = note ?? {};
  return (
    note?.page === 1 &&
    note.position === position &&
    typeof text === "string" &&
    [ids, ends, bits].every((list) => Array.isArray(list) && list.length === ids.length) &&
    ids.length > 0 &&
    ids.length <= position &&
    ends[ends.length - 1] === text.length &&
    ids.every((/** @type {unknown} */ id) => Number.isInteger(id) && Number(id) >= 0 && Number(id) < size) &&
    ends.every(
      (/** @type {unknown} */ end, /** @type {number} */ i) =>
        Number.isInteger(end) && end >= (ends[i - 1] ?? 0),
    )
  );
}
