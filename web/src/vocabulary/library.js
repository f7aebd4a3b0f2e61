/**
 * The library of subwords as the original computes: its JavaScript form reads `\s`, `\w` and `\d` in patterns
 * as JavaScript does, and the original as Unicode does.
 */
import { XLExportError, shown } from "../errors.js";
import { asUtf8 } from "./base.js";

/** What the original, written in Rust, means by these classes; each text goes inside brackets. */
const CLASSES = /** @type {Record<string, string>} */ ({
  s: "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000",
  w: "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\u200c\\u200d",
  d: "\\p{Nd}",
});

/** The parts of a `tokenizer.json` whose ids and texts were compared with the original library's. */
const KNOWN = /** @type {Record<string, string[]>} */ ({
  model: ["BPE", "Unigram"],
  normalizer: ["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"],
  pre_tokenizer: ["Sequence", "ByteLevel", "Metaspace", "Split"],
  decoder: ["Sequence", "ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"],
});

/**
 * Raises XLExportError if a `tokenizer.json` has a part that may give other ids here than in Python.
 * @param {any} content @param {string} where
 */
export function refuseUnknownParts(content, where) {
  if (!content || typeof content !== "object" || !content.model) {
    throw new XLExportError(`${where} is no file of the library tokenizers; export the artefact again.`);
  }
  for (const [part, known] of Object.entries(KNOWN)) {
    for (const { type } of parts(content[part])) {
      if (known.includes(type) || (part === "model" && type === undefined)) continue;
      throw new XLExportError(
        `${where} has the ${part} ${shown(type)}, which may give other ids here than in Python; give token ` +
          "ids that Python has encoded, or train with a byte-level BPE.",
      );
    }
  }
}

/** A part and those inside of it. @param {any} part @returns {any[]} */
function parts(part) {
  if (!part || typeof part !== "object") return [];
  const inner =
    part.type === "Sequence" ? (part.normalizers ?? part.pretokenizers ?? part.decoders ?? []) : [];
  return [part, ...inner.flatMap(parts)];
}

/**
 * The byte of each character in the tokens of a byte-level vocabulary, as GPT-2 has them: a printable
 * character is its own byte, and the other bytes are the characters from U+0100 on.
 */
const BYTE_OF = new Map();
for (let byte = 0, next = 0x100; byte < 0x100; byte++) {
  const printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte !== 0xad);
  BYTE_OF.set(String.fromCharCode(printable ? byte : next++), byte);
}

/**
 * The bytes of a token of a byte-level vocabulary; an added token with other characters is its text.
 * @param {string} token @returns {number[]}
 */
function levelBytes(token) {
  const bytes = Array.from(token, (character) => BYTE_OF.get(character));
  return bytes.includes(undefined) ? [...new TextEncoder().encode(token)] : bytes;
}

/** The byte of a token such as `<0xE2>`; null for any other. @param {string} token */
function fallbackByte(token) {
  const found = /^<0x([0-9a-fA-F]{2})>$/.exec(token);
  return found && parseInt(found[1], 16);
}

/**
 * Which tokens are bytes of UTF-8. allBytes: whether the text is made of the bytes of all tokens, and nothing
 * else. byteRuns: whether a later byte can still change a whole character before it, because a run of byte
 * tokens is decoded as a whole. bytesOf: the bytes of a token; null for a token of whole characters.
 * @param {any} content of a `tokenizer.json` @param {any} library
 */
export function bytesIn(content, library) {
  const types = parts(content.decoder).map(({ type }) => type);
  const [level, byteRuns] = ["ByteLevel", "ByteFallback"].map((type) => types.includes(type));
  const bytesOf = (/** @type {number} */ id) => {
    const token = library.id_to_token(id);
    if (token === undefined) return [];
    if (level) return levelBytes(token);
    const byte = byteRuns ? fallbackByte(token) : null;
    return byte === null ? null : [byte];
  };
  return { allBytes: types.length === 1 && level, byteRuns, bytesOf };
}

/** What the decoders of the original compute where those in JavaScript differ, by their types. */
const DECODERS = /** @type {Record<string, (config: any) => (tokens: string[]) => string[]>} */ ({
  ByteFallback: () => joinBytes,
  ByteLevel: () => (tokens) => [asUtf8(tokens.flatMap(levelBytes))],
  Metaspace:
    ({ replacement = "\u2581", prepend_scheme: scheme = "always" }) =>
    (tokens) =>
      tokens.map((token, at) => token.replaceAll(replacement, at === 0 && scheme !== "never" ? "" : " ")),
});

/** Makes a tokenizer compute what the original computes. @param {any} tokenizer */
export function correct(tokenizer) {
  const seen = new Set();
  const visit = (/** @type {any} */ part) => {
    const walkable = part && (typeof part === "object" || typeof part === "function") && !seen.has(part);
    if (!walkable) return;
    seen.add(part);
    if (part.pattern instanceof RegExp) part.pattern = unicodePattern(part.pattern);
    const decode = DECODERS[part.config?.type];
    if (decode && part.decode_chain) part.decode_chain = decode(part.config);
    for (const list of [part.tokenizers, part.normalizers, part.decoders])
      if (Array.isArray(list)) list.forEach(visit);
  };
  [tokenizer.pre_tokenizer, tokenizer.normalizer, tokenizer.decoder].forEach(visit);
}

/**
 * Tokens of bytes such as `<0xE2>` as text. Where they are no UTF-8, each of them becomes U+FFFD.
 * @param {string[]} tokens
 */
function joinBytes(tokens) {
  /** @type {string[]} */
  const texts = [];
  /** @type {number[]} */
  let bytes = [];
  const flush = () => {
    try {
      texts.push(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes)));
    } catch {
      texts.push(...bytes.map(() => "\ufffd"));
    }
    bytes = [];
  };
  for (const token of tokens) {
    const byte = fallbackByte(token);
    if (byte !== null) {
      bytes.push(byte);
      continue;
    }
    flush();
    texts.push(token);
  }
  flush();
  return texts.filter(Boolean);
}

/** @param {RegExp} pattern */
function unicodePattern({ source, flags }) {
  let inside = false;
  const mended = source.replace(/\\[^]|[[\]]/g, (text) => {
    if (text === "[" || text === "]") inside = text === "[";
    const found = CLASSES[text[1]?.toLowerCase()];
    if (text[0] !== "\\" || !found) return text;
    const negated = text[1] !== text[1].toLowerCase();
    if (inside) return negated ? text : found;
    return `[${negated ? "^" : ""}${found}]`;
  });
  return new RegExp(mended, flags.includes("u") ? flags : `${flags}u`);
}
