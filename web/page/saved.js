/**
 * The file of a saved stream (docs/reference/saved-streams.md), with a note of the page among its metadata:
 * the text. Every other reader passes over a name that it does not know.
 */

const LENGTH = 8; // bytes of the number of bytes of the header
const METADATA = "__metadata__";
const NAME = "page";

/**
 * @typedef {{header: any, numbers: Uint8Array}} Parts of a file: its header as JSON, and all numbers
 */

/**
 * The file with a note.
 * @param {Uint8Array} file as `saveMemory` gives it @param {unknown} note
 */
export function withNote(file, note) {
  const parts = read(file);
  if (!parts) return file;
  const { header, numbers } = parts;
  header[METADATA] = { ...header[METADATA], [NAME]: JSON.stringify(note) };
  const text = JSON.stringify(header);
  const bytes = new TextEncoder().encode(text);
  const head = new TextEncoder().encode(text + " ".repeat((8 - (bytes.length % 8)) % 8));
  const whole = new Uint8Array(LENGTH + head.length + numbers.length);
  new DataView(whole.buffer).setBigUint64(0, BigInt(head.length), true);
  whole.set(head, LENGTH);
  whole.set(numbers, LENGTH + head.length);
  return whole;
}

/** The note in a file; null where it has none. @param {Uint8Array} file */
export function noteOf(file) {
  try {
    return JSON.parse(read(file)?.header[METADATA][NAME]);
  } catch {
    return null; // a file of another program, or no file of streams at all
  }
}

/** @param {Uint8Array} file @returns {Parts | null} */
function read(file) {
  if (file.length < LENGTH) return null;
  const length = new DataView(file.buffer, file.byteOffset).getBigUint64(0, true);
  if (length > BigInt(file.length - LENGTH)) return null;
  const end = LENGTH + Number(length);
  try {
    return {
      header: JSON.parse(new TextDecoder().decode(file.subarray(LENGTH, end))),
      numbers: file.subarray(end),
    };
  } catch {
    return null;
  }
}
