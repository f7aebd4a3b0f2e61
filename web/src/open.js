/** Opens an artefact: reads and verifies its files, loads ONNX Runtime, and makes a model of both. */
import { GpuEngine, gpuOptions, missingGpu } from "./engine/gpu.js";
import { chooseEngine, refuseDifferent } from "./engine/self-check.js";
import { loadLibrary, loadRuntime } from "./engine/runtime.js";
import { createSessions } from "./engine/session.js";
import { MissingError, XLExportError, firstLine, shown } from "./errors.js";
import { Counter, verifiedFiles } from "./files/download.js";
import { verifySignature } from "./files/signature.js";
import { sourceOf } from "./files/source.js";
import { Model } from "./model.js";
import { platform } from "./platform.js";
import { loadReference } from "./reference.js";
import {
  SAMPLING,
  SPEC,
  WEIGHTS,
  bytesPerStream,
  graphsOf,
  isLanguageModel,
  readSampling,
  readSpec,
  refuseUnserved,
} from "./spec.js";
import { readVocabulary } from "./vocabulary/index.js";

/** @typedef {import("../index.js").OpenOptions} OpenOptions */
/** @typedef {import("../index.js").Facts} Facts */
/** @typedef {import("./engine/runtime.js").Runtime} Runtime */
/** @typedef {import("./reference.js").Reference} Reference */
/**
 * @typedef {{
 *   spec: import("../index.js").Spec, files: Record<string, Uint8Array>, reference: Reference,
 * }} Contents of an artefact
 * @typedef {{
 *   engine: import("./engine/session.js").Engine, facts: Omit<Facts, "memory" | "bytesPerStream">,
 * }} Opened
 */

const MOST_SPEC_BYTES = 2 ** 24;
const DEVICES = ["auto", "wasm", "webgpu", "native"];

/**
 * A model over the artefact at an address: a URL, in Node also the path of a folder, or its files by name.
 * @param {unknown} address @param {OpenOptions} [options]
 * @returns {Promise<Model>}
 */
export async function openHere(address, options = {}) {
  const { device = "auto", threads = 1, onProgress, signal, vendor, expectedIdentity, publicKey } = options;
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
  if (publicKey !== undefined) await verifySignature(source, head, publicKey, signal);
  const counter = new Counter(onProgress);
  const { spec, identity } = await readSpec(head, `${SPEC} of ${source.name}`);
  if (expectedIdentity !== undefined && expectedIdentity !== identity) {
    throw new XLExportError(
      `${SPEC} of ${source.name} has the identity ${identity}, expected ${String(expectedIdentity)}; copy ` +
        "the expected one there, or change the expected identity.",
    );
  }
  refuseUnserved(spec, `${SPEC} of ${source.name}`);
  const read = verifiedFiles(source, spec, { counter, signal });
  const graphs = graphsOf(spec).map(({ name }) => name);
  const needed = [...graphs, WEIGHTS].filter((name) => Object.hasOwn(spec.files, name));
  const chosen = await chooseDevice(device, spec);
  const kind = chosen.device === "webgpu" ? "webgpu" : "wasm";
  // All downloads run at once; the first that fails is told, and the others end by themselves.
  const loading = chosen.native
    ? Promise.resolve(null)
    : loadRuntime(kind, { vendor, threads, counter, signal });
  const files = Promise.all(
    needed.map(async (name) => /** @type {[string, Uint8Array]} */ ([name, await read(name)])),
  );
  /** @type {Record<string, Uint8Array>} */
  const vocabularyFiles = {};
  const readKept = async (/** @type {string} */ name) => (vocabularyFiles[name] = await read(name));
  const symbols = isLanguageModel(spec)
    ? readVocabulary(readKept, (name) => loadLibrary(name, vendor))
    : null;
  const [runtime, entries, vocabulary, reference, sampling] = await Promise.all([
    loading,
    files,
    symbols,
    loadReference(spec, verifiedFiles(source, spec, { signal })),
    symbols ? recommended(source, signal) : {},
  ]);
  if (vocabulary && vocabulary.size !== spec.model.vocab_size) {
    throw new XLExportError(
      `vocab.json has ${vocabulary.size} symbols and the model ${spec.model.vocab_size}; export it again.`,
    );
  }
  const contents = { spec, files: Object.fromEntries(entries), reference };
  const { engine, facts } = await openEngine(chosen, runtime, contents, options);
  return new Model({
    spec,
    identity,
    sampling,
    vocabulary,
    engine,
    reference,
    vocabularyFiles,
    facts: { ...facts, memory: engine.memory, bytesPerStream: bytesPerStream(spec) },
  });
}

