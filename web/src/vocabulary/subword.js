/**
 * A vocabulary of subwords, computed by Hugging Face's library `tokenizers` as it is written for JavaScript.
 *
 * Its file `tokenizer.json` travels beside `vocab.json`. The library is loaded with the first such
 * vocabulary.
 */
import { XLExportError, firstLine, shown } from "../errors.js";
import { parseJson } from "../files/json.js";
import { sha256 } from "../files/sha256.js";
import { asText, broken, specialTokens } from "./base.js";
import { mend, refuseUnknownParts } from "./library.js";

/** @typedef {import("../../index.js").Vocabulary} Vocabulary */

const FILE = "tokenizer.json";
const PIECE = 2 ** 18; // characters of a text that the library encodes at a time
const UNFINISHED = "\ufffd"; // what the library decodes the first bytes of a character to
const LONGEST_CHARACTER = 8; // tokens; after so many, an unfinished character is broken for good

/**
 * @param {any} data @param {string} where @param {(file: string) => Promise<Uint8Array>} read
 * @param {(name: "tokenizers") => Promise<any>} load loads the library
 * @returns {Promise<Vocabulary>}
 */
export async function subwordVocabulary(data, where, read, load) {
  const { size } = data;
  if (data.library !== "tokenizers" || data.file !== FILE) {
    throw new XLExportError(
      `${where} needs the library ${shown(data.library)}, and only tokenizers runs here; train or import ` +
        "the model with a tokenizer.json.",
    );
  }
  if (!Number.isInteger(size) || size < 1)
    throw new XLExportError(`${where} has no size; export the artefact again.`);
  const bytes = await read(FILE);
  if ((await sha256(bytes)) !== data.sha256) {
    throw new XLExportError(`${FILE} was altered: its SHA-256 is not the one in ${where}; copy it again.`);
  }
  const content = parseJson(bytes, FILE);
  refuseUnknownParts(content, FILE);
  const { Tokenizer } = await load("tokenizers");
  const library = refused(FILE, () => {
    const made = new Tokenizer({ ...content, truncation: null, padding: null }, {});
    mend(made);
    return made;
  });
  const decoded = (/** @type {number[]} */ ids) =>
    ids.length
      ? library.decode(ids, { skip_special_tokens: false, clean_up_tokenization_spaces: false })
      : "";
  return {
    kind: "subword",
    size,
    special: specialTokens(data, size, where),
    encode(text) {
      if (asText(text).includes("\0")) {
        throw new XLExportError(
          `character ${text.indexOf("\0")} of the text is NUL, so it is no text; give a text.`,
        );
      }
      if (broken(text)) {
        throw new XLExportError(
          "the text has half of a surrogate pair, which is no Unicode text; remove it.",
        );
      }
      /** @type {number[]} */
      const ids = [];
      for (const piece of pieces(text)) {
        const found = refused("text", () => library.encode(piece, { add_special_tokens: false }).ids);
        for (const id of found) ids.push(id);
      }
      const outside = ids.find((id) => id >= size);
      if (outside !== undefined) {
        throw new XLExportError(
          `the text has the token ${outside}, and the model has ${size} tokens; its ${FILE} is of another ` +
            "model.",
        );
      }
      return ids;
    },
    decoder() {
      /** @type {number[]} */
      let kept = []; // tokens whose text was returned; only the last of them matter
      /** @type {number[]} */
      let waiting = [];
      return (token) => {
        waiting.push(token);
        const before = decoded(kept);
        const after = decoded([...kept, ...waiting]);
        if (after.endsWith(UNFINISHED) && waiting.length < LONGEST_CHARACTER) return "";
        const [old, now] = [Array.from(before), Array.from(after)];
        let same = 0;
        while (same < Math.min(old.length, now.length) && old[same] === now[same]) same++;
        [kept, waiting] = [waiting, []];
        return now.slice(same).join("");
      };
    },
  };
}

/** @template T @param {string} what @param {() => T} work @returns {T} */
function refused(what, work) {
  try {
    return work();
  } catch (error) {
    throw new XLExportError(
      `the ${what} could not be used by the library of the vocabulary (${firstLine(error)}); give a file ` +
        "that the library tokenizers has written.",
      { cause: error },
    );
  }
}

/**
 * The text in pieces that end at the end of a line, where there is none in front of a blank, and where there
 * is none either after `PIECE` characters. They are the pieces that Python makes.
 * @param {string} text
 */
export function* pieces(text) {
  if (text.length <= PIECE) return void (yield text);
  const characters = Array.from(text);
  let at = 0;
  while (characters.length - at > PIECE) {
    let end = at + PIECE;
    const line = (/** @type {number} */ i) => characters[i - 1] === "\n" && !/\s/.test(characters[i] ?? " ");
    const blank = (/** @type {number} */ i) => characters[i] === " ";
    const last = (/** @type {(i: number) => boolean} */ fits, /** @type {number} */ from) => {
      for (let i = from; i > at + 1; i--) if (fits(i)) return i;
      return 0;
    };
    end = last(line, at + PIECE - 1) || last(blank, at + PIECE - 1) || end;
    yield characters.slice(at, end).join("");
    at = end;
  }
  yield characters.slice(at).join("");
}
