/** What is particular to Node; `platform.js` describes the names. */
import { constants, lstat, open } from "node:fs/promises";
import { join } from "node:path";
import { Worker, parentPort } from "node:worker_threads";
import { MissingError, XLExportError, firstLine } from "./errors.js";
import { HINT, MAX_FILE_BYTES } from "./files/source.js";
import { workerEnded } from "./worker/channel.js";

export const loadNative = () => import("onnxruntime-node");

export function baseAddress() {
  return undefined; // a relative address is a path
}

export function isolated() {
  return true;
}

const wasm = {
  api: () => import("onnxruntime-web"),
  mjs: () => import.meta.resolve("onnxruntime-web/ort-wasm-simd-threaded.mjs"),
  wasm: () => import.meta.resolve("onnxruntime-web/ort-wasm-simd-threaded.wasm"),
};
export const engines = { wasm, webgpu: wasm }; // Node has no WebGPU

export const remedy = "install what xl-export-web needs with npm";

/** @param {string} code */
export function moduleAddress(code) {
  return `data:text/javascript,${encodeURIComponent(code)}`;
}

/**
 * @param {URL | string} folder @param {string} file
 * @param {import("./files/source.js").ReadOptions} options
 */
export async function readFile(folder, file, { onBytes, most = MAX_FILE_BYTES }) {
  const path = folder instanceof URL ? new URL(file, folder) : join(folder, file);
  const failed = (/** @type {string} */ why, Kind = XLExportError) =>
    new Kind(`${path} could not be read: ${why}.`);
  let stream;
  try {
    // Without O_NONBLOCK, opening a named pipe waits until something writes into it.
    stream = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
    const facts = await stream.stat();
    if (!facts.isFile()) throw failed(`it is not a regular file; ${HINT}`);
    if (facts.size > most) throw failed(`it has ${facts.size} bytes, expected ${most}; copy it again`);
    const bytes = new Uint8Array(await stream.readFile());
    onBytes?.(bytes.length);
    return bytes;
  } catch (error) {
    if (error instanceof XLExportError) throw error;
    // A link to nothing is a fault of the folder.
    const missing =
      /** @type {{code?: string}} */ (error).code === "ENOENT" && !(await lstat(path).catch(() => null));
    throw missing ? failed(`it does not exist; ${HINT}`, MissingError) : failed(firstLine(error));
  } finally {
    await stream?.close();
  }
}

/** @param {(message: any) => void} hear @param {(error: Error) => void} fail */
export async function startWorker(hear, fail) {
  const thread = new Worker(new URL("./worker-node.js", import.meta.url));
  thread.on("message", hear);
  thread.on("error", (error) => fail(workerEnded(error.message)));
  thread.on("exit", (code) => fail(workerEnded(`code ${code}`)));
  return { port: thread, end: async () => void (await thread.terminate()) };
}

/** @param {(port: import("./platform.js").Port) => (message: any) => void} answer */
export function listen(answer) {
  const port = /** @type {import("node:worker_threads").MessagePort} */ (parentPort);
  port.on("message", answer(port));
}
