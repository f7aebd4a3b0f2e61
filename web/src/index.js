/**
 * Language models with segment recurrence in a page and in Node. `open(url)` makes a model of an artefact
 * that `xl-export export` has written; see README.md.
 */
import { openHere } from "./open.js";
import { openInWorker } from "./worker/client.js";

export { XLExportError } from "./errors.js";
export { decode } from "./vocabulary/base.js";

/**
 * @param {Parameters<typeof import("../index.js").open>[0]} address
 * @param {import("../index.js").OpenOptions} [options]
 * @returns {Promise<import("../index.js").Model>}
 */
export async function open(address, options = {}) {
  return options.worker ? openInWorker(address, options) : openHere(address, options);
}
