/** Opens an artefact: reads and verifies its files, loads ONNX Runtime, and makes a model of both. */
import { GpuEngine, gpuOptions, missingGpu } from "./engine/gpu.js";
import { chooseEngine, refuseDifferent } from "./engine/self-check.js";
import { loadLibrary, loadRuntime } from "./engine/runtime.js";
import { createSession } from "./engine/session.js";
import { AlteredError, MissingError, XLExportError, firstLine, shown } from "./errors.js";
import { Counter, verifiedFiles } from "./files/download.js";
import { inNode, sourceOf } from "./files/source.js";
import { Model } from "./model.js";
import { loadReference } from "./reference.js";
import {
  GRAPH,
  SAMPLING,
  SPEC,
  WEIGHTS,
  bytesPerStream,
  isLanguageModel,
  readSampling,
  readSpec,
} from "./spec.js";
import { readVocabulary } from "./vocabulary/index.js";

/** @typedef {import("../index.js").OpenOptions} OpenOptions */
/** @typedef {{
 *   engine: import("./engine/session.js").Engine, reason: string | null,
 *   device: string, deviceReason: string | null, threads: number, note: string | null, computedBy: string,
 * }} Opened an engine, and what is to be known about it
 */

const MOST_SPEC_BYTES = 2 ** 24;
const DEVICES = ["auto", "wasm", "webgpu", "native"];

/**
 * A model over the artefact at an address: a URL, in Node also the path of a folder, or its files by name.
 * @param {unknown} address @param {OpenOptions} [options]
 * @returns {Promise<Model>}
 */
export async function openHere(address, options = {}) {
  const { device = "auto", threads = 1, signal } = options;
  if (!DEVICES.includes(device)) {
    throw new XLExportError(
      `device is ${shown(device)}; expected ${DEVICES.slice(0, -1).join(", ")} or native.`,
    );
  }
  if (!Number.isInteger(threads) || threads < 1 || threads > 64) {
    throw new XLExportError(`threads is ${shown(threads)}; expected 1 to 64.`);
  }
  const source = sourceOf(address);
  const head = await source.read(SPEC, { most: MOST_SPEC_BYTES, signal });
  try {
    return await openFrom(source, head, options);
  } catch (error) {
    if (!(error instanceof AlteredError)) throw error;
    // The browser may have kept the spec.json of an earlier artefact at the same address.
    const now = await source.read(SPEC, { most: MOST_SPEC_BYTES, signal, fresh: true });
    if (now.length === head.length && now.every((byte, i) => byte === head[i])) throw error;
    return openFrom(source, now, options);
  }
}

/**
 * The model over the files of a source.
 * @param {import("./files/source.js").Source} source @param {Uint8Array} head the bytes of its `spec.json`
 * @param {OpenOptions} options @returns {Promise<Model>}
 */
async function openFrom(source, head, options) {
  const { device = "auto", threads = 1, onProgress, signal, vendor } = options;
  const counter = new Counter(onProgress);
  const { spec, identity } = await readSpec(head, `${SPEC} of ${source.name}`);
  const read = verifiedFiles(source, spec, { counter, signal });
  const needed = [GRAPH, WEIGHTS].filter((name) => Object.hasOwn(spec.files, name));
  /** @type {Promise<import("./reference.js").Reference> | null} */
  let known = null;
  const reference = () => (known ??= loadReference(spec, verifiedFiles(source, spec, { signal })));
  const chosen = await chooseDevice(device, spec);
  const kind = chosen.device === "webgpu" ? "webgpu" : "wasm";
  // All downloads run at once; the first that fails is told, and the others end by themselves.
  const loading = chosen.native
    ? Promise.resolve(null)
    : loadRuntime(kind, { vendor, threads, counter, signal });
  const contents = Promise.all(
    needed.map(async (name) => /** @type {[string, Uint8Array]} */ ([name, await read(name)])),
  );
  /** @type {Record<string, Uint8Array>} */
  const vocabularyFiles = {};
  const readKept = async (/** @type {string} */ name) => (vocabularyFiles[name] = await read(name));
  const symbols = isLanguageModel(spec)
    ? readVocabulary(readKept, (name) => loadLibrary(name, vendor))
    : null;
  const [runtime, entries, vocabulary, answers, sampling] = await Promise.all([
    loading,
    contents,
    symbols,
    reference(),
    symbols ? recommended(source, signal) : {},
  ]);
  const files = Object.fromEntries(entries);
  const opened = await openEngine(chosen, runtime, { spec, files, reference: answers }, options);
  const { engine } = opened;
  try {
    return new Model({
      spec,
      identity,
      sampling,
      vocabulary,
      engine,
      reference,
      vocabularyFiles,
      facts: {
        device: opened.device,
        deviceReason: opened.deviceReason,
        memory: engine.memory,
        memoryReason: opened.reason,
        threads: opened.threads,
        threadsReason: opened.note,
        computedBy: opened.computedBy,
        bytesPerStream: bytesPerStream(spec),
      },
    });
  } catch (error) {
    await engine.close();
    throw error;
  }
}

