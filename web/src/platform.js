/** What a page and Node do differently: a page's part, unless the entry point is `node.js`. */
import * as browser from "./platform-browser.js";

/**
 * @typedef {{postMessage(message: any, transfer?: any[]): void}} Port
 * @typedef {import("./files/source.js").ReadOptions} ReadOptions
 * @typedef {{api: () => Promise<any>, mjs: () => string, wasm: () => string}} Engine of onnxruntime-web: its
 * module, and the addresses of the file that starts WebAssembly and of WebAssembly itself.
 * @typedef {{
 *   baseAddress(): string | undefined,
 *   isolated(): boolean,
 *   engines: {wasm: Engine, webgpu: Engine},
 *   remedy: string,
 *   loadNative: (() => Promise<any>) | null,
 *   readFile: ((folder: URL | string, file: string, options: ReadOptions) => Promise<Uint8Array>) | null,
 *   moduleAddress(code: string): string,
 *   startWorker(hear: (message: any) => void, fail: (error: Error) => void):
 *     Promise<{port: Port, end: () => Promise<void>}>,
 *   listen(answer: (port: Port) => (message: any) => void): void,
 * }} Platform
 * `baseAddress`: what addresses are relative to. `isolated`: whether there may be several threads. `engines`:
 * where npm or a bundler has put onnxruntime-web. `remedy`: what to do where it is not there. `loadNative`:
 * onnxruntime-node. `readFile`: a file of this machine. `moduleAddress`: an address that imports some code.
 * `listen`: in a worker, answers messages.
 */

/** @type {Platform} */
export let platform = browser;

/** @param {Platform} other */
export function usePlatform(other) {
  platform = other;
}