/**
 * How the artefact recommends to draw tokens; its `sampling.json` is optional, and no hash covers it.
 * @param {import("./files/source.js").Source} source @param {AbortSignal} [signal]
 */
export async function recommended(source, signal) {
  let bytes;
  try {
    bytes = await source.read(SAMPLING, { most: MOST_SPEC_BYTES, signal });
  } catch (error) {
    if (error instanceof MissingError) return {};
    throw error;
  }
  return readSampling(bytes, `${SAMPLING} of ${source.name}`);
}

/**
 * @typedef {{device: string, native: any, reason: string | null}} Chosen a device, and why it is not another
 */

/**
 * Where a model is computed, and why not where it was asked for.
 * @param {string} device @param {import("../index.js").Spec} spec @returns {Promise<Chosen>}
 */
async function chooseDevice(device, spec) {
  const wasm = (/** @type {string | null} */ reason) => ({ device: "wasm", native: null, reason });
  if (device === "native" && !platform.loadNative) {
    throw new XLExportError("device is native, which only Node has; use auto, wasm or webgpu.");
  }
  if (platform.loadNative && (device === "auto" || device === "native")) {
    try {
      const native = await platform.loadNative();
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
  if (spec.fixed_tokens) return wasm("the artefact has several graphs");
  const missing = await missingGpu();
  return missing ? wasm(missing) : { device: "webgpu", native: null, reason: null };
}

/**
 * The engine of the chosen device. If WebGPU fails, it is WebAssembly's, and the facts say so.
 * @param {Chosen} chosen @param {Runtime | null} runtime null of a native device
 * @param {Contents} contents @param {OpenOptions} options @returns {Promise<Opened>}
 */
async function openEngine({ device, native, reason }, runtime, contents, options) {
  const { threads = 1, inPlace = true } = options;
  if (!runtime) {
    const settings = { executionProviders: ["cpu"], intraOpNumThreads: threads };
    const sessions = await createSessions(native, contents.spec, contents.files, settings);
    const { versions } = native.env;
    const computedBy = `ONNX Runtime ${versions.node ?? versions.common} of Node`;
    const facts = { device, deviceReason: null, threads, threadsReason: null, computedBy };
    const found = await chooseEngine(native, sessions, contents, { native: true, inPlace });
    return { engine: found.engine, facts: { ...facts, memoryReason: found.reason } };
  }
  if (device === "webgpu") {
    try {
      return await openGpu(runtime, contents);
    } catch (error) {
      runtime = await loadRuntime("wasm", options);
      reason = `WebGPU failed: ${firstLine(error)}`;
    }
  }
  const settings = { executionProviders: ["wasm"] };
  const sessions = await createSessions(runtime.ort, contents.spec, contents.files, settings);
  const facts = {
    device: "wasm",
    deviceReason: reason,
    threads: runtime.threads,
    threadsReason: runtime.note,
    computedBy: `ONNX Runtime ${runtime.version} in WebAssembly`,
  };
  const { module } = runtime;
  const found = await chooseEngine(runtime.ort, sessions, contents, { module, inPlace });
  return { engine: found.engine, facts: { ...facts, memoryReason: found.reason } };
}

/** @param {Runtime} runtime @param {Contents} contents @returns {Promise<Opened>} */
async function openGpu({ ort, version, note }, { spec, files, reference }) {
  const [session] = await createSessions(ort, spec, files, gpuOptions(spec));
  try {
    const device = await ort.env.webgpu.device; // there is none before a session
    const engine = new GpuEngine(ort, session, device, spec);
    await refuseDifferent(engine, spec, reference);
    const computedBy = `ONNX Runtime ${version} on WebGPU`;
    const reasons = { deviceReason: null, memoryReason: null, threadsReason: note };
    return { engine, facts: { device: "webgpu", threads: 1, computedBy, ...reasons } };
  } catch (error) {
    await session.release();
    throw error;
  }
}
