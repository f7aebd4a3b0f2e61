/**
 * A vocabulary of subwords, computed by Hugging Face's library `tokenizers` as it is written for JavaScript.
 *
 * Its file `tokenizer.json` lies next to `vocab.json`. The library is loaded with the first such
 * vocabulary.
 */
import { XLExportError, firstLine, shown } from "../errors.js";
import { parseJson } from "../files/json.js";
import { sha256 } from "../files/sha256.js";
import { asPlainText, byteDecoder, decoderOf, specialTokens, unfinished } from "./base.js";
import { bytesIn, correct, refuseUnknownParts } from "./library.js";

/** @typedef {import("../../index.js").Vocabulary} Vocabulary */

const FILE = "tokenizer.json";
const PIECE_CHARACTERS = 2 ** 18; // characters of a text that the library encodes at a time

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
  const opened = (/** @type {(token: any) => boolean} */ known) =>
    refused(FILE, () => {
      const added_tokens = content.added_tokens.filter(known);
      const made = new Tokenizer({ ...content, added_tokens, truncation: null, padding: null }, {});
      correct(made);
      return made;
    });
  const library = opened(() => true);
  const encoder = opened((token) => !token.special); // text never becomes a special token
  const { allBytes, bytesOf, byteRuns } = bytesIn(content, library);
  const known = (/** @type {number} */ token) => library.id_to_token(token) !== undefined;
  const decoded = (/** @type {number[]} */ ids) => {
    const found = ids.filter(known); // the model may have more tokens than the library
    if (!found.length) return "";
    return library.decode(found, { skip_special_tokens: false, clean_up_tokenization_spaces: false });
  };
  return {
    kind: "subword",
    size,
    special: specialTokens(data, size, where),
    encode(text) {
      /** @type {number[]} */
      const ids = [];
      for (const piece of pieces(asPlainText(text))) {
        const found = refused("text", () => encoder.encode(piece, { add_special_tokens: false }).ids);
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
    decoder: () =>
      allBytes
        ? byteDecoder((token) => bytesOf(token) ?? [])
        : pieceDecoder({ decoded, bytesOf, byteRuns, known }),
  };
}

/**
 * Decodes with the library, piece by piece. A piece is the fewest tokens that end with a whole character: no
 * later token can change its text. Its text is what it adds to the text of the tokens before it. Of these the
 * last piece is enough, together with the last one that has text by itself: behind such a piece a library no
 * longer treats a token as the first of a text, which loses its blank.
 * @param {{decoded: (ids: number[]) => string, bytesOf: (token: number) => number[] | null,
 *   byteRuns: boolean, known: (token: number) => boolean}} library byteRuns: see `bytesIn`
 * @returns {import("../../index.js").Decoder}
 */
function pieceDecoder({ decoded, bytesOf, byteRuns, known }) {
  /** @type {number[]} */
  let anchor = []; // the last piece that has text by itself
  /** @type {number[]} */
  let before = []; // the anchor and the last piece
  /** @type {number[]} */
  let piece = []; // tokens whose text was not returned
  /** @type {number[]} */
  let bytes = []; // those at the end of the piece
  let shown = ""; // what `prime` has found of the text of the piece
  const rest = (half = true) => {
    const begun = half ? 0 : unfinished(bytes);
    const whole = begun ? (byteRuns ? piece.slice(0, -begun) : []) : piece; // in a run each token is one byte
    if (!whole.length) return "";
    const text = decoded([...before, ...whole]).slice(decoded(before).length);
    return text.startsWith(shown) ? text.slice(shown.length) : text;
  };
  const add = (/** @type {number} */ token) => {
    if (!known(token)) return "";
    piece.push(token);
    const own = bytesOf(token);
    bytes = own ? [...bytes.slice(-3), ...own] : [];
    if (own && (byteRuns || unfinished(bytes))) return "";
    const text = rest();
    if (decoded(piece)) anchor = before = piece;
    else before = [...anchor, ...piece];
    [piece, shown] = [[], ""];
    return text;
  };
  return decoderOf(add, rest, () => void (shown += rest(false)));
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
 * The text in pieces that end at the end of a line, or else before a blank, or else after
 * `PIECE_CHARACTERS`. They are the pieces that Python makes.
 * @param {string} text
 */
export function* pieces(text) {
  if (text.length <= PIECE_CHARACTERS) return void (yield text);
  const characters = Array.from(text);
  let at = 0;
  while (characters.length - at > PIECE_CHARACTERS) {
    let end = at + PIECE_CHARACTERS;
    const line = (/** @type {number} */ i) => characters[i - 1] === "\n" && !/\s/.test(characters[i] ?? " ");
    const blank = (/** @type {number} */ i) => characters[i] === " ";
    const last = (/** @type {(i: number) => boolean} */ fits, /** @type {number} */ from) => {
      for (let i = from; i > at + 1; i--) if (fits(i)) return i;
      return 0;
    };
    end = last(line, at + PIECE_CHARACTERS - 1) || last(blank, at + PIECE_CHARACTERS - 1) || end;
    yield characters.slice(at, end).join("");
    at = end;
  }
  yield characters.slice(at).join("");
}
