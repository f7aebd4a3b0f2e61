/** Typing and generating text: what the buttons and keys of the text do. */
import { Refusal, Stream } from "./stream.js";
import { TextView } from "./text-view.js";
import { commonLength } from "./tokens.js";
import { drawing, part } from "./side.js";

const SHOWN = 4000; // tokens; of a longer text the beginning leaves the page
const LEAVING = 1000; // of them at a time
const TOGETHER = 60; // milliseconds of work whose tokens are shown together
const TYPING = 40; // milliseconds without a key, after which what was typed is computed

/** @typedef {{side: import("./side.js").Side, fail: (error: unknown) => void, well: () => void, say: (text: string) => void}} Page */

export class TextWork {
  /** @param {import("../index.js").Model} model @param {import("../index.js").Memory} memory @param {Page} page */
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
    this.timer = 0;
    this.frame = 0;
    this.typing = false; // the text area holds something that the stream does not have yet
    part("go").addEventListener("click", () => void this.toggle());
    part("new").addEventListener("click", () => void this.clear());
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
      await this.#computeTyped();
      if (control.signal.aborted) return;
      if (!this.stream.foretold) {
        throw new Refusal("the file does not say which token came last; type something first, then press Continue.");
      }
      await this.stream.inTurn(() => this.#write(control.signal));
    } catch (error) {
      this.page.fail(error);
    } finally {
      this.running = null;
      this.#button(false);
    }
  }

  /** Stops, and waits until nothing is computed any more. */
  async stop() {
    this.running?.abort();
    this.#button(false); // at once: at most the token that is being computed still comes
    await this.stream.turn;
  }

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
    this.page.well();
    this.#state("");
    this.page.say("The text is empty.");
    this.area.focus();
  }

  /** The stream as a file. */
  async save() {
    await this.stop();
    await this.#computeTyped();
    return this.stream.inTurn(async () => ({
      file: await this.model.saveMemory(this.stream.memory),
      note: this.stream.note(),
    }));
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
    page.well();
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
      for await (const piece of stream.generate({ ...options, seed, signal, maxTokens: Infinity, batchMilliseconds: TOGETHER })) {
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
    if (stream.ids.length > SHOWN + LEAVING) {
      view.shorten(LEAVING, stream.shorten(LEAVING), stream.position - stream.ids.length);
    }
    this.#show();
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
    this.timer = setTimeout(() => this.#computeTyped().catch((error) => this.page.fail(error)), TYPING);
  }

  /** Computes what was typed and not computed yet. */
  async #computeTyped() {
    clearTimeout(this.timer);
    await this.stream.inTurn(async () => {
      const { stream, view, page } = this;
      if (!this.typing) return;
      page.side.speed.cut();
      const text = this.area.value;
      const from = await stream.edit(text);
      view.show(stream, from);
      if (this.area.value !== text) return void view.typed(commonLength(stream.text, this.area.value), stream);
      this.typing = false;
      page.well();
      this.#show();
      this.#state(`position ${stream.position.toLocaleString("en")}`);
      view.describe(stream, null);
    });
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