/**
 * How the artefact recommends to draw tokens; its `sampling.json` is optional, and no hash covers it.
 * @param {import("./files/source.js").Source} source @param {AbortSignal} [signal]
 */
async function recommended(source, signal) {
  let bytes;
  try {
    bytes = await source.read(SAMPLING, { most: MOST_SPEC_BYTES, signal });
  } catch (error) {
    if (error instanceof MissingError) return {};
    throw error;
  }
  return readSampling(bytes, `${SAMPLING} of ${source.name}`);
}

/** @typedef {import("./engine/runtime.js").Runtime} Runtime */
/**
 * @typedef {{device: string, native: any, reason: string | null}} Chosen a device, and why it is not another
 */
/**
 * @typedef {{spec: import("../index.js").Spec, files: Record<string, Uint8Array>, reference:
 * import("./reference.js").Reference}} Contents
 */

/**
 * Where a model is computed, and why not where it was asked for.
 * @param {string} device @param {import("../index.js").Spec} spec @returns {Promise<Chosen>}
 */
async function chooseDevice(device, spec) {
  const wasm = (/** @type {string | null} */ reason) => ({ device: "wasm", native: null, reason });
  if (device === "native" && !inNode()) {
    throw new XLExportError("device is native, which only Node has; use auto, wasm or webgpu.");
  }
  if (inNode() && (device === "auto" || device === "native")) {
    try {
      const native = await import("onnxruntime-node");
      return { device: "native", native: native.default ?? native, reason: null };
    } catch (error) {
      if (device === "auto") return wasm(null);
      throw new XLExportError(
        `device is native, and onnxruntime-node could not be loaded (${firstLine(error)}); install it with ` +
          "npm, or use wasm.",
      );
    }
  }
  if (device === "wasm" || (device === "auto" && spec.target !== "web")) return wasm(null);
  if (spec.target !== "web") return wasm("the artefact was not exported with --target web");
  const missing = await missingGpu();
  return missing ? wasm(missing) : { device: "webgpu", native: null, reason: null };
}

/**
 * The engine of the chosen device. Where WebGPU fails, it is WebAssembly, and says so.
 * @param {Chosen} chosen @param {Runtime | null} runtime @param {Contents} contents
 * @param {OpenOptions} options
 * @returns {Promise<Opened>}
 */
async function openEngine(chosen, runtime, contents, options) {
  if (chosen.native) return { ...(await openNative(chosen.native, contents, options)), deviceReason: null };
  const loaded = /** @type {Runtime} */ (runtime);
  if (chosen.device !== "webgpu")
    return { ...(await openWasm(loaded, contents, options)), deviceReason: chosen.reason };
  try {
    return { ...(await openGpu(loaded, contents)), deviceReason: null };
  } catch (error) {
    const wasm = await openWasm(await loadRuntime("wasm", options), contents, options);
    return { ...wasm, deviceReason: `WebGPU failed: ${firstLine(error)}` };
  }
}

/** @param {Runtime} runtime @param {Contents} contents @returns {Promise<Omit<Opened, "deviceReason">>} */
async function openGpu({ ort, version, note }, { spec, files, reference }) {
  const session = await createSession(ort, spec, files, gpuOptions(spec));
  try {
    const device = await ort.env.webgpu.device; // there is none before a session
    const engine = new GpuEngine(ort, session, device, spec);
    await refuseDifferent(engine, spec, reference);
    const computedBy = `ONNX Runtime ${version} on WebGPU`;
    return { engine, reason: null, device: "webgpu", threads: 1, note, computedBy };
  } catch (error) {
    await session.release();
    throw error;
  }
}

/**
 * @param {Runtime} runtime @param {Contents} contents
 * @param {OpenOptions} options @returns {Promise<Omit<Opened, "deviceReason">>}
 */
async function openWasm(runtime, { spec, files, reference }, { inPlace = true }) {
  const { ort, version, threads, note } = runtime;
  const session = await createSession(ort, spec, files, { executionProviders: ["wasm"] });
  const { module } = runtime;
  const { engine, reason } = await chooseEngine(ort, session, spec, reference, {
    module,
    inPlace,
  });
  const computedBy = `ONNX Runtime ${version} in WebAssembly`;
  return { engine, reason, device: "wasm", threads, note, computedBy };
}

/**
 * @param {any} ort @param {Contents} contents
 * @param {OpenOptions} options @returns {Promise<Omit<Opened, "deviceReason">>}
 */
async function openNative(ort, { spec, files, reference }, { threads = 1, inPlace = true }) {
  const session = await createSession(ort, spec, files, {
    executionProviders: ["cpu"],
    intraOpNumThreads: threads,
  });
  const { engine, reason } = await chooseEngine(ort, session, spec, reference, {
    native: true,
    inPlace,
  });
  const computedBy = `ONNX Runtime ${ort.env.versions.node ?? ort.env.versions.common} of Node`;
  return { engine, reason, device: "native", threads, note: null, computedBy };
}
