/**
 * JSON whose numbers keep the text that the file has.
 *
 * The identity of an artefact is the hash of its `spec.json`, written again with sorted keys. JavaScript
 * prints some numbers in another way than the exporter did, so no number is ever printed: its own text is.
 */
import { XLExportError } from "../errors.js";

const DEEPEST = 64;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const BLANK = /[ \t\n\r]*/y;

/** A number of a JSON text. */
class NumberText {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
  }
}

/**
 * The value of a JSON text, with numbers as `NumberText` and objects as Map.
 * @param {string} text @param {string} where
 */
export function parseExact(text, where) {
  let at = 0;
  const fail = () => {
    throw new XLExportError(`${where} is not valid JSON (at character ${at}); copy or make it again.`);
  };
  const match = (/** @type {RegExp} */ pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text)?.[0];
    if (found === undefined) return fail();
    at += found.length;
    return found;
  };
  /** @param {string} word @param {unknown} value */
  const literal = (word, value) => {
    if (!text.startsWith(word, at)) fail();
    at += word.length;
    return value;
  };
  /** @param {string} close @param {() => void} item */
  const items = (close, item) => {
    at++;
    match(BLANK);
    if (text[at] === close) return void at++;
    for (;;) {
      item();
      match(BLANK);
      if (text[at] === close) return void at++;
      if (text[at++] !== ",") fail();
      match(BLANK);
    }
  };
  /** @param {number} depth @returns {unknown} */
  const value = (depth) => {
    if (depth > DEEPEST) fail();
    match(BLANK);
    const first = text[at];
    if (first === "{") {
      /** @type {Map<string, unknown>} */
      const map = new Map();
      items("}", () => {
        const key = JSON.parse(match(STRING));
        match(BLANK);
        if (text[at++] !== ":") fail();
        map.set(key, value(depth + 1));
      });
      return map;
    }
    if (first === "[") {
      /** @type {unknown[]} */
      const list = [];
      items("]", () => list.push(value(depth + 1)));
      return list;
    }
    if (first === '"') return JSON.parse(match(STRING));
    if (first === "t") return literal("true", true);
    if (first === "f") return literal("false", false);
    if (first === "n") return literal("null", null);
    return new NumberText(match(NUMBER));
  };
  const whole = value(0);
  match(BLANK);
  if (at !== text.length) fail();
  return whole;
}

/**
 * The text over which an identity is taken: keys in the order of their code points, `", "` and `": "` as
 * separators, and every character beyond ASCII as `\uXXXX`. This is what Python's `json.dumps` writes.
 * @param {unknown} value @returns {string}
 */
export function canonical(value) {
  if (value instanceof NumberText) return value.text;
  if (typeof value === "string") return ascii(value);
  if (Array.isArray(value)) return `[${value.map(canonical).join(", ")}]`;
  if (value instanceof Map) {
    const keys = [...value.keys()].sort(byCodePoints);
    return `{${keys.map((key) => `${ascii(key)}: ${canonical(value.get(key))}`).join(", ")}}`;
  }
  return String(value);
}

/** @param {string} text */
function ascii(text) {
  return JSON.stringify(text).replace(
    /[\u007f-\uffff]/g,
    (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** @param {string} a @param {string} b */
function byCodePoints(a, b) {
  const [x, y] = [Array.from(a), Array.from(b)];
  for (let i = 0; i < Math.min(x.length, y.length); i++) {
    const difference = Number(x[i].codePointAt(0)) - Number(y[i].codePointAt(0));
    if (difference) return difference;
  }
  return x.length - y.length;
}

/**
 * The plain value of a JSON file: numbers as numbers and objects as objects.
 * @param {Uint8Array} bytes @param {string} where @returns {any}
 */
export function parseJson(bytes, where) {
  try {
    return JSON.parse(utf8(bytes, where));
  } catch (error) {
    if (error instanceof XLExportError) throw error;
    throw new XLExportError(`${where} is not valid JSON; copy or make it again.`, { cause: error });
  }
}

/** @param {Uint8Array} bytes @param {string} where */
export function utf8(bytes, where) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch (error) {
    throw new XLExportError(`${where} is not UTF-8; copy or make it again.`, { cause: error });
  }
}
