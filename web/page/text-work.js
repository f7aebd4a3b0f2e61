/** Typing and generating text: what the buttons and keys of the text do. */
import { Refusal, Stream } from "./stream.js";
import { Streams } from "./streams.js";
import { TextView } from "./text-view.js";
import { commonLength } from "./tokens.js";
import { button, fail, hideError, linkOf, part, say, settings } from "./side.js";

const MAX_SHOWN_TOKENS = 4000; // tokens; of a longer text the beginning leaves the page
const LEAVING_TOKENS = 1000; // of them at a time
const MAX_TYPED_TOKENS = 20_000; // tokens that are shown of a text that was typed or pasted
const TYPING_PAUSE_MS = 60; // milliseconds without a key, after which what was typed is computed
const LONGEST_LINK = 8000; // characters
const MAX_OPENING_TOKENS = 1000; // tokens of a text that the page begins, if no paragraph ends before
const MAX_EMPTY_TEXTS = 8; // texts that the model ends before it has written anything

export class TextWork {
  /** @param {import("./back-end.d.ts").BackEnd} backEnd @param {import("./side.js").Side} side */
  constructor(backEnd, side) {
    this.side = side;
    this.streams = new Streams(backEnd, (stream) => this.#open(stream));
    this.area = /** @type {HTMLTextAreaElement} */ (part("text"));
    this.view = new TextView();
    /** @type {AbortController | null} */
    this.running = null;
    /** @type {AbortController | null} of what was typed and is being computed */
    this.editing = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.frame = 0;
    this.typing = false; // the text area holds something that the stream does not have yet
    /**
     * @type {any} how the last text was generated. `stream` and `whole`: the stream and its text after it.
     *   `link`: the text and settings from which it was made. `untouched`: whether the page made it and the
     *   reader has not renamed it, so that it need not be kept
     */
    this.origin = null;
    const { streams } = this;
    const click = (/** @type {string} */ id, /** @type {() => Promise<void>} */ work) =>
      part(id).addEventListener("click", () => work().catch(fail));
    click("go", () => this.toggle());
    button("surprise", () => this.surprise());
    button("new", () => this.create());
    button("fork", async () => (await this.stop(), await streams.fork()));
    button("rename", () => this.rename());
    button("delete", async () => (await this.stop(), await streams.delete()));
    part("scroll").addEventListener("click", ({ target }) => target === part("scroll") && this.area.focus());
    this.area.addEventListener("input", () => this.#typed());
    this.area.addEventListener("pointermove", (event) => this.view.describe(this.stream, event));
    this.area.addEventListener("pointerleave", () => this.view.describe(this.stream, null));
    document.addEventListener("selectionchange", () => {
      if (document.activeElement === this.area && !this.running) this.view.describe(this.stream, null);
    });
  }

  get stream() {
    return /** @type {Stream} */ (this.streams.current);
  }

  /** Shows what a link asks for, what this tab remembers, or an opening. @param {any} link */
  async begin(link) {
    if (!link && (await this.streams.restore())) return;
    await this.streams.create();
    if (link) {
      await this.write(link);
      if (this.origin) this.origin.untouched = true;
    } else await this.#tell();
    part("scroll").scrollTop = 0; // a visitor reads it from its beginning
  }

  /** Begins a text, and generates `tokens` tokens. @param {any} given */
  async write({ text = "", tokens = 0, ...more }) {
    this.area.value = text;
    this.typing = true;
    await this.#computeTyped();
    if (tokens > 0) await this.go({ ...more, tokens });
  }

  /** A new, empty text. */
  async create() {
    await this.stop();
    if (this.stream.position) await this.streams.create();
    this.area.focus();
  }

  /** A new text that begins by itself; it replaces one that began in the same way. */
  async surprise() {
    await this.stop();
    if (this.#disposable) await this.#clear();
    else await this.create();
    this.#tell().catch(fail);
  }

  /** Lets the model write a paragraph: after one of the owner's openings, or from the beginning. */
  async #tell() {
    const { openings } = this.streams.backEnd.describe();
    const text = openings[Math.floor(Math.random() * openings.length)] ?? "";
    await this.write({ text, tokens: MAX_OPENING_TOKENS, paragraph: true });
    if (this.origin) this.origin.untouched = true;
  }

  /** Asks for another name. A stream that has got one is kept. */
  rename() {
    if (this.streams.rename() && this.#asGenerated) this.origin.untouched = false;
  }

  async #clear() {
    await this.stream.inTurn(() => this.stream.clear());
    await this.streams.choose(this.stream);
  }

  /** Continues the text, or stops. */
  async toggle() {
    if (this.running) await this.stop();
    else {
      this.view.toEnd();
      await this.go({});
    }
  }

  /** Continues the text. @param {any} given settings that replace the page's */
  async go(given) {
    const control = new AbortController();
    this.running = control;
    this.#button(true);
    try {
      await this.#computeTyped(control.signal);
      if (control.signal.aborted) return;
      await this.stream.inTurn(() => this.#write(control.signal, { ...settings(), ...given }));
    } catch (error) {
      await this.#failed(error);
    } finally {
      this.running = null;
      this.#button(false);
    }
  }

  /** Stops generating and the computing of what was typed, and waits until nothing is computed any more. */
  async stop() {
    this.editing?.abort();
    await this.pause();
  }

  /** Stops generating, and waits until what was typed is computed. */
  async pause() {
    this.running?.abort();
    this.#button(false); // at once: at most the token that is being computed still comes
    await this.stream.turn;
  }

  /** The page is closed: a stream that the reader has left as it was is not kept. */
  leave() {
    if (this.#disposable) this.streams.backEnd.forget?.(this.stream.handle);
  }

  /** A link to this page that makes the same text. */
  link() {
    const { stream } = this;
    if (stream.base + stream.earlier.length)
      throw new Refusal("the page does not have this text from its beginning; use Save instead of a link.");
    const carried = this.#asGenerated ? this.origin.link : { text: stream.text };
    const link = linkOf(carried);
    if (link.length > LONGEST_LINK)
      throw new Refusal("the text is too long for a link; use Save instead, which writes a file.");
    return link;
  }

  /** Whether the text ends as the model has generated it. */
  get #asGenerated() {
    return this.origin?.stream === this.stream && this.origin.whole === this.stream.text;
  }

  /** Whether the shown stream can be made again, and the reader has not made it their own. */
  get #disposable() {
    return this.#asGenerated && this.origin.untouched;
  }

  /** The stream as a file. */
  async save() {
    await this.pause();
    await this.#computeTyped();
    return this.stream.inTurn(async () => {
      await this.stream.repair();
      return this.stream.handle.save(this.stream.note());
    });
  }

  /** @param {Uint8Array} file */
  async load(file) {
    await this.stop();
    await this.streams.load(file);
    this.#state(`loaded, ${tokens(this.stream.position)}`);
  }

  /** Shows a stream in place of the one before. @param {Stream} stream */
  async #open(stream) {
    this.running?.abort();
    this.editing?.abort();
    clearTimeout(this.timer);
    await stream.turn;
    const { side, view } = this;
    this.typing = false;
    side.speed.cut();
    view.show(stream, 0, true);
    view.before(stream.position - stream.ids.length);
    view.finish("");
    this.#show();
    hideError();
    this.#position();
    say(`${stream.name}, ${tokens(stream.position)}.`);
    part("scroll").scrollTop = part("scroll").scrollHeight;
  }

  /** @param {AbortSignal} signal @param {any} options */
  async #write(signal, { tokens: count, paragraph = false, ...options }) {
    const { stream, view, side } = this;
    const before = stream.text;
    const from = stream.position;
    let end = Infinity; // of the text, if the page ends it
    /** @type {string | null} */
    let ending = null;
    const written = () => stream.position - from - (from === 0 ? stream.lead : 0);
    side.begin(stream.position);
    hideError();
    view.silent();
    view.finish("");
    this.#tick();
    try {
      for (let texts = 0; texts < MAX_EMPTY_TEXTS && written() < count; texts++) {
        const given = { ...options, seed: (options.seed + texts) % 2 ** 32, max_tokens: count - written() };
        for await (const _ of stream.generate({ ...given, signal })) {
          side.reach(stream.position);
          if (!paragraph || ending) continue;
          ending = openingEnds(stream.text.slice(before.length));
          if (!ending) continue;
          const { length } = stream.text.trimEnd();
          end = /** @type {number} */ (stream.ends.find((each) => each >= length));
          this.running?.abort();
        }
        // some models often end a text before its first word, and then begin another one
        if (stream.text.trim() || stream.handle.ended !== "end") break;
      }
    } finally {
      cancelAnimationFrame(this.frame);
      this.#grow();
      this.streams.changed();
    }
    if (stream.text.length > end) {
      view.show(stream, await stream.edit(stream.text.slice(0, end)), true);
      this.streams.changed();
    }
    const link = { ...options, text: before, tokens: written() };
    this.origin = { stream, whole: stream.text, link };
    const { ended } = stream.handle;
    const reason = whyEnded(ending ?? (paragraph && ended === "length" ? "long" : ended), written());
    view.finish(reason);
    this.#position();
    /** @type {HTMLInputElement} */ (part("seed")).placeholder = options.seed;
    say(`${reason} It wrote: ${stream.text.slice(before.length).slice(-300)}`);
    if (document.activeElement === this.area) view.describe(stream, null);
  }

