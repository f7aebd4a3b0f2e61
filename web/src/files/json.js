import { XLExportError, firstLine } from "../errors.js";

/** A string with the colon of a key, or a number. */
const TOKENS = /"(?:[^"\\]|\\.)*"(\s*:)?|-?\d[\d.eE+-]*/g;

/**
 * The value of a JSON file. Readers differ in what they make of a key that an object has twice, and of half a
 * surrogate pair: such a file has no one meaning.
 * @param {Uint8Array} bytes @param {string} where @returns {any}
 */
export function parseJson(bytes, where) {
  const text = utf8(bytes, where);
  let found = -1; // the whole value has a key too, which is empty
  const count = (/** @type {any} */ holder, /** @type {string} */ key, /** @type {any} */ value) => {
    if (!Array.isArray(holder)) found++;
    if (/\p{Surrogate}/u.test(key) || (typeof value === "string" && /\p{Surrogate}/u.test(value)))
      throw new SyntaxError("it has half of a surrogate pair");
    return value;
  };
  try {
    const value = JSON.parse(text, function (key, each) {
      return count(this, key, each);
    });
    const keys = [...text.matchAll(TOKENS)].filter(([, colon]) => colon).length;
    if (found !== keys) throw new SyntaxError("it has a key twice");
    return value;
  } catch (error) {
    throw new XLExportError(`${where} is not valid JSON (${firstLine(error)}); copy or make it again.`, {
      cause: error,
    });
  }
}

/**
 * The value of a valid JSON file in which each number is a string, as it is written: 1.0 and 1 are one value,
 * and only the second is a whole number.
 * @param {Uint8Array} bytes @param {string} where @returns {any}
 */
export function withoutNumbers(bytes, where) {
  return JSON.parse(utf8(bytes, where).replace(TOKENS, (token) => (token[0] === '"' ? token : `"${token}"`)));
}

/** @param {Uint8Array} bytes @param {string} where */
export function utf8(bytes, where) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch (error) {
    throw new XLExportError(`${where} is not UTF-8; copy or make it again.`, { cause: error });
  }
}
