/**
 * The file of a saved stream: what `saveMemory` gives, an `.npz`, which is a ZIP archive. The text on the page
 * travels in the archive's comment, which every other reader passes over.
 */

const SIGNATURE = [0x50, 0x4b, 0x05, 0x06]; // of the record that ends a ZIP archive
const RECORD = 22; // bytes of it, without its comment
const MOST = 0xffff; // bytes of a comment

/**
 * The archive with a note as its comment; without one where the note is too long.
 * @param {Uint8Array} archive without a comment @param {unknown} note
 */
export function withNote(archive, note) {
  const text = new TextEncoder().encode(JSON.stringify(note));
  const at = archive.length - RECORD;
  if (text.length > MOST || !endsAt(archive, at)) return archive;
  const whole = new Uint8Array(archive.length + text.length);
  whole.set(archive);
  whole.set(text, archive.length);
  new DataView(whole.buffer).setUint16(at + 20, text.length, true);
  return whole;
}

/**
 * The archive without its comment, and the note in the comment; null where there is none.
 * @param {Uint8Array} bytes @returns {{archive: Uint8Array, note: any}}
 */
export function withoutNote(bytes) {
  for (let at = bytes.length - RECORD; at >= Math.max(0, bytes.length - RECORD - MOST); at--) {
    if (!endsAt(bytes, at)) continue;
    const archive = bytes.slice(0, at + RECORD);
    archive.fill(0, at + 20);
    let note = null;
    try {
      note = JSON.parse(new TextDecoder().decode(bytes.subarray(at + RECORD)));
    } catch {
      // another program's comment, or none
    }
    return { archive, note };
  }
  return { archive: bytes, note: null };
}

/** Whether the last record of an archive stands here. @param {Uint8Array} bytes @param {number} at */
function endsAt(bytes, at) {
  if (at < 0 || SIGNATURE.some((byte, i) => bytes[at + i] !== byte)) return false;
  return at + RECORD + bytes[at + 20] + 256 * bytes[at + 21] === bytes.length;
}
