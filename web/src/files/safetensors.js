/**
 * Arrays in one file that any language can read: the layout of safetensors, with a SHA-256 of the numbers
 * (see docs/reference/saved-streams.md).
 */
import { TYPES } from "../element-types.js";
import { XLExportError, shown } from "../errors.js";
import { sha256 } from "./sha256.js";

/**
 * @typedef {{dtype: string, shape: number[], data: Uint8Array}} StoredArray `data`: its bytes, little-endian
 * @typedef {{arrays: Map<string, StoredArray>, metadata: Record<string, string>}} StoredArrays
 */

/** The bytes of a number of each type. @type {Record<string, number>} */
const BYTES = Object.fromEntries(
  Object.values(TYPES).flatMap(({ stored, array }) => (stored ? [[stored, array.BYTES_PER_ELEMENT]] : [])),
);
const MOST_HEADER = 2 ** 26;

/** @param {StoredArrays} stored @returns {Promise<Uint8Array>} */
export async function writeTensors({ arrays, metadata }) {
  const size = [...arrays.values()].reduce((sum, { data }) => sum + data.length, 0);
  const numbers = new Uint8Array(size);
  /** @type {Record<string, object>} */
  const header = {};
  let at = 0;
  for (const [name, { dtype, shape, data }] of arrays) {
    numbers.set(data, at);
    header[name] = { dtype, shape, data_offsets: [at, at + data.length] };
    at += data.length;
  }
  const told = { ...metadata, sha256: await sha256(numbers) };
  const text = new TextEncoder().encode(JSON.stringify({ __metadata__: told, ...header }));
  const length = Math.ceil(text.length / 8) * 8; // so that the numbers begin at a multiple of 8 bytes
  const file = new Uint8Array(8 + length + size).fill(0x20, 8, 8 + length);
  new DataView(file.buffer).setBigUint64(0, BigInt(length), true);
  file.set(text, 8);
  file.set(numbers, 8 + length);
  return file;
}

/**
 * The arrays and texts of a file; each array has bytes of its own.
 * @param {Uint8Array} file @param {string} where @returns {Promise<StoredArrays>}
 */
export async function readTensors(file, where) {
  const damaged = (/** @type {string} */ what) =>
    new XLExportError(`${where} is not a readable file of tensors (${what}); copy or make it again.`);
  const length =
    file.length < 8 ? 0 : Number(new DataView(file.buffer, file.byteOffset, 8).getBigUint64(0, true));
  if (length < 2 || length > MOST_HEADER || 8 + length > file.length) throw damaged("it has no header");
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(file.slice(8, 8 + length)));
  } catch {
    throw damaged("its header is not JSON");
  }
  const { __metadata__: metadata, ...entries } = header ?? {};
  const texts =
    metadata &&
    typeof metadata === "object" &&
    Object.values(metadata).every((value) => typeof value === "string");
  if (!texts || !Object.values(entries).every(isEntry)) throw damaged("an entry is no array");
  const numbers = file.slice(8 + length);
  /** @type {Map<string, StoredArray>} */
  const arrays = new Map();
  let at = 0;
  const listed = Object.entries(entries).sort(
    ([, a], [, b]) => a.data_offsets[0] - b.data_offsets[0] || a.data_offsets[1] - b.data_offsets[1],
  );
  for (const [
    name,
    {
      dtype,
      shape,
      data_offsets: [from, to],
    },
  ] of listed) {
    const end = at + shape.reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b, BYTES[dtype]);
    if (from !== at || to !== end || end > numbers.length)
      throw damaged(`its header puts ${shown(name)} where no such array lies`);
    arrays.set(name, { dtype, shape, data: numbers.slice(at, end) });
    at = end;
  }
  if (at !== numbers.length || (await sha256(numbers)) !== metadata.sha256) {
    throw damaged("its numbers do not match its SHA-256");
  }
  return { arrays, metadata };
}

/** @param {any} facts */
function isEntry(facts) {
  const sizes = (/** @type {any} */ list) =>
    Array.isArray(list) && list.length <= 9 && list.every((n) => Number.isSafeInteger(n) && n >= 0);
  return (
    facts &&
    Object.hasOwn(BYTES, facts.dtype) &&
    sizes(facts.shape) &&
    sizes(facts.data_offsets) &&
    facts.data_offsets.length === 2 &&
    Object.keys(facts).length === 3
  );
}
