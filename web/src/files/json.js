import { XLExportError } from "../errors.js";

/**
 * The value of a JSON file.
 * @param {Uint8Array} bytes @param {string} where @returns {any}
 */
export function parseJson(bytes, where) {
  try {
    return JSON.parse(utf8(bytes, where));
  } catch (error) {
    if (error instanceof XLExportError) throw error;
    throw new XLExportError(`${where} is not valid JSON; copy or make it again.`, { cause: error });
  }
}

/** @param {Uint8Array} bytes @param {string} where */
export function utf8(bytes, where) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch (error) {
    throw new XLExportError(`${where} is not UTF-8; copy or make it again.`, { cause: error });
  }
}
