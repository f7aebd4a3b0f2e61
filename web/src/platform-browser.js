/** What is particular to a page and its workers; `platform.js` describes the names. */
import { firstLine } from "./errors.js";
import { workerEnded } from "./worker/channel.js";

export const loadNative = null;
export const readFile = null;

export function baseAddress() {
  return globalThis.document?.baseURI ?? globalThis.location?.href;
}

export function isolated() {
  return globalThis.crossOriginIsolated === true;
}

// Bundlers find files by `new URL("…", import.meta.url)`, in exactly this form, and copy them. esbuild leaves
// the addresses as they are: the files must lie next to its output.
export const engines = {
  wasm: {
    api: () => import("onnxruntime-web/wasm"),
    mjs: () => new URL("onnxruntime-web/ort-wasm-simd-threaded.mjs", import.meta.url).href,
    wasm: () => new URL("onnxruntime-web/ort-wasm-simd-threaded.wasm", import.meta.url).href,
  },
  webgpu: {
    api: () => import("onnxruntime-web/webgpu"),
    mjs: () => new URL("onnxruntime-web/ort-wasm-simd-threaded.asyncify.mjs", import.meta.url).href,
    wasm: () => new URL("onnxruntime-web/ort-wasm-simd-threaded.asyncify.wasm", import.meta.url).href,
  },
};

export const remedy =
  "with esbuild, add --format=esm and copy the files that README.md names to its output; with vite's " +
  'development server, set optimizeDeps.exclude to ["xl-export-web"]; without a bundler, name the folder ' +
  "of the files as `vendor`";
const WORKER_REMEDY = "with esbuild, add --format=esm and worker=xl-export-web/worker";

/** @param {string} code */
export function moduleAddress(code) {
  return URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
}

/** @param {(message: any) => void} hear @param {(error: Error) => void} fail */
export async function startWorker(hear, fail) {
  let worker;
  try {
    worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: "xl-export" });
  } catch (error) {
    throw workerEnded(firstLine(error), WORKER_REMEDY);
  }
  worker.onmessage = ({ data }) => hear(data);
  worker.onerror = ({ message }) =>
    fail(message ? workerEnded(message) : workerEnded("worker.js was not found", WORKER_REMEDY));
  return { port: worker, end: async () => worker.terminate() };
}

/** @param {(port: import("./platform.js").Port) => (message: any) => void} answer */
export function listen(answer) {
  const port = /** @type {any} */ (globalThis);
  const receive = answer(port);
  port.onmessage = (/** @type {MessageEvent} */ { data }) => receive(data);
}
