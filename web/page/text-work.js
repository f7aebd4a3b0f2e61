/** Typing and generating text: what the buttons and keys of the text do. */
import { Refusal, Stream } from "./stream.js";
import { TextView } from "./text-view.js";
import { commonLength } from "./tokens.js";
import { drawing, part } from "./side.js";

const SHOWN = 4000; // tokens; of a longer text the beginning leaves the page
const LEAVING = 1000; // of them at a time
const TYPED = 20_000; // tokens that are shown of a text that was typed or pasted
const TOGETHER = 60; // milliseconds of work whose tokens are shown together
const TYPING = 40; // milliseconds without a key, after which what was typed is computed

/**
 * @typedef {{
 *   side: import("./side.js").Side, fail: (error: unknown) => void, hideError: () => void,
 *   say: (text: string) => void,
 * }} Page `fail`: shows an error. `hideError`: takes it away. `say`: speaks to those who do not see it
 */

export class TextWork {
  /**
   * @param {import("../index.js").Model} model @param {import("../index.js").Memory} memory
   * @param {Page} page
   */
  constructor(model, memory, page) {
    this.model = model;
    this.page = page;
    this.stream = new Stream(model, memory);
    this.area = /** @type {HTMLTextAreaElement} */ (part("text"));
    this.view = new TextView({
      area: this.area,
      colours: part("colours"),
      scroll: part("scroll"),
      token: part("token"),
      earlier: part("earlier"),
    });
    /** @type {AbortController | null} */
    this.running = null;
    /** @type {AbortController | null} of what was typed and is being computed */
    this.editing = null;
    this.timer = 0;
    this.frame = 0;
    this.typing = false; // the text area holds something that the stream does not have yet
    part("go").addEventListener("click", () => this.toggle().catch(page.fail));
    part("new").addEventListener("click", () => this.clear().catch(page.fail));
    this.area.addEventListener("input", () => this.#typed());
    this.area.addEventListener("pointermove", (event) => this.view.describe(this.stream, event));
    this.area.addEventListener("pointerleave", () => this.view.describe(this.stream, null));
    document.addEventListener("selectionchange", () => {
      if (document.activeElement === this.area && !this.running) this.view.describe(this.stream, null);
    });
    this.#state("");
  }

  /** Continues the text, or stops. */
  async toggle() {
    if (this.running) return this.stop();
    const control = new AbortController();
    this.running = control;
    this.#button(true);
    try {
      await this.#computeTyped(control.signal);
      if (control.signal.aborted) return;
      if (!this.stream.hasNext) {
        throw new Refusal(
          "the file does not say which token came last; type something first, then press Continue.",
        );
      }
      await this.stream.inTurn(() => this.#write(control.signal));
    } catch (error) {
      if (/** @type {Error} */ (error).name !== "AbortError") this.page.fail(error);
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

  /** Begins a new text. */
  async clear() {
    await this.stop();
    clearTimeout(this.timer);
    this.typing = false;
    await this.stream.inTurn(() => this.stream.clear());
    this.view.show(this.stream, 0, true);
    this.view.before(0);
    this.page.side.speed.clear();
    this.page.side.measured = true;
    this.#show();
    this.page.hideError();
    this.#state("");
    this.page.say("The text is empty.");
    this.area.focus();
  }

  /** The stream as a file. */
  async save() {
    await this.pause();
    await this.#computeTyped();
    return this.stream.inTurn(async () => {
      await this.stream.repair();
      return { file: await this.model.saveMemory(this.stream.memory), note: this.stream.note() };
    });
  }

  /** @param {Uint8Array} file @param {any} note */
  async load(file, note) {
    await this.stop();
    clearTimeout(this.timer);
    await this.stream.inTurn(() => this.stream.load(file, note));
    this.typing = false;
    const { stream, page } = this;
    page.side.speed.cut();
    this.view.show(stream, 0, true);
    this.view.before(stream.position - stream.ids.length);
    this.#show();
    page.hideError();
    this.#state(`loaded at position ${stream.position.toLocaleString("en")}`);
    page.say(`The stream was loaded at position ${stream.position}.`);
    part("scroll").scrollTop = part("scroll").scrollHeight;
  }

  /** @param {AbortSignal} signal */
  async #write(signal) {
    const { stream, view, page } = this;
    const { seed, ...options } = drawing();
    const before = stream.text.length;
    let ended = null;
    page.side.begin(stream.position);
    view.silent();
    this.#tick();
    try {
      for await (const piece of stream.generate({
        ...options,
        seed,
        signal,
        maxTokens: Infinity,
        batchMilliseconds: TOGETHER,
      })) {
        page.side.reach(stream.position);
        ended = piece.ended;
      }
    } catch (error) {
      if (/** @type {Error} */ (error).name !== "AbortError") throw error;
    } finally {
      cancelAnimationFrame(this.frame);
      this.#grow();
    }
    const how = ended === "end" ? "the model ended its text" : "stopped";
    this.#state(`${how} at position ${stream.position.toLocaleString("en")} · seed ${seed}`);
    const wrote = stream.text.slice(Math.max(before, stream.text.length - 300));
    page.say(`${ended === "end" ? "The model ended its text" : "Stopped"}. It wrote: ${wrote}`);
    if (document.activeElement === this.area) view.describe(stream, null);
  }

  /** Shows what was generated, once a frame. */
  #tick() {
    this.frame = requestAnimationFrame(() => {
      if (this.view.spans.length !== this.stream.ids.length) {
        this.#grow();
        this.#state(`position ${this.stream.position.toLocaleString("en")}`);
      }
      this.#tick();
    });
  }

  #grow() {
    const { stream, view } = this;
    if (this.typing) return;
    view.grow(stream);
    if (stream.ids.length > SHOWN + LEAVING)
      this.#shorten(Math.max(LEAVING, stream.ids.length - SHOWN - LEAVING));
    this.#show();
  }

  /** The first tokens leave the page. @param {number} most */
  #shorten(most) {
    const { stream, view } = this;
    const { count, cut } = stream.shorten(most);
    view.shorten(count, cut, stream.position - stream.ids.length);
  }

  #show() {
    this.page.side.show(this.stream.position);
  }

  /** Somebody typed: what is generated stops, and soon the text is computed. */
  #typed() {
    this.running?.abort();
    this.typing = true;
    this.view.typed(commonLength(this.stream.text, this.area.value), this.stream);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#computeTyped().catch(this.page.fail), TYPING);
  }

  /** Computes what was typed and not computed yet. @param {AbortSignal} [signal] */
  async #computeTyped(signal) {
    clearTimeout(this.timer);
    await this.stream.inTurn(async () => {
      const { stream, view, page } = this;
      if (!this.typing) return;
      page.side.speed.cut();
      const text = this.area.value;
      const from = await this.#edit(text, signal);
      if (from === null) return void this.#state("stopped; the model has not read all of the text yet");
      view.show(stream, from);
      if (this.area.value !== text)
        return void view.typed(commonLength(stream.text, this.area.value), stream);
      if (stream.ids.length > TYPED) this.#shorten(stream.ids.length - TYPED);
      this.typing = false;
      page.hideError();
      this.#show();
      this.#state(`position ${stream.position.toLocaleString("en")}`);
      view.describe(stream, null);
    });
  }

  /**
   * Makes the stream's text another one; null where this was stopped.
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

  /** @param {boolean} running */
  #button(running) {
    const button = part("go");
    button.textContent = running ? "Stop" : "Continue";
    button.classList.toggle("running", running);
  }

  /** @param {string} text */
  #state(text) {
    part("state").textContent = text;
  }
}
