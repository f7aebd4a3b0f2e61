/** What text and music share: messages and buttons, the sampling settings, the memory meter, the speed. */
import { BUSY, FAR, Speed, drawTime, typical } from "./plots.js";
import { Refusal, beginning } from "./stream.js";
import { inBytes } from "./tokens.js";

const COMPARED = [10_000, 100_000, 1_000_000]; // positions at which the table of the memory compares
// Positions at which a token is measured.
const MEASURED = [100, 1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, FAR];
const TOLD = [100, 1000, FAR]; // of them
const READ_TOKENS = 500; // tokens that are read at a time
const TRIED_MS = 600; // milliseconds of work at each of these positions
const BUSY_MS = 2400; // the same, if other programs seem to use the device
const [LEAST_REQUESTS, MOST_REQUESTS] = [5, 60]; // at each of them
const REQUEST_TOKENS = 10; // tokens that are generated at a time for a measurement
/** The settings that have a field, with their values if the artefact recommends none. */
const SHOWN = { temperature: 1, top_p: 1, top_k: 0 };

/**
 * An element of the page by its id.
 * @template {HTMLElement} [T=HTMLElement] @param {string} id @returns {T}
 */
export function part(id) {
  return /** @type {T} */ (document.getElementById(id));
}

/** @param {string} id @returns {HTMLInputElement} */
const field = (id) => part(id);

/** A colour of the style sheet, as it is now. @param {string} name */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Shows an error in one sentence. @param {any} error */
export function fail(error) {
  const known = error instanceof Refusal || error.name === "XLExportError";
  const text = error instanceof Error ? error.message : String(error);
  const sentence = known ? text : `something failed that should not (${text}); reload the page.`;
  // a sentence begins with a capital letter, but the name of a file stays as it is
  part("error").textContent = /^[a-z]+ /.test(sentence)
    ? sentence[0].toUpperCase() + sentence.slice(1)
    : sentence;
  part("error").hidden = false;
  part("key-form").hidden = error.status !== 401;
  part("loading").hidden = true;
  if (!known) console.error(error);
}

/** Takes the shown error away. */
export function hideError() {
  part("error").hidden = true;
}

/** Says something to those who do not see the page. @param {string} text */
export function say(text) {
  part("said").textContent = text;
}

/**
 * Does work that a button asks for, and shows how it failed.
 * @param {string} id @param {() => any} work
 */
export function button(id, work) {
  const element = /** @type {HTMLButtonElement} */ (part(id));
  element.addEventListener("click", async () => {
    element.disabled = true;
    try {
      await work();
    } catch (error) {
      fail(error);
    } finally {
      element.disabled = false;
    }
  });
}

/** @param {string} name @param {Blob} content */
export function download(name, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  say(`${name} was saved.`);
}

/** Settings of the artefact that the page has no field for. @type {Record<string, unknown>} */
let others = {};

/** Starts from the artefact's own sampling. @param {Record<string, any>} sampling */
export function useDefaults(sampling) {
  useSettings({ ...SHOWN, ...sampling });
  others = Object.fromEntries(Object.entries(sampling).filter(([id]) => !(id in SHOWN)));
}

/** Puts settings into the fields that show them. @param {Record<string, any>} settings */
export function useSettings(settings) {
  for (const id of Object.keys(SHOWN)) {
    if (settings[id] !== undefined) field(id).value = String(settings[id] ?? 0);
  }
}

/** What a link says: settings that are not set are left out. @param {Record<string, any>} given */
export function linkOf(given) {
  return `#${new URLSearchParams(Object.entries(given).filter(([, value]) => value != null))}`;
}

/**
 * How the next tokens are drawn; a random seed unless one is given. If the field of temperature or top-p is
 * empty, the model's own setting is used.
 */
