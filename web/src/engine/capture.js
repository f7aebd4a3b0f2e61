/**
 * A stand-in for the file that starts ONNX Runtime's WebAssembly. It starts the real one, and keeps the
 * module.
 *
 * ONNX Runtime imports its starting file by an address that can be set (`env.wasm.wasmPaths.mjs`), and calls
 * its default export. It is given the address of the code below, so that a session can be run over memory
 * that stays in WebAssembly's heap; the public interface copies every tensor in every step. The code is no
 * file: bundlers would not find one.
 */
import { platform } from "../platform.js";

const CODE = `
let start;
export let module = null;
export const setFactory = (factory) => void (start = factory);
export default async (config) => (module = await start(config));
`;

/**
 * The address of the stand-in, and a function that returns the Emscripten module once it was started. Null
 * where a page's Content-Security-Policy forbids code from a blob.
 * @param {(config: object) => Promise<any>} factory the default export of the real file
 * @returns {Promise<{address: string, module: () => import("./heap.js").HeapModule | null} | null>}
 */
export async function standIn(factory) {
  const address = platform.moduleAddress(CODE);
  const code = await import(/* webpackIgnore: true */ /* @vite-ignore */ address).catch(() => null);
  code?.setFactory(factory);
  return code && { address, module: () => code.module };
}
