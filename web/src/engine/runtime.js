/**
 * Loads ONNX Runtime: its WebAssembly build, the one with WebGPU, or the native one of Node.
 *
 * WebAssembly is started once in each page, worker or Node process, with the number of threads of the first
 * model.
 */
import { StoppedError, XLExportError, firstLine, refuseStopped } from "../errors.js";
import { absoluteAddress, sourceOf } from "../files/source.js";
import { platform } from "../platform.js";
import { standIn } from "./capture.js";

/** The release of onnxruntime-web whose inner functions `heap.js` knows. */
export const RELEASE = "1.30.0";

/**
 * @typedef {typeof import("onnxruntime-web")} Ort
 * @typedef {{
 *   ort: Ort, version: string, threads: number, module: import("./heap.js").HeapModule | null,
 * }} Started `module`: of Emscripten; null if it could not be had.
 * @typedef {Started & {note: string | null}} Runtime `note`: why there are fewer threads than were asked for.
 * @typedef {{
 *   vendor?: string | URL, threads?: number, counter?: import("../files/download.js").Counter,
 *   signal?: AbortSignal,
 * }} LoadOptions `counter` counts the bytes that are downloaded: none where WebAssembly has been started.
 */

/** The files of the packages as they lie in the folder `vendor`. */
const FILES = {
  wasm: ["ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"],
  webgpu: [
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
  ],
  tokenizers: ["tokenizers.min.mjs"],
};
const BYTES = { wasm: 14239897, webgpu: 26781914 }; // of the third file, to show progress
/** @type {Partial<Record<"wasm" | "webgpu", Promise<Started>>>} */
const started = {};

/**
 * ONNX Runtime for WebAssembly or WebGPU.
 * @param {"wasm" | "webgpu"} kind @param {LoadOptions} options @returns {Promise<Runtime>}
 */
export async function loadRuntime(kind, options) {
  const { threads = 1, signal } = options;
  refuseStopped(signal);
  if (!started[kind]) {
    const starting = start(kind, options);
    started[kind] = starting;
    starting.catch(() => delete started[kind]);
  }
  const runtime = await unlessStopped(/** @type {Promise<Started>} */ (started[kind]), signal);
  const note = threads > runtime.threads ? whyFewer(runtime.threads) : null;
  const { ort, version } = runtime;
  return {
    ort,
    version,
    threads: runtime.threads,
    note,
    get module() {
      return runtime.module; // there is none before the first session
    },
  };
}

/** @param {number} threads that there are */
function whyFewer(threads) {
  if (!platform.isolated()) {
    return (
      "one thread: several need the headers Cross-Origin-Opener-Policy: same-origin and " +
      "Cross-Origin-Embedder-Policy: require-corp"
    );
  }
  const count = threads === 1 ? "one thread" : `${threads} threads`;
  return `${count}: the first model of this page or process has started WebAssembly with that number`;
}

/**
 * The result of work that several callers share, or the error of one caller's signal: the work continues for
 * the others.
 * @template T @param {Promise<T>} work @param {AbortSignal | undefined} signal @returns {Promise<T>}
 */
async function unlessStopped(work, signal) {
  /** @type {() => void} */
  let stop = () => {};
  const stopped = new Promise((_, reject) => (stop = () => reject(new StoppedError())));
  signal?.addEventListener("abort", stop);
  try {
    return /** @type {T} */ (await Promise.race([work, stopped]));
  } finally {
    signal?.removeEventListener("abort", stop);
  }
}

/**
 * Starts WebAssembly for everyone: its first caller's signal does not end it.
 * @param {"wasm" | "webgpu"} kind @param {LoadOptions} options @returns {Promise<Started>}
 */