export function settings() {
  const number = (/** @type {string} */ id) => Math.max(0, Math.floor(Number(field(id).value) || 0));
  const seed = field("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : number("seed");
  const filled = Object.keys(SHOWN).filter((id) => field(id).value !== "");
  return {
    ...others,
    ...Object.fromEntries(filled.map((id) => [id, Number(field(id).value)])),
    top_k: number("top_k"),
    seed,
    tokens: number("count") || 200,
  };
}

/** The plot and the table below the text. */
export class Side {
  speed = new Speed();
  measured = false;
  /** Ends the reading of many tokens. @type {AbortController | null} */
  reading = null;

  /** @param {import("./back-end.d.ts").BackEnd} backEnd */
  constructor(backEnd) {
    this.backEnd = backEnd;
    const { bytesPerStream: fixed, bytesPerToken, parameters } = backEnd.describe();
    /** How many times as long a token takes as here, if a cache of all keys and values has so many. */
    this.growth = (/** @type {number} */ position) => {
      // Multiplications: one for each weight, and for each key and value; here a third one for the distance.
      const each = bytesPerToken / 4;
      const weights = parameters ?? NaN;
      return (weights + each * position) / (weights + 1.5 * each * (fixed / bytesPerToken));
    };
    const redraw = () => this.#draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    new ResizeObserver(redraw).observe(part("plot"));
    part("memory-rows").replaceChildren(
      ...COMPARED.map((position) => {
        const row = document.createElement("tr");
        const after = `${position.toLocaleString("en")} tokens`;
        const cells = [after, inBytes(fixed), inBytes(position * bytesPerToken)];
        row.append(
          ...cells.map((text, i) =>
            Object.assign(document.createElement(i ? "td" : "th"), { textContent: text }),
          ),
        );
        row.firstElementChild?.setAttribute("scope", "row");
        return row;
      }),
    );
  }

  /** Tokens begin to come. @param {number} position */
  begin(position) {
    this.reading?.abort();
    this.speed.begin(position, performance.now());
  }

  /** The stream is at this position now. @param {number} position */
  reach(position) {
    this.measured = this.speed.reach(position, performance.now()) || this.measured;
  }

  /** Shows what was measured; call it at most once a frame. */
  show() {
    if (this.measured) this.#draw();
    this.measured = false;
  }

  /**
   * Reads many tokens in a stream of its own, and measures on the way how long one more takes.
   * @param {Promise<void>} idle until nothing else is computed
   */
  async readFar(idle) {
    const { signal } = (this.reading = new AbortController());
    part("far").textContent = "Stop";
    try {
      await idle;
      await this.#readFar(signal);
    } catch (error) {
      this.speed.far = []; // the plot claims nothing of what was not read to its end
      if (/** @type {Error} */ (error).name !== "AbortError") throw error;
    } finally {
      this.reading = null;
      part("far").textContent = `Read ${FAR.toLocaleString("en")} tokens now`;
      this.#draw();
    }
  }

  /** @param {AbortSignal} signal */
  async #readFar(signal) {
    const { tokens: _, ...given } = settings();
    const handle = await this.backEnd.start();
    const text = await beginning(this.backEnd); // what it writes is what it reads again
    [this.speed.points, this.speed.far] = [[], []];
    try {
      await handle.append(text);
      for (const position of MEASURED) {
        while (handle.position < position) {
          part("time-text").textContent = `Reading: ${handle.position.toLocaleString("en")} tokens so far.`;
          const count = Math.min(READ_TOKENS, position - handle.position);
          const ids = Array.from({ length: count }, (_, i) => text[i % text.length]);
          await handle.append(ids, { signal });
        }
        const began = performance.now();
        /** @type {number[]} */
        const values = [];
        const enough = () =>
          performance.now() - began > (typical(values) > BUSY * this.speed.best ? BUSY_MS : TRIED_MS);
        while (values.length < LEAST_REQUESTS || (values.length < MOST_REQUESTS && !enough())) {
          const [before, start] = [handle.position, performance.now()];
          const options = /** @type {any} */ ({ ...given, max_tokens: REQUEST_TOKENS, signal });
          for await (const { token } of handle.generate([], options)) text.push(token);
          signal.throwIfAborted();
          values.push((performance.now() - start) / (handle.position - before));
        }
        this.speed.readFar(position, values);
        this.#draw();
      }
    } finally {
      await handle.dispose();
    }
  }

  #draw() {
    const { best, busy, far, readings, showsFar } = this.speed;
    const known = best < Infinity && Number.isFinite(this.growth(0));
    const growing = known ? (/** @type {number} */ position) => best * this.growth(position) : null;
    const [ink, faint, line, other] = ["soft", "line", "accent", "other"].map(colour);
    const colours = { ink, faint, line, other };
    drawTime(/** @type {HTMLCanvasElement} */ (part("plot")), readings, growing, colours);
    if (this.reading) return;
    const [first, second, last] = TOLD.map((position) => inMs(far[MEASURED.indexOf(position)]?.ms ?? NaN));
    const told = `A token took ${first} after 100 tokens, ${second} after 1,000, and ${last} after 10,000.`;
    const compared = growing ? ` An ordinary Transformer would need about ${inMs(growing(FAR))} there.` : "";
    const now = readings.length ? `A token takes ${inMs(readings[readings.length - 1].ms)} now. ` : "";
    const sentences = showsFar
      ? `${told}${compared}`
      : `${now}Press the button to see how long it takes after 10,000.`;
    part("time-text").textContent = `${sentences}${busy ? " This device is busy, so the times vary." : ""}`;
  }
}

/** @param {number} ms */
function inMs(ms) {
  return `${ms.toLocaleString("en", { maximumSignificantDigits: 2 })} ms`;
}
