/** What every vocabulary offers, and the text helpers that they share. */
import { XLExportError, shown } from "../errors.js";

/** @typedef {import("../../index.js").Vocabulary} Vocabulary */
/** @typedef {import("../../index.js").SpecialTokens} SpecialTokens */
/** @typedef {import("../../index.js").Decoder} Decoder */

const WHITE = "\\t\\n\\v\\f\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const SPLIT = new RegExp(`[${WHITE}]+`);
const HALF = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/;

/**
 * The words between white space, which is what Python calls white space: JavaScript's `\s` differs.
 * @param {string} text
 */
export function words(text) {
  return text.split(SPLIT).filter((word) => word !== "");
}

/** Whether a text has half of a surrogate pair, which is no Unicode text. @param {string} text */
function broken(text) {
  return HALF.test(text);
}

/** The text; raises XLExportError unless it is Unicode. @param {unknown} text @returns {string} */
export function asText(text) {
  if (typeof text !== "string") {
    throw new XLExportError(`the text is ${shown(text)}; give a string, or a list of token ids.`);
  }
  if (broken(text)) {
    throw new XLExportError("the text has half of a surrogate pair, which is no Unicode text; remove it.");
  }
  return text;
}

/** The same without NUL, which only files that are no texts have. @param {unknown} given */
export function asPlainText(given) {
  const text = asText(given);
  const at = text.indexOf("\0");
  if (at >= 0) {
    throw new XLExportError(`character ${at + 1} of the text is NUL, so it is no text; give a text.`);
  }
  return text;
}

/** The text of a sequence of tokens. @param {Vocabulary} vocabulary @param {Iterable<number>} tokens */
export function decode(vocabulary, tokens) {
  const decoder = vocabulary.decoder();
  let text = "";
  for (const token of tokens) text += decoder(token);
  return text + decoder.rest();
}

/**
 * A decoder of tokens each of which settles its own text.
 * @param {(token: number) => string} add @returns {Decoder}
 */
export function wholeTokens(add) {
  return decoderOf(add, () => "");
}

/**
 * A decoder of tokens that are bytes of UTF-8.
 * @param {(token: number) => Iterable<number>} bytesOf @returns {Decoder}
 */
export function byteDecoder(bytesOf) {
  /** @type {number[]} */
  let held = []; // the beginning of a character
  const add = (/** @type {number} */ token) => {
    held.push(...bytesOf(token));
    const end = held.length - unfinished(held);
    const text = asUtf8(held.slice(0, end));
    held = held.slice(end);
    return text;
  };
  return decoderOf(add, (half = true) => (half ? asUtf8(held) : ""));
}

/**
 * A decoder from its parts.
 * @param {(token: number) => string} add @param {(half?: boolean) => string} rest
 * @param {() => void} [primed] what is done after tokens whose text is shown already
 * @returns {Decoder}
 */
export function decoderOf(add, rest, primed = () => {}) {
  const prime = (/** @type {Iterable<number>} */ tokens) => {
    for (const token of tokens) add(token);
    primed();
  };
  return Object.assign(add, { rest, prime });
}

/** The text of some bytes, with U+FFFD for what is no UTF-8. @param {number[]} bytes */
export function asUtf8(bytes) {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
}

/** How many bytes at the end are the beginning of a character. @param {number[]} bytes */
export function unfinished(bytes) {
  for (let count = Math.min(3, bytes.length); count > 0; count--) {
    const end = Uint8Array.from(bytes.slice(-count));
    const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
    try {
      if (utf8.decode(end, { stream: true }) === "") return count;
    } catch {
      continue; // they begin no character
    }
  }
  return 0;
}

/**
 * Token ids of a vocabulary as numbers; raises XLExportError for anything else.
 * @param {unknown} ids @param {number} size @param {string} what
 */
export function checkedIds(ids, size, what) {
  const list = Array.isArray(ids) || ArrayBuffer.isView(ids);
  if (!list) throw new XLExportError(`${what} is neither a text nor a list of token ids; give one of them.`);
  const numbers = Array.from(/** @type {Iterable<number | bigint>} */ (/** @type {unknown} */ (ids)), Number);
  for (const [at, token] of numbers.entries()) {
    if (!Number.isInteger(token) || token < 0 || token >= size) {
      throw new XLExportError(
        `${what} has ${shown(/** @type {any} */ (ids)[at])} at index ${at}, which is no token of this ` +
          `model (0 to ${size - 1}); give ids of this model, or a text.`,
      );
    }
  }
  return numbers;
}

/**
 * The special tokens in a `vocab.json`, by their names.
 * @param {any} data @param {number} size @param {string} where @returns {SpecialTokens}
 */
export function specialTokens(data, size, where) {
  const known = ["end_of_document", "beginning", "first", "unknown", "padding", "end_of_line"];
  const special = data.special ?? {};
  const fits = (/** @type {[string, any]} */ [name, token]) =>
    known.includes(name) && Number.isInteger(token) && token >= 0 && token < size;
  if (typeof special !== "object" || !Object.entries(special).every(fits)) {
    throw new XLExportError(
      `${where} is not a vocabulary; its special tokens are ${shown(special)}, expected ids below ${size}.`,
    );
  }
  return special;
}

/**
 * The symbols of a vocabulary, each of them a text of its own.
 * @param {any} symbols @param {string} where @param {string} kind @returns {string[]}
 */
export function checkedSymbols(symbols, where, kind) {
  const fail = (/** @type {string} */ why) => {
    throw new XLExportError(`${where} is not a ${kind} vocabulary; ${why}; export the artefact again.`);
  };
  if (!Array.isArray(symbols) || !symbols.every((s) => typeof s === "string" && s))
    fail("its symbols are no list of texts");
  if (new Set(symbols).size !== symbols.length) fail("its symbols repeat");
  if (symbols.some(broken)) fail("a symbol is no Unicode text");
  return symbols;
}
