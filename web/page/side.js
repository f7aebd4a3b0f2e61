/** What text and music share: messages and buttons, the sampling settings, the memory meter, the speed. */
import { Speed, drawMemory, drawSpeed } from "./plots.js";
import { Refusal } from "./stream.js";
import { inBytes } from "./tokens.js";

const FAR = [10_000, 1_000_000]; // positions at which the meter compares
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

/** The meter and the plot next to the text. */
export class Side {
  /** @param {import("./back-end.d.ts").Description} known */
  constructor({ bytesPerStream, bytesPerToken }) {
    this.fixed = bytesPerStream;
    this.perToken = bytesPerToken;
    this.position = 0;
    this.measured = false;
    this.speed = new Speed();
    const redraw = () => this.#draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    for (const id of ["speed", "memory-plot"]) new ResizeObserver(redraw).observe(part(id));
    part("memory-rows").replaceChildren(
      ...[0, ...FAR].map((position) => {
        const row = document.createElement("tr");
        const cells = [position.toLocaleString("en"), inBytes(this.fixed), inBytes(position * this.perToken)];
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
    this.speed.begin(position, performance.now());
  }

  /** The stream is at this position now. @param {number} position */
  reach(position) {
    this.measured = this.speed.reach(position, performance.now()) || this.measured;
  }

  /** Shows where the stream is; call it at most once a frame. @param {number} position */
  show(position) {
    this.position = position;
    const [at, , growing] = part("memory-rows").children[0].children;
    at.textContent = `${position.toLocaleString("en")} now`;
    growing.textContent = inBytes(position * this.perToken);
    this.#drawMemory();
    if (this.measured) this.#draw();
    this.measured = false;
  }

  get #colours() {
    return { ink: colour("soft"), faint: colour("line"), line: colour("accent"), other: colour("other") };
  }

  #drawMemory() {
    drawMemory(/** @type {HTMLCanvasElement} */ (part("memory-plot")), this, this.#colours);
  }

  #draw() {
    this.#drawMemory();
    drawSpeed(/** @type {HTMLCanvasElement} */ (part("speed")), this.speed, this.#colours);
    const { median } = this.speed;
    part("speed-text").textContent = median
      ? `${Math.round(median).toLocaleString("en")} tokens per second, the median of the latest measurements.`
      : "Press Continue to measure it.";
  }
}
