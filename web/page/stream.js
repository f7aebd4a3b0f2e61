/** A text and the model's memory of it: they change together, one after the other. Nothing here knows the page. */
import { XLExportError } from "../src/index.js";
import { endsOf, kept } from "./tokens.js";

/**
 * @typedef {import("../index.js").Model} Model
 * @typedef {import("../index.js").Memory} Memory
 */

const NOTED = 1500; // tokens of the text that go into the file
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
    /** How many of these tokens are in the memory of that file already. */
    this.inFile = 0;
    /** Whether `generate` can go on without anything that is typed: false after loading a file of another program. */
    this.foretold = true;
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
   * Makes the text another one, and computes what is new in it. Returns the index of the first new token.
   * Raises an XLExportError, and changes nothing, for a text that the vocabulary does not know.
   * @param {string} text @param {{signal?: AbortSignal}} [options]
   */
  async edit(text, { signal } = {}) {
    const { vocabulary } = this.model;
    const keep = kept({ ends: this.ends, kind: vocabulary.kind, before: this.text, after: text });
    const from = this.ends[keep - 1] ?? 0;
    const added = text.slice(from);
    const ids = added === "" ? [] : vocabulary.encode(added);
    const pieces = this.#pieces(ids, keep);
    if (keep < this.ids.length) await this.#rewind(keep);
    const scores = ids.length ? await this.#score(ids, signal) : [];
    this.text = text;
    this.ids.push(...ids);
    this.bits.push(...scores);
    this.ends.push(...endsOf(added, pieces).map((end) => from + end));
    if (!ids.length && keep > 0) this.ends[keep - 1] = text.length; // blanks that are no token of their own
    return ids.length ? keep : Math.max(0, keep - 1);
  }

  /**
   * Continues the text; yields after each token, when the stream has it already.
   * @param {import("../index.js").GenerateOptions} options
   */
  async *generate(options) {
    const prompt = this.position === 0 ? this.#beginning() : [];
    this.fed += prompt.length;
    if (prompt.length) {
      this.ids.push(...prompt);
      this.ends.push(...prompt.map(() => 0));
      this.bits.push(...prompt.map(() => NaN));
    }
    for await (const piece of this.model.generate(prompt, { ...options, memory: this.memory })) {
      this.fed++;
      this.text += piece.text;
      this.ids.push(piece.token);
      this.ends.push(this.text.length);
      this.bits.push(piece.nats / Math.LN2);
      yield piece;
    }
  }

  /** Begins again with an empty text. */
  async clear() {
    await this.memory.restart();
    this.foretold = true;
    this.#forget();
    this.text = "";
    this.earlier = [];
    [this.file, this.inFile, this.base] = [null, 0, 0];
  }

  /** Takes the first tokens off the text. The memory still knows them. @param {number} count */
  shorten(count) {
    const cut = this.ends[count - 1];
    for (const id of this.ids.slice(0, count)) this.earlier.push(id);
    this.ids = this.ids.slice(count);
    this.bits = this.bits.slice(count);
    this.ends = this.ends.slice(count).map((end) => end - cut);
    this.text = this.text.slice(cut);
    return cut;
  }

  /** Exchanges the memory for one that was loaded. @param {Uint8Array} file @param {any} note see `note` */
  async load(file, note) {
    const memory = await this.model.loadMemory(file);
    await this.memory.dispose();
    this.memory = memory;
    this.#forget();
    this.earlier = [];
    this.file = file;
    [this.inFile, this.base] = [0, memory.position];
    this.text = "";
    if (fits(note, memory.position, this.model.vocabulary.size)) {
      ({ text: this.text, ids: this.ids, ends: this.ends } = note);
      this.bits = note.bits.map((/** @type {number | null} */ bits) => bits ?? NaN);
      this.inFile = this.ids.length;
      this.base -= this.ids.length;
      if (!(await this.#goBack(1, this.ids.slice(-1)))) this.foretold = false;
    } else this.foretold = false;
  }

  /** What the page wants to know when it loads the file of this stream again: the end of the text. */
  note() {
    const from = Math.max(0, this.ids.length - NOTED);
    const cut = this.ends[from - 1] ?? 0;
    return {
      page: 1,
      position: this.position,
      text: this.text.slice(cut),
      ids: this.ids.slice(from),
      ends: this.ends.slice(from).map((end) => end - cut),
      bits: this.bits.slice(from).map((value) => (Number.isFinite(value) ? Number(value.toFixed(2)) : null)),
    };
  }

  #forget() {
    [this.ids, this.ends, this.bits] = [[], [], []];
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

  /** The text of each of some tokens that follow the kept ones. @param {number[]} ids @param {number} keep */
  #pieces(ids, keep) {
    const decoder = this.model.vocabulary.decoder();
    for (const id of this.ids.slice(Math.max(0, keep - 8), keep)) decoder(id);
    return ids.map((id) => decoder(id));
  }

  /** @param {number[]} ids @param {AbortSignal | undefined} signal */
  async #score(ids, signal) {
    this.fed += ids.length;
    this.foretold = true;
    try {
      const { surprisals } = await this.model.score(ids, { memory: this.memory, signal });
      return [...surprisals];
    } catch (error) {
      await this.#rewind(this.ids.length).catch(() => {}); // some of them may have been fed
      throw error;
    }
  }

  /** Makes the memory what it was after the first tokens of the text. @param {number} keep */
  async #rewind(keep) {
    const all = [...this.earlier, ...this.ids.slice(0, keep)];
    const back = this.earlier.length + this.ids.length - all.length;
    if (!(await this.#goBack(back + 1, all.slice(-1)))) await this.#feedAgain(all);
    this.text = this.text.slice(0, this.ends[keep - 1] ?? 0);
    this.ids = this.ids.slice(0, keep);
    this.ends = this.ends.slice(0, keep);
    this.bits = this.bits.slice(0, keep);
  }

  /**
   * Takes tokens back where the memory can: a ring still holds what came before them. The last one that stays is
   * fed again, for what it foretells.
   * @param {number} count @param {number[]} last
   */
  async #goBack(count, last) {
    if (!last.length || count > this.position) return false;
    try {
      await this.model.rewind(this.memory, count);
    } catch (error) {
      if (error instanceof XLExportError) return false; // too many for the ring, or no ring
      throw error;
    }
    await this.#feed(last);
    return true;
  }

  /** Begins again, from the file if there is one, and feeds everything. @param {number[]} all */
  async #feedAgain(all) {
    if (this.file && all.length < this.inFile) {
      throw new Refusal(
        "this place of the text came with the loaded file, and its memory cannot go back so far; undo the " +
          "change, or begin a new text.",
      );
    }
    if (this.file) {
      const memory = await this.model.loadMemory(this.file);
      await this.memory.dispose();
      this.memory = memory;
    } else await this.memory.restart();
    await this.#feed(all.slice(this.inFile));
  }

  /** @param {number[]} ids */
  async #feed(ids) {
    if (!ids.length) return;
    this.fed += ids.length;
    await this.model.feed(ids, this.memory);
  }
}

/** Whether a note is one of this page, and belongs to the file it came with. @param {any} note @param {number} position @param {number} size */
function fits(note, position, size) {
  const { ids, ends, bits, text } = note ?? {};
  return (
    note?.page === 1 && note.position === position && typeof text === "string" &&
    [ids, ends, bits].every((list) => Array.isArray(list) && list.length === ids.length) &&
    ids.length > 0 && ids.length <= position && ends[ends.length - 1] === text.length &&
    ids.every((/** @type {unknown} */ id) => Number.isInteger(id) && Number(id) >= 0 && Number(id) < size) &&
    ends.every((/** @type {unknown} */ end, /** @type {number} */ i) => Number.isInteger(end) && end >= (ends[i - 1] ?? 0))
  );
}
