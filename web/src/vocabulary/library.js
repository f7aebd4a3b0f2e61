/**
 * The library of subwords as the original computes: its JavaScript form reads `\s`, `\w` and `\d` in patterns
 * as JavaScript does, and the original as Unicode does.
 */
import { XLExportError, shown } from "../errors.js";

/** What the original, written in Rust, means by these classes; each text stands inside of brackets. */
const CLASSES = /** @type {Record<string, string>} */ ({
  s: "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000",
  w: "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\u200c\\u200d",
  d: "\\p{Nd}",
});

/** The parts of a `tokenizer.json` with which ids and texts were compared with those of the original. */
const KNOWN = /** @type {Record<string, string[]>} */ ({
  model: ["BPE", "Unigram"],
  normalizer: ["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"],
  pre_tokenizer: ["Sequence", "ByteLevel", "Metaspace", "Split"],
  decoder: ["Sequence", "ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"],
});

/**
 * Raises XLExportError where a `tokenizer.json` has a part that may give other ids here than in Python.
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

/** Makes a tokenizer compute what the original computes. @param {any} tokenizer */
export function mend(tokenizer) {
  const seen = new Set();
  const visit = (/** @type {any} */ part) => {
    const walkable = part && (typeof part === "object" || typeof part === "function") && !seen.has(part);
    if (!walkable) return;
    seen.add(part);
    if (part.pattern instanceof RegExp) part.pattern = unicodePattern(part.pattern);
    if (part.config?.type === "ByteFallback") part.decode_chain = joinBytes;
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
    const byte = /^<0x([0-9a-fA-F]{2})>$/.exec(token);
    if (byte) {
      bytes.push(parseInt(byte[1], 16));
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
