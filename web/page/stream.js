/**
 * A text and the stream of the model that has seen it: they change together, one after the other. Nothing
 * here knows the page, or where the model computes.
 */
import { changeTo } from "./changes.js";

/** @typedef {import("./back-end.d.ts").BackEnd} BackEnd @typedef {import("./back-end.d.ts").Handle} Handle */

const MAX_NOTE_TOKENS = 1500; // tokens of the text that go into a note
const CONTEXT_CHARACTERS = 256; // characters before the shown text from which its first tokens are encoded
const FIRST = ["first", "end_of_document", "beginning", "end_of_line"]; // what precedes a text

/** What cannot be done, in one sentence. `code`: a word for programs, from a server. */
export class Refusal extends Error {
  /** @param {string} message @param {{status?: number, code?: string}} [options] */
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Stream {
  text = "";
  /** @type {number[]} Tokens of the text. */
  ids = [];
  /** @type {number[]} Where each of them ends in the text. */
  ends = [];
  /** @type {number[]} Their surprisals in bits; NaN where there is none. */
  bits = [];
  /** @type {number[]} Tokens before the text: they left the page, and the stream continues from them. */
  earlier = [];
  /** @type {Uint8Array | null} The file that the stream was loaded from. */
  file = null;
  /** How many of the known tokens that file has seen, and how many of those are still the same. */
  inFile = 0;
  sameAsFile = 0;
  /** Characters of the text before the shown one, without which its first tokens might be others. */
  context = "";
  /** How many of the shown tokens come before the text: those that a text without a beginning follows. */
  lead = 0;
  /** How many of the shown tokens were generated or loaded, up to the last of them. */
  given = 0;
  /** How many tokens the model was given since the page was opened. */
  fed = 0;
  /** @type {Promise<unknown>} */
  turn = Promise.resolve();

  /** @param {BackEnd} backEnd @param {Handle} handle @param {{name?: string, parent?: string}} [names] */
  constructor(backEnd, handle, { name = "", parent = "" } = {}) {
    this.backEnd = backEnd;
    this.handle = handle;
    this.name = name;
    /** The name of the stream that this one was forked from, and where. */
    this.parent = parent;
    /** How many tokens came before those that are known here. */
    this.base = handle.position;
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
   * another one, or covers another part of the text. Raises an error, and changes nothing, for a text
   * that the vocabulary does not know. After an abort the text is the old one, or a beginning of it.
   * @param {string} text @param {{signal?: AbortSignal}} [options]
   */
  async edit(text, { signal } = {}) {
    const { backEnd } = this;
    const change = await changeTo((part) => backEnd.tokenize(part), this, text);
    const { keep, ids, from, ends } = change;
    if (keep < this.ids.length || this.#differs()) await this.#rewind(keep, signal);
    const bits = await this.#append(ids, signal);
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
   * @param {any} options of `Handle.generate`
   */
  async *generate(options) {
    await this.repair(options.signal);
    const prompt = this.position === 0 ? await beginning(this.backEnd) : [];
    if (!prompt.length && !this.handle.predicts)
      throw new Refusal(
        "the file does not say which token came last; type something first, then press Continue.",
      );
    this.fed += prompt.length;
    if (prompt.length) {
      this.ids.push(...prompt);
      this.ends.push(...prompt.map(() => 0));
      this.bits.push(...prompt.map(() => NaN));
      this.lead = this.given = prompt.length;
    }
    for await (const piece of this.handle.generate(prompt, options)) {
      this.fed++;
      this.text += this.text ? piece.text : piece.text.trimStart(); // a first word often has a space before
      this.ids.push(piece.token);
      this.ends.push(this.text.length);
      this.bits.push(piece.bits);
      this.given = this.ids.length;
      yield piece;
    }
  }

  /**
   * Makes the stream match the text again, if work that failed or was stopped had fed a part of it.
   * @param {AbortSignal} [signal]
   */
  async repair(signal) {
    if (this.#differs()) await this.#rewind(this.ids.length, signal);
  }

  /** Begins again with an empty text. */
  async clear() {
    await this.handle.restart();
    this.#set({});
    Object.assign(this, { file: null, inFile: 0, sameAsFile: 0, base: 0, earlier: [] });
  }

  /** A second stream in the same state. @param {string} name */
  async fork(name) {
    await this.repair();
    const parent = `${this.name} at ${this.position.toLocaleString("en")}`;
    const twin = new Stream(this.backEnd, await this.handle.fork(), { name, parent });
    const { text, context, lead, given, base, file, inFile, sameAsFile } = this;
    Object.assign(twin, { text, context, lead, given, base, file, inFile, sameAsFile });
    for (const list of /** @type {const} */ (["ids", "ends", "bits", "earlier"]))
      twin[list] = [...this[list]];
    return twin;
  }

  /**
   * Removes about `count` tokens from the start of the text. The stream still knows them.
   * Returns the number of characters removed.
   * @param {number} count
   */
  shorten(count) {
    count = wholeTokens(this.ends, count);
    const cut = this.ends[count - 1] ?? 0;
    for (const id of this.ids.slice(0, count)) this.earlier.push(id);
    this.ids = this.ids.slice(count);
    this.bits = this.bits.slice(count);
    this.ends = this.ends.slice(count).map((end) => end - cut);
    this.context = (this.context + this.text.slice(0, cut)).slice(-CONTEXT_CHARACTERS);
    this.text = this.text.slice(cut);
    this.lead = Math.max(0, this.lead - count);
    this.given = Math.max(0, this.given - count);
    return { count, cut };
  }

  /**
   * The stream of a handle that came with a note, or with a file.
   * @param {BackEnd} backEnd @param {{handle: Handle, note: any, file?: Uint8Array}} found
   * @param {string} name
   */
  static async of(backEnd, { handle, note, file }, name) {
    const fitting = fits(note, handle.position);
    const stream = new Stream(backEnd, handle, fitting ? { ...note, name: note.name || name } : { name });
    stream.file = file ?? null;
    if (!fitting) return stream;
    stream.#set({ ...note, bits: note.bits.map((/** @type {number | null} */ bits) => bits ?? NaN) });
    stream.context = stream.context.slice(-CONTEXT_CHARACTERS);
    stream.given = stream.ids.length;
    if (file) stream.inFile = stream.sameAsFile = stream.ids.length;
    stream.base -= stream.ids.length;
    await stream.#goBack(stream.ids); // so that the next token is predicted
    return stream;
  }

  /** What the page wants to know when it opens this stream again: the end of the text. */
  note() {
    const from = wholeTokens(this.ends, Math.max(0, this.ids.length - MAX_NOTE_TOKENS));
    const cut = this.ends[from - 1] ?? 0;
    return {
      page: 1,
      name: this.name,
      parent: this.parent,
      position: this.position,
      text: this.text.slice(cut),
      context: (this.context + this.text.slice(0, cut)).slice(-CONTEXT_CHARACTERS),
      lead: Math.max(0, this.lead - from),
      ids: this.ids.slice(from),
      ends: this.ends.slice(from).map((end) => end - cut),
      bits: this.bits.slice(from).map((value) => (Number.isFinite(value) ? Number(value.toFixed(2)) : null)),
    };
  }

  /** @param {any} shown */
  #set({ ids = [], ends = [], bits = [], text = "", context = "", lead = 0 }) {
    Object.assign(this, { ids, ends, bits, text, context, lead, given: 0 });
  }

  /** Whether the stream has seen other tokens than the text has. */
  #differs() {
    return this.handle.position !== this.position;
  }

  /** @param {number[]} ids @param {AbortSignal | undefined} signal */
  async #append(ids, signal) {
    if (!ids.length) return [];
    this.fed += ids.length;
    return this.handle.append(ids, { signal });
  }

  /**
   * Makes the stream what it was after the first tokens of the text.
   * @param {number} keep @param {AbortSignal | undefined} signal
   */
  async #rewind(keep, signal) {
    const all = this.earlier.concat(this.ids.slice(0, keep));
    if (!(await this.#goBack(all))) await this.#feedAgain(all, signal);
    this.sameAsFile = Math.min(this.sameAsFile, all.length);
    this.text = this.text.slice(0, this.ends[keep - 1] ?? 0);
    this.ids = this.ids.slice(0, keep);
    this.ends = this.ends.slice(0, keep);
    this.bits = this.bits.slice(0, keep);
    this.lead = Math.min(this.lead, keep);
    this.given = Math.min(this.given, keep);
  }

  /** Takes tokens back if the memory still holds what came before them. @param {number[]} all that stay */
  async #goBack(all) {
    const count = this.handle.position - this.base - all.length;
    if (count < 0 || (!all.length && this.base === 0)) return false; // a restart does it
    return this.handle.rewind(count, all.at(-1));
  }

  /**
   * Begins again, from the file if there is one, and feeds what it has not seen.
   * @param {number[]} all @param {AbortSignal | undefined} signal
   */
  async #feedAgain(all, signal) {
    if (!this.file && this.base === 0) {
      await this.handle.restart();
      await this.#append(all, signal);
      return;
    }
    const refusal = new Refusal(
      "the memory cannot go back that far, and the page does not have the text from its beginning; " +
        "undo the change, or begin a new text.",
    );
    if (!this.file) throw refusal;
    const same = Math.min(this.sameAsFile, all.length);
    const { handle } = await this.backEnd.load(this.file);
    const back = this.inFile - same;
    const last = same === all.length ? all[same - 1] : undefined;
    // of the text of the file itself only the prediction may be missing
    if (!(await handle.rewind(back, last)) && !(last !== undefined && back === 0)) {
      await handle.dispose();
      throw refusal;
    }
    await this.handle.dispose();
    this.handle = handle;
    await this.#append(all.slice(same), signal);
  }
}

/** The token that a text without a beginning follows on. @param {BackEnd} backEnd */
export async function beginning(backEnd) {
  const { special } = backEnd.describe();
  const known = FIRST.map((name) => special[name]).find((id) => id !== undefined);
  if (known !== undefined) return [known];
  const line = await backEnd.tokenize("\n").catch(() => null);
  return line?.ids ?? [0]; // characters without a new line
}

/**
 * The largest number of tokens, at most `count`, that ends with a whole character.
 * @param {number[]} ends @param {number} count
 */
function wholeTokens(ends, count) {
  while (count > 0 && ends[count - 1] === (ends[count - 2] ?? 0)) count--;
  return count;
}

/** Whether a note is of a stream at this position. @param {any} note @param {number} position */
function fits(note, position) {
  const { ids, ends, bits, text } = note ?? {};
  const whole = (/** @type {unknown} */ each) => Number.isInteger(each) && Number(each) >= 0;
  return (
    note?.page === 1 &&
    note.position === position &&
    typeof text === "string" &&
    [ids, ends, bits].every((list) => Array.isArray(list) && list.length === ids.length) &&
    ids.length > 0 &&
    ids.length <= position &&
    ends[ends.length - 1] === text.length &&
    ids.every(whole) &&
    ends.every(
      (/** @type {number} */ end, /** @type {number} */ i) => whole(end) && end >= (ends[i - 1] ?? 0),
    )
  );
}