  /** Shows what was generated, once a frame. */
  #tick() {
    this.frame = requestAnimationFrame(() => {
      if (this.view.spans.length !== this.stream.ids.length) {
        this.#grow();
        this.#position();
      }
      this.#tick();
    });
  }

  #grow() {
    const { stream, view } = this;
    if (this.typing) return;
    view.grow(stream);
    if (stream.ids.length > MAX_SHOWN_TOKENS + LEAVING_TOKENS)
      this.#shorten(Math.max(LEAVING_TOKENS, stream.ids.length - MAX_SHOWN_TOKENS - LEAVING_TOKENS));
    this.#show();
  }

  /** The first tokens leave the page. @param {number} most */
  #shorten(most) {
    const { stream, view } = this;
    const { count, cut } = stream.shorten(most);
    view.shorten(count, cut, stream.position - stream.ids.length);
  }

  #show() {
    this.side.show();
    this.streams.advanced();
  }

  /** Somebody typed: what is generated stops, and soon the text is computed. */
  #typed() {
    this.running?.abort();
    this.typing = true;
    this.view.finish("");
    this.view.typed(commonLength(this.stream.text, this.area.value), this.stream);
    clearTimeout(this.timer);
    const compute = () => this.#computeTyped().catch((error) => this.#failed(error));
    this.timer = setTimeout(compute, TYPING_PAUSE_MS);
  }

  /** Computes what was typed and not computed yet. @param {AbortSignal} [signal] */
  async #computeTyped(signal) {
    clearTimeout(this.timer);
    await this.stream.inTurn(async () => {
      const { stream, view, side } = this;
      if (!this.typing) return;
      side.speed.cut();
      const text = this.area.value;
      const from = await this.#edit(text, signal);
      if (from === null) return void this.#state("stopped; the model has not read all of the text yet");
      view.show(stream, from);
      if (this.area.value !== text)
        return void view.typed(commonLength(stream.text, this.area.value), stream);
      if (stream.ids.length > MAX_TYPED_TOKENS) this.#shorten(stream.ids.length - MAX_TYPED_TOKENS);
      this.typing = false;
      hideError();
      this.#show();
      this.streams.changed();
      this.#position();
      view.describe(stream, null);
    });
  }

  /**
   * Makes the stream's text another one; null if this was stopped.
   * @param {string} text @param {AbortSignal} [signal]
   */
  async #edit(text, signal) {
    this.editing = new AbortController();
    const stop = () => this.editing?.abort();
    signal?.addEventListener("abort", stop);
    if (signal?.aborted) stop();
    try {
      return await this.stream.edit(text, { signal: this.editing.signal });
    } catch (error) {
      if (/** @type {Error} */ (error).name !== "AbortError") throw error;
      return null;
    } finally {
      signal?.removeEventListener("abort", stop);
      this.editing = null;
    }
  }

  /** Shows an error; after a change by another client also the stream as it is now. @param {any} error */
  async #failed(error) {
    if (error.name === "AbortError") return;
    if (error.code === "other_position") {
      const { streams, stream } = this;
      const { name, parent, handle } = stream;
      const now = new Stream(streams.backEnd, handle, { name, parent });
      streams.all[streams.all.indexOf(stream)] = now;
      await streams.choose(now);
      error = new Refusal("another client has changed this stream; what was typed here was not appended.");
    }
    fail(error);
  }

  /** @param {boolean} running */
  #button(running) {
    const button = part("go");
    button.textContent = running ? "Stop" : "Continue";
    button.classList.toggle("running", running);
  }

  #position() {
    this.#state(tokens(this.stream.position));
  }

  /** @param {string} text */
  #state(text) {
    part("state").textContent = text;
  }
}

