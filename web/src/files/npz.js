/**
 * Reads NumPy's `.npz` files, zip archives of arrays: older saved streams, and the references of artefacts
 * from before `reference.json`.
 */
import { XLExportError, firstLine } from "../errors.js";

/**
 * @typedef {{dtype: string, shape: number[], data: Uint8Array}} NpyArray `data`: the bytes of the array,
 * copied
 */

const LOCAL = 0x04034b50;
const CENTRAL = 0x02014b50;
const END = 0x06054b50;
const ITEM_BYTES = /** @type {Record<string, number>} */ ({
  "<f4": 4,
  "<f2": 2,
  "<f8": 8,
  "<i8": 8,
  "<i4": 4,
  "|b1": 1,
  "|i1": 1,
});
const MOST_BYTES = 2 ** 32;

/**
 * Every array of an `.npz` file by its name.
 * @param {Uint8Array} bytes @param {string} where
 * @returns {Promise<Map<string, NpyArray>>}
 */
export async function readNpz(bytes, where) {
  try {
    const arrays = new Map();
    for (const { name, data } of await unzip(bytes)) {
      const key = name.replace(/\.npy$/, "");
      if (arrays.has(key)) throw new Error("it has two arrays of one name");
      arrays.set(key, readNpy(data));
    }
    return arrays;
  } catch (error) {
    if (error instanceof XLExportError) throw error;
    throw new XLExportError(
      `${where} is not a readable .npz file (${firstLine(error)}); copy or make it again.`,
    );
  }
}

/** The files of a zip archive, by its list at the end. @param {Uint8Array} bytes */
async function unzip(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let end = bytes.length - 22;
  while (end >= 0 && view.getUint32(end, true) !== END) end--;
  if (end < 0) throw new Error("it has no list of files");
  const count = view.getUint16(end + 10, true);
  let at = view.getUint32(end + 16, true);
  const files = [];
  for (let n = 0; n < count; n++) {
    if (view.getUint32(at, true) !== CENTRAL) throw new Error("its list of files is damaged");
    const method = view.getUint16(at + 10, true);
    const [crc, packed, size] = [16, 20, 24].map((offset) => view.getUint32(at + offset, true));
    const [nameLength, extra, comment] = [28, 30, 32].map((offset) => view.getUint16(at + offset, true));
    const from = view.getUint32(at + 42, true);
    const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + nameLength));
    at += 46 + nameLength + extra + comment;
    if (view.getUint32(from, true) !== LOCAL) throw new Error(`${name} is not where its list says`);
    const start = from + 30 + view.getUint16(from + 26, true) + view.getUint16(from + 28, true);
    if (start + packed > bytes.length) throw new Error(`${name} is cut off`);
    // An array packs to no less than a thousandth; more is promised only by a damaged file.
    if (size > Math.min(MOST_BYTES, 2048 * (packed + 64))) throw new Error(`${name} promises ${size} bytes`);
    const content = bytes.subarray(start, start + packed);
    const data = method === 0 ? content : method === 8 ? await inflate(content, size) : null;
    if (!data) throw new Error(`${name} has compression type ${method}`);
    if (data.length !== size || crc32(data) !== crc) throw new Error(`${name} is damaged`);
    files.push({ name, data });
  }
  return files;
}

/** @param {Uint8Array} bytes @param {number} size */
async function inflate(bytes, size) {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot unpack it");
  const packed = new Blob([/** @type {Uint8Array<ArrayBuffer>} */ (bytes)]);
  const reader = packed.stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const whole = new Uint8Array(size);
  let at = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return whole.subarray(0, at);
    if (at + value.length > size) {
      await reader.cancel();
      throw new Error("it holds more than it promises");
    }
    whole.set(value, at);
    at += value.length;
  }
}

/** @param {Uint8Array} data @returns {NpyArray} */
function readNpy(data) {
  const magic = String.fromCharCode(...data.subarray(1, 6));
  const [major] = data.subarray(6, 7);
  if (data[0] !== 0x93 || magic !== "NUMPY" || (major !== 1 && major !== 2))
    throw new Error("an array has no header");
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const start = major === 1 ? 10 : 12;
  const length = major === 1 ? view.getUint16(8, true) : view.getUint32(8, true);
  const header = new TextDecoder("latin1").decode(data.subarray(start, start + length));
  const found =
    /^\{'descr': '([<|][a-zA-Z]\d+)', 'fortran_order': False, 'shape': \(([\d, ]*)\), \}\s*$/.exec(header);
  if (!found) throw new Error(`an array has the header ${header.trim().slice(0, 60)}`);
  const dtype = found[1];
  const shape = found[2]
    .split(",")
    .map((size) => size.trim())
    .filter(Boolean)
    .map(Number);
  const item = dtype.startsWith("<U") ? 4 * Number(dtype.slice(2)) : ITEM_BYTES[dtype];
  const content = data.slice(start + length);
  if (!item || content.length !== item * shape.reduce((a, b) => a * b, 1)) {
    throw new Error("an array does not hold what its header describes");
  }
  return { dtype, shape, data: content };
}

/** The text in an array of one string. @param {NpyArray} array */
export function textOf({ dtype, shape, data }) {
  if (!dtype.startsWith("<U") || shape.length) return "";
  const points = new Uint32Array(data.buffer, data.byteOffset, data.length / 4);
  // One by one: a call takes only so many arguments.
  const text = (/** @type {number} */ point) =>
    point !== 0 && point <= 0x10ffff ? String.fromCodePoint(point) : "";
  return Array.from(points, text).join("");
}

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});

/** The checksum of zip files. @param {Uint8Array} bytes */
function crc32(bytes) {
  let crc = 0xffffffff;
  for (let i = 0; i < bytes.length; i++) crc = (crc >>> 8) ^ TABLE[(crc ^ bytes[i]) & 255];
  return (crc ^ 0xffffffff) >>> 0;
}
