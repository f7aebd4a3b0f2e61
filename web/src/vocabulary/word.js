/** A vocabulary whose tokens are the words between white space. */
import { XLExportError, shown } from "../errors.js";
import { asText, checkedSymbols, wholeTokens, words } from "./base.js";

/** @typedef {import("../../index.js").Vocabulary} Vocabulary */

/** @param {any} data @param {string} where @returns {Vocabulary} */
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
      if (asText(text).includes("\0")) {
        throw new XLExportError(
          `character ${text.indexOf("\0") + 1} of the text is NUL, so it is no text; give a text.`,
        );
      }
      return marked(lower ? text.toLowerCase() : text).map((word, at) => {
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
