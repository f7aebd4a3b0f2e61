/** Reads the files of an artefact, verifies each of them, and counts the bytes as they come. */
import { AlteredError, XLExportError } from "../errors.js";
import { sha256 } from "./sha256.js";

/** @typedef {import("../../index.js").Progress} Progress */

/** Counts bytes of several files, and tells a listener. */
export class Counter {
  /** @param {((progress: Progress) => void) | undefined} listener */
  constructor(listener) {
    this.listener = listener;
    this.loaded = 0;
    this.total = 0;
  }

  /** @param {number} bytes that will come */
  expect(bytes) {
    this.total += bytes;
  }

  /** A function that hears how many bytes of a file came. @param {string} file */
  of(file) {
    return (/** @type {number} */ bytes) => {
      this.loaded += bytes;
      this.listener?.({ file, loaded: this.loaded, total: this.total });
    };
  }
}

/**
 * A function that reads one file that `spec.json` lists. What it returns is what was verified.
 * @param {import("./source.js").Source} source @param {import("../../index.js").Spec} spec
 * @param {{counter?: Counter, signal?: AbortSignal}} [options]
 */
export function verifiedFiles(source, spec, { counter, signal } = {}) {
  return async (/** @type {string} */ name) => {
    const facts = Object.hasOwn(spec.files, name) ? spec.files[name] : undefined;
    if (!facts) throw new XLExportError(`spec.json does not list ${name}; export the artefact again.`);
    counter?.expect(facts.num_bytes);
    let heard = 0; // bytes of the first reading
    const hear = counter?.of(name);
    const onBytes = (/** @type {number} */ count) => {
      heard += count;
      hear?.(count);
    };
    const read = (/** @type {boolean} */ fresh) =>
      source.read(name, {
        onBytes: fresh ? undefined : onBytes,
        most: facts.num_bytes,
        signal,
        fresh,
      });
    const bytes = await read(false).catch((error) => {
      if (error instanceof AlteredError) return null; // it is larger
      throw error;
    });
    if (bytes && (await fits(bytes, facts))) return bytes;
    // The browser may have kept a file of an earlier artefact at the same address.
    const again = await read(true);
    if (await fits(again, facts)) {
      hear?.(facts.num_bytes - heard);
      return again;
    }
    if (again.length !== facts.num_bytes) {
      throw new AlteredError(
        `${name} of ${source.name} has ${again.length} bytes, expected ${facts.num_bytes}; copy it again, ` +
          "or export the artefact again.",
      );
    }
    throw new AlteredError(
      `${name} of ${source.name} was altered: its SHA-256 is not the one in spec.json; copy it again, or ` +
        "export the artefact again.",
    );
  };
}

/** @param {Uint8Array} bytes @param {{sha256: string, num_bytes: number}} facts */
async function fits(bytes, facts) {
  return bytes.length === facts.num_bytes && (await sha256(bytes)) === facts.sha256;
}
