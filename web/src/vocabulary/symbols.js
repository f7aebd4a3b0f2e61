/** Vocabularies whose tokens are bytes, characters, words, or integers that another program makes. */
import { XLExportError, shown } from "../errors.js";
import {
  asPlainText,
  asText,
  byteDecoder,
  checkedSymbols,
  specialTokens,
  wholeTokens,
  words,
} from "./base.js";

/** @typedef {import("../../index.js").Vocabulary} Vocabulary */

/** @param {any} data @param {string} where @returns {Vocabulary} */
export function byteVocabulary(data, where) {
  const values = data.values ?? Array.from({ length: 256 }, (_, i) => i);
  const left = data.skipped ?? [];
  const bytes = (/** @type {any} */ list) =>
    Array.isArray(list) && list.every((x) => Number.isInteger(x) && x >= 0 && x < 256);
  if (!bytes(values) || !values.length || new Set(values).size !== values.length || !bytes(left)) {
    throw new XLExportError(
      `${where} is not a byte vocabulary; expected lists of different bytes as its values and skipped.`,
    );
  }
  const skipped = new Set(left);
  const ids = new Int32Array(256).fill(-1);
  values.forEach((/** @type {number} */ value, /** @type {number} */ id) => (ids[value] = id));
  return {
    kind: "byte",
    size: values.length,
    special: {},
    encode(text) {
      const found = [];
      for (const [at, byte] of new TextEncoder().encode(asText(text)).entries()) {
        if (skipped.has(byte)) continue;
        if (ids[byte] < 0) {
          throw new XLExportError(
            `the text has the byte ${byte} at byte ${at}, which is not among the ${values.length} bytes ` +
              "that this model was trained on; remove it from the text.",
          );
        }
        found.push(ids[byte]);
      }
      return found;
    },
    decoder() {
      return byteDecoder((token) => [values[token]]);
    },
  };
}

/** @param {any} data @param {string} where @returns {Vocabulary} */
export function charVocabulary(data, where) {
  const symbols = checkedSymbols(data.symbols, where, "char");
  if (symbols.some((symbol) => Array.from(symbol).length !== 1)) {
    throw new XLExportError(`${where} is not a char vocabulary; a symbol is longer than one character.`);
  }
  const ids = new Map(symbols.map((symbol, id) => [symbol, id]));
  return {
    kind: "char",
    size: symbols.length,
    special: {},
    encode(text) {
      return Array.from(asText(text), (symbol, at) => {
        const id = ids.get(symbol);
        if (id !== undefined) return id;
        throw new XLExportError(
          `${shown(symbol)}, character ${at + 1} of the text, is not among the ${symbols.length} ` +
            "characters that this model was trained on; remove it from the text.",
        );
      });
    },
    decoder: () => wholeTokens((token) => symbols[token]),
  };
}

/**
 * The tokens are the words between white space.
 * @param {any} data @param {string} where @returns {Vocabulary}
 */
export function wordVocabulary(data, where) {
  const symbols = checkedSymbols(data.symbols, where, "word");
  const { unknown = "<unk>", end_of_line: end = "<eos>", start_of_line: start = null } = data;
  const lower = data.lower_case ?? false;
  const single = (/** @type {any} */ mark) =>
    typeof mark === "string" && words(mark).length === 1 && words(mark)[0] === mark;
  const marks = [unknown, ...[end, start].filter((mark) => mark !== null)];
  if (!marks.every(single) || typeof lower !== "boolean") {
    throw new XLExportError(
      `${where} is not a word vocabulary; its marks ${shown(marks)} are not single words.`,
    );
  }
  const ids = new Map(symbols.map((symbol, id) => [symbol, id]));
  const named = { unknown: ids.get(unknown), end_of_line: ids.get(end), beginning: ids.get(start) };
  const special = Object.fromEntries(Object.entries(named).filter(([, id]) => id !== undefined));

  /** The words of a text with the marks of its lines. @param {string} text */
  function marked(text) {
    const lines = text.split("\n");
    return lines.flatMap((line, number) => {
      const found = words(line);
      const begins = start !== null && (found.length > 0 || number < lines.length - 1);
      return [...(number && end !== null ? [end] : []), ...(begins ? [start] : []), ...found];
    });
  }

  return {
    kind: "word",
    size: symbols.length,
    special,
    encode(text) {
      const plain = asPlainText(text);
      return marked(lower ? plain.toLowerCase() : plain).map((word, at) => {
        const id = ids.get(word) ?? ids.get(unknown);
        if (id !== undefined) return id;
        throw new XLExportError(
          `${shown(word)}, token ${at + 1} of the text, is not among the ${symbols.length} words of this ` +
            `model, which has no ${unknown}; remove it from the text.`,
        );
      });
    },
    decoder() {
      let lineStart = true;
      let begun = start === null;
      return wholeTokens((token) => {
        const symbol = symbols[token];
        if (!begun && symbol === start) {
          begun = true;
          return "";
        }
        const word = symbol === end ? "\n" : symbol;
        const blank = lineStart || word === "\n" ? "" : " ";
        lineStart = word === "\n";
        begun = start === null || !lineStart;
        return blank + word;
      });
    },
  };
}

/** @param {any} data @param {string} where @returns {Vocabulary} */
export function idsVocabulary(data, where) {
  const { size } = data;
  if (!Number.isInteger(size) || size < 1 || size > 2 ** 24) {
    throw new XLExportError(
      `${where} is not a vocabulary; its size is ${shown(size)}, expected 1 to 16777216.`,
    );
  }
  const names = data.names === undefined ? null : checkedSymbols(data.names, where, "ids");
  if (
    names &&
    (names.length !== size || names.some((name) => words(name).length !== 1 || words(name)[0] !== name))
  ) {
    throw new XLExportError(`${where} is not an ids vocabulary; expected ${size} names without white space.`);
  }
  const ids = new Map((names ?? []).map((name, id) => [name, id]));
  const number = (/** @type {string} */ word) =>
    /^[0-9]{1,8}$/.test(word) && Number(word) < size ? Number(word) : undefined;
  return {
    kind: "ids",
    size,
    special: specialTokens(data, size, where),
    encode(text) {
      return words(asText(text)).map((word, at) => {
        const id = names ? ids.get(word) : number(word);
        if (id !== undefined) return id;
        throw new XLExportError(
          `${shown(word)}, word ${at + 1} of the text, is not among the ${names ? "names" : "numbers"} of ` +
            `this model's ${size} tokens; give tokens with blanks between, such as ` +
            `${shown(names?.[0] ?? "0")}, or ids.`,
        );
      });
    },
    decoder() {
      let blank = "";
      return wholeTokens((token) => {
        const text = blank + (names ? names[token] : String(token));
        blank = " ";
        return text;
      });
    },
  };
}