/**
 * Why an opening ends here; null if it goes on. "paragraph": a blank line, or a sentence ends with its line;
 * the end of a line within a sentence is only where the text was wrapped. "long": a long text, if possible at
 * the end of a sentence.
 * @param {string} text
 */
export function openingEnds(text) {
  if (text.length < 200) return null;
  if (/\n[^\S\n]*\n\s*$/.test(text) || /[.!?]["'”’»)\s]*\n\s*$/.test(text)) return "paragraph";
  const sentence = /[.!?]["'”’»)]*\s+$/.test(text);
  return text.length >= 1000 || (text.length >= 700 && sentence) ? "long" : null;
}

/** @param {number} count */
function tokens(count) {
  return `${count.toLocaleString("en")} ${count === 1 ? "token" : "tokens"}`;
}

/** Why a text ended, and what to do. @param {string | null} ended @param {number} count tokens */
function whyEnded(ended, count) {
  if (ended === "end") return `The model ended its text after ${tokens(count)}. Continue begins another one.`;
  if (ended === "paragraph") return "The model has written a paragraph. Press Continue for more.";
  if (ended === "long") return `The model has written ${tokens(count)}. Press Continue for more.`;
  if (ended === "length")
    return `Stopped after ${tokens(count)}, as set under Settings. Press Continue for more.`;
  return `You stopped it after ${tokens(count)}. Press Continue for more.`;
}
