/** What text and music share: how tokens are drawn, the memory meter, the plot of the speed. */
import { Speed, drawSpeed } from "./speed.js";
import { inBytes } from "./tokens.js";

/**
 * An element of the page by its id.
 * @template {HTMLElement} [T=HTMLElement] @param {string} id @returns {T}
 */
export function part(id) {
  return /** @type {T} */ (document.getElementById(id));
}

/** A colour of the style sheet, as it is now. @param {string} name */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** How the next tokens are drawn; a random seed where none is given. */
export function drawing() {
  const number = (/** @type {string} */ id) => /** @type {HTMLInputElement} */ (part(id)).value;
  const topK = Math.max(0, Math.floor(Number(number("top-k")) || 0));
  const given = number("seed");
  const seed =
    given === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Math.max(0, Math.floor(Number(given)));
  return {
    temperature: Number(number("temperature")),
    topP: Number(number("top-p")),
    topK: topK || null,
    seed,
  };
}

/** The meter and the plot beside the text. */
export class Side {
  /** @param {import("../index.js").Model} model */
  constructor(model) {
    const { layers, heads, head_dim: width } = model.spec.model;
    this.fixed = model.facts.bytesPerStream;
    this.perToken = 2 * 4 * layers * heads * width; // keys and values of every layer in fp32
    this.speed = new Speed();
    const { temperature = 1, topP = 1, topK = null } = model.sampling;
    for (const [id, value] of Object.entries({ temperature, "top-p": topP, "top-k": topK ?? 0 })) {
      /** @type {HTMLInputElement} */ (part(id)).value = String(value);
    }
    for (const id of ["temperature", "top-p"]) {
      const input = /** @type {HTMLInputElement} */ (part(id));
      const say = () => (part(`${id}-value`).textContent = Number(input.value).toFixed(2));
      input.addEventListener("input", say);
      say();
    }
    const redraw = () => this.#draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new ResizeObserver(redraw).observe(part("speed"));
    this.memory(0);
    this.#draw();
  }

  /**
   * Draws the memory of a stream at a position, and what a growing cache would hold there.
   * @param {number} position
   */
  memory(position) {
    const growing = this.perToken * position;
    const most = Math.max(this.fixed, growing);
    part("fixed").style.width = `${(100 * this.fixed) / most}%`;
    part("growing").style.width = `${(100 * growing) / most}%`;
    part("fixed-value").textContent = inBytes(this.fixed);
    part("growing-value").textContent = inBytes(growing);
    part("memory-text").textContent =
      `At position ${position.toLocaleString("en")}. It stays ${inBytes(this.fixed)}; a cache of all keys ` +
      `and values grows by ${inBytes(this.perToken)} with each token.`;
  }

  /** Tokens begin to come. @param {number} position */
  begin(position) {
    this.speed.begin(position, performance.now());
  }

  /** The stream is at this position now. @param {number} position */
  reach(position) {
    this.measured = this.speed.reach(position, performance.now()) || this.measured;
  }

  /** Shows where the stream is; call it at most once a frame. @param {number} position */
  show(position) {
    this.memory(position);
    if (this.measured) this.#draw();
    this.measured = false;
  }

  measured = false;

  #draw() {
    const colours = {
      ink: colour("soft"),
      faint: colour("line"),
      line: colour("accent"),
      fill: colour("accent-soft"),
    };
    drawSpeed(/** @type {HTMLCanvasElement} */ (part("speed")), this.speed, colours);
    const { last } = this.speed;
    part("speed-text").textContent = last
      ? `${Math.round(last).toLocaleString("en")} tokens a second in the latest measurement.`
      : "Nothing was generated yet.";
  }
}
