/**
 * A stand-in for the file that starts ONNX Runtime's WebAssembly. It starts the real one, and keeps the
 * module.
 *
 * ONNX Runtime imports its starting file by an address that can be set (`env.wasm.wasmPaths.mjs`), and calls
 * its default export. `runtime.js` gives the address of this file, so that a session can be run over memory
 * that stays in WebAssembly's heap; the public interface copies every tensor in every step.
 */

/** @type {((config: object) => Promise<any>) | null} */
let real = null;
/** @type {any} */
let started = null;

/** Says which factory is the real one. @param {(config: object) => Promise<any>} factory */
export function setFactory(factory) {
  real = factory;
}

/** The Emscripten module that was started; null before. @returns {import("./heap.js").HeapModule | null} */
export function captured() {
  return started;
}

/** @param {object} config of Emscripten */
export default async function start(config) {
  if (!real) throw new Error("the starting file of ONNX Runtime was not named");
  started = await real(config);
  return started;
}
