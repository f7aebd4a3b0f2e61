/**
 * Where the files of an artefact come from: a web address, a folder of this machine (in Node), or memory.
 */
import { MissingError, StoppedError, XLExportError, firstLine, refuseStopped, shown } from "../errors.js";
import { platform } from "../platform.js";

/**
 * @typedef {{
 *   name: string,
 *   read: (file: string, options?: ReadOptions) => Promise<Uint8Array>,
 * }} Source
 * @typedef {{
 *   onBytes?: (count: number) => void,
 *   most?: number,
 *   signal?: AbortSignal,
 * }} ReadOptions `onBytes` hears how many bytes came since the last call. `most`: more than that are an
 * error.
 */

export const MAX_FILE_BYTES = 2 ** 32; // bytes; WebAssembly has no more memory
export const HINT = "give the address of the artefact's folder, which has a spec.json";

/**
 * The source that a user names: a URL or a path of a folder, or its files by name.
 * @param {unknown} given @param {string} [hint] on a file that a server does not have
 * @returns {Source}
 */
export function sourceOf(given, hint = `; ${HINT}`) {
  if (given instanceof URL || typeof given === "string") {
    const url = absolute(given);
    return url === null || url.protocol === "file:" ? folder(url ?? String(given)) : web(url, hint);
  }
  if (given && typeof given === "object") return inMemory(/** @type {Record<string, unknown>} */ (given));
  throw new XLExportError(`the artefact is ${shown(given)}; ${HINT}.`);
}

/**
 * An address that means the same in a worker, which has another base address than its page.
 * @param {string | URL} given
 */
export function absoluteAddress(given) {
  return absolute(given)?.href ?? String(given);
}

/**
 * The URL of a folder, with a slash at its end; null for the path of a folder.
 * @param {URL | string} given
 */
function absolute(given) {
  const text = String(given);
  try {
    const url = new URL(text, platform.baseAddress());
    if (!/^(https?|file|blob|data):$/.test(url.protocol)) return null; // a path such as C:\artefact
    if (!url.pathname.endsWith("/")) url.pathname += "/";
    return url;
  } catch {
    return null;
  }
}

/** @param {URL} url @param {string} hint @returns {Source} */
function web(url, hint) {
  return {
    name: url.href,
    async read(file, { onBytes, most = MAX_FILE_BYTES, signal } = {}) {
      const address = new URL(file, url);
      address.search = url.search;
      refuseStopped(signal);
      const failed = (/** @type {string} */ why, Kind = XLExportError) =>
        new Kind(`${address.href} could not be read: ${why}.`);
      const tooLarge = () =>
        new XLExportError(
          `${address.href} could not be read: it has more than the ${most} bytes that were expected; copy ` +
            "the artefact again.",
        );
      try {
        // "no-cache" asks the server whether a kept file, perhaps of an earlier artefact, is still the same.
        const response = await fetch(address, { signal, cache: "no-cache" });
        if (!response.ok) {
          // Object storage whose files cannot be listed answers 403 for a file that does not exist.
          const missing = response.status === 404 || response.status === 403;
          const answer = `the server answered ${response.status} ${response.statusText}`.trim();
          throw failed(`${answer}${hint}`, missing ? MissingError : XLExportError);
        }
        return await body(response, { onBytes, most, tooLarge });
      } catch (error) {
        if (signal?.aborted) throw new StoppedError();
        if (error instanceof XLExportError) throw error;
        throw failed(`${firstLine(error)}; check the address and the connection`);
      }
    },
  };
}

/**
 * All bytes of a response, counted as they come.
 * @param {Response} response
 * @param {{onBytes?: (count: number) => void, most: number, tooLarge: () => Error}} options
 */
async function body(response, { onBytes, most, tooLarge }) {
  const reader = response.body?.getReader();
  if (!reader) return new Uint8Array(await response.arrayBuffer());
  /** @type {Uint8Array[]} */
  const parts = [];
  let length = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    length += value.length;
    if (length > most) {
      await reader.cancel();
      throw tooLarge();
    }
    parts.push(value);
    onBytes?.(value.length);
  }
  const whole = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** @param {URL | string} place @returns {Source} */
function folder(place) {
  const name = place instanceof URL ? place.href : place;
  const { readFile } = platform;
  if (!readFile) {
    throw new XLExportError(`${name} is a path, and a page reads only web addresses; ${HINT}.`);
  }
  return {
    name,
    async read(file, options = {}) {
      refuseStopped(options.signal);
      return readFile(place, file, options);
    },
  };
}

/** @param {Record<string, unknown>} files @returns {Source} */
function inMemory(files) {
  return {
    name: "the given files",
    async read(file, { onBytes, signal } = {}) {
      refuseStopped(signal);
      const found = Object.hasOwn(files, file) ? files[file] : undefined;
      const bytes = found instanceof Blob ? new Uint8Array(await found.arrayBuffer()) : found;
      if (!(bytes instanceof Uint8Array)) {
        throw new MissingError(`${file} is not among the given files; give all files of the artefact.`);
      }
      onBytes?.(bytes.length);
      return plain(bytes);
    },
  };
}

/**
 * The same bytes as a plain array: a Buffer of Node has other ideas of `slice`.
 * @param {Uint8Array} bytes
 */
export function plain(bytes) {
  return new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
