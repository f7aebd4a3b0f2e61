/** Reads the files of an artefact, verifies each of them, and counts the bytes as they come. */
import { XLExportError } from "../errors.js";
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
    const bytes = await source.read(name, { onBytes: counter?.of(name), most: facts.num_bytes, signal });
    if (bytes.length !== facts.num_bytes) {
      throw new XLExportError(
        `${name} of ${source.name} has ${bytes.length} bytes, expected ${facts.num_bytes}; copy it again, ` +
          "or export the artefact again.",
      );
    }
    if ((await sha256(bytes)) !== facts.sha256) {
      throw new XLExportError(
        `${name} of ${source.name} was altered: its SHA-256 is not the one in spec.json; copy it again, or ` +
          "export the artefact again.",
      );
    }
    return bytes;
  };
}
