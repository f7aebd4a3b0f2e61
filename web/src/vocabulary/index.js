/** The vocabulary in a `vocab.json`. */
import { XLExportError } from "../errors.js";
import { parseJson } from "../files/json.js";
import { byteVocabulary, charVocabulary, idsVocabulary, wordVocabulary } from "./symbols.js";
import { subwordVocabulary } from "./subword.js";

/**
 * @param {(file: string) => Promise<Uint8Array>} read reads `vocab.json` and the files next to it
 * @param {(name: "tokenizers") => Promise<any>} load loads the library of subwords
 * @returns {Promise<import("../../index.js").Vocabulary>}
 */
export async function readVocabulary(read, load) {
  const where = "vocab.json";
  const data = parseJson(await read(where), where);
  const kinds = { byte: byteVocabulary, char: charVocabulary, word: wordVocabulary, ids: idsVocabulary };
  const kind = data && typeof data === "object" ? data.kind : undefined;
  if (kind === "subword") return subwordVocabulary(data, where, read, load);
  if (typeof kind === "string" && Object.hasOwn(kinds, kind)) {
    return kinds[/** @type {keyof typeof kinds} */ (kind)](data, where);
  }
  throw new XLExportError(`${where} is not a vocabulary; expected kind byte, char, word, subword or ids.`);
}