async function start(kind, { vendor, threads = 1, counter, signal }) {
  refuseOldPlatform();
  const used = platform.isolated() ? threads : 1;
  const downloads = !platform.readFile; // Node reads the file itself, and keeps no copy of it
  if (downloads) counter?.expect(BYTES[kind]);
  const count = counter?.of("ONNX Runtime");
  const onBytes = (/** @type {number} */ bytes) => signal?.aborted || count?.(bytes);
  try {
    const engine = engineOf(kind, vendor);
    const [mjs, wasm] = [engine.mjs(), engine.wasm()];
    const ort = /** @type {Ort} */ (await engine.api());
    ort.env.logLevel = "error";
    ort.env.wasm.numThreads = used;
    ort.env.wasm.proxy = false;
    if (downloads) {
      const at = wasm.lastIndexOf("/") + 1;
      ort.env.wasm.wasmBinary = /** @type {any} */ (
        await sourceOf(wasm.slice(0, at), "").read(wasm.slice(at), { onBytes })
      );
    }
    const inside = kind === "wasm" ? await standIn((await imported(mjs)).default) : null;
    ort.env.wasm.wasmPaths = { mjs: inside?.address ?? mjs, wasm };
    // It reads its files when it makes its first session. What is missing must not be blamed on an artefact.
    if (kind === "wasm") {
      const nothing = await ort.InferenceSession.create(Uint8Array.from(NOTHING), {
        executionProviders: [kind],
      });
      await nothing.release();
    }
    const version = ort.env.versions.web ?? ort.env.versions.common ?? "";
    return {
      ort,
      version,
      threads: used,
      get module() {
        return version === RELEASE ? (inside?.module() ?? null) : null;
      },
    };
  } catch (error) {
    if (error instanceof StoppedError) throw error;
    throw notLoaded("ONNX Runtime", error, vendor);
  }
}

/**
 * The library of subwords.
 * @param {"tokenizers"} name @param {string | URL | undefined} vendor
 */
export async function loadLibrary(name, vendor) {
  try {
    if (vendor === undefined) return await import("@huggingface/tokenizers");
    return await imported(new URL(FILES[name][0], absoluteAddress(vendor)).href);
  } catch (error) {
    throw notLoaded(`the library ${name}`, error, vendor);
  }
}

/**
 * Where onnxruntime-web is: in `vendor`, or where npm or a bundler has put it.
 * @param {"wasm" | "webgpu"} kind @param {string | URL | undefined} vendor
 */
function engineOf(kind, vendor) {
  if (vendor === undefined) return platform.engines[kind];
  const [api, mjs, wasm] = FILES[kind].map((name) => new URL(name, absoluteAddress(vendor)).href);
  return { api: () => imported(api), mjs: () => mjs, wasm: () => wasm };
}

/** A module by an address that bundlers leave alone. @param {string} address */
function imported(address) {
  return import(/* webpackIgnore: true */ /* @vite-ignore */ address);
}

/** @param {string} what @param {unknown} error @param {string | URL | undefined} vendor */
function notLoaded(what, error, vendor) {
  const remedy =
    vendor === undefined
      ? platform.remedy
      : `put the files of onnxruntime-web ${RELEASE} and @huggingface/tokenizers into the folder that ` +
        "`vendor` names";
  return new XLExportError(`${what} could not be loaded (${firstLine(error)}); ${remedy}.`, { cause: error });
}

/** An ONNX model with one operator, Identity. */
const NOTHING = [
  8, 8, 58, 54, 10, 16, 10, 1, 120, 18, 1, 121, 34, 8, 73, 100, 101, 110, 116, 105, 116, 121, 18, 0, 90, 15,
  10, 1, 120, 18, 10, 10, 8, 8, 1, 18, 4, 10, 2, 8, 1, 98, 15, 10, 1, 121, 18, 10, 10, 8, 8, 1, 18, 4, 10, 2,
  8, 1, 66, 4, 10, 0, 16, 13,
];

/** A WebAssembly program with one instruction of vectors. */
const VECTORS = [
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98,
  11,
];

/** Raises XLExportError if the platform lacks what this package needs; older ones cannot read this file. */
function refuseOldPlatform() {
  if (typeof WebAssembly === "object" && WebAssembly.validate(Uint8Array.from(VECTORS))) return;
  throw new XLExportError(
    "this browser has no WebAssembly with vectors; use a newer one, such as Chrome 91, Firefox 89 or " +
      "Safari 16.4.",
  );
}
