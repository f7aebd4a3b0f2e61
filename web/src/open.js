/** Opens an artefact: reads and verifies its files, loads ONNX Runtime, and makes a model of both. */
import { chooseEngine } from "./engine/self-check.js";
import { loadLibrary, loadRuntime } from "./engine/runtime.js";
import { createSession } from "./engine/session.js";
import { XLExportError, firstLine, shown } from "./errors.js";
import { Counter, verifiedFiles } from "./files/download.js";
import { inNode, sourceOf } from "./files/source.js";
import { Model } from "./model.js";
import { loadReference } from "./reference.js";
import { GRAPH, SPEC, WEIGHTS, bytesPerStream, readSpec, selective } from "./spec.js";
import { readVocabulary } from "./vocabulary/index.js";

/** @typedef {import("../index.js").OpenOptions} OpenOptions */
/** @typedef {{
 *   engine: import("./engine/session.js").Engine, reason: string | null,
 *   device: string, deviceReason: string | null, threads: number, note: string | null, computedBy: string,
 * }} Opened an engine, and what is to be known about it
 */

const MOST_SPEC_BYTES = 2 ** 24;
const RUNTIME_BYTES = { wasm: 14239897, webgpu: 26781914 }; // of onnxruntime-web 1.30.0, to show progress
const DEVICES = ["auto", "wasm", "webgpu", "native"];

/**
 * A model over the artefact at an address: a URL, in Node also the path of a folder, or its files by name.
 * @param {unknown} address @param {OpenOptions} [options]
 * @returns {Promise<Model>}
 */
export async function openHere(address, options = {}) {
  const { device = "auto", threads = 1, onProgress, signal, vendor } = options;
  if (!DEVICES.includes(device)) {
    throw new XLExportError(`device is ${shown(device)}; expected ${DEVICES.slice(0, -1).join(", ")} or native.`);
  }
  if (!Number.isInteger(threads) || threads < 1 || threads > 64) {
    throw new XLExportError(`threads is ${shown(threads)}; expected 1 to 64.`);
  }
  const source = sourceOf(address);
  const counter = new Counter(onProgress);
  const head = await source.read(SPEC, { most: MOST_SPEC_BYTES, signal });
  const { spec, identity } = await readSpec(head, `${SPEC} of ${source.name}`);
  const read = verifiedFiles(source, spec, { counter, signal });
  const needed = [GRAPH, WEIGHTS].filter((name) => Object.hasOwn(spec.files, name));
  /** @type {Promise<import("./reference.js").Reference> | null} */
  let known = null;
  const reference = () => (known ??= loadReference(spec, verifiedFiles(source, spec, { signal })));
  const chosen = await chooseDevice(device, spec);
  if (!inNode()) counter.expect(RUNTIME_BYTES[chosen.device === "webgpu" ? "webgpu" : "wasm"]);
  // All downloads run at once; the first that fails is told, and the others end by themselves.
  const loading = chosen.native
    ? Promise.resolve(null)
    : loadRuntime("wasm", { vendor, threads, onBytes: counter.of("ONNX Runtime"), signal });
  const contents = Promise.all(needed.map(async (name) => /** @type {[string, Uint8Array]} */ ([name, await read(name)])));
  /** @type {Record<string, Uint8Array>} */
  const vocabularyFiles = {};
  const readKept = async (/** @type {string} */ name) => (vocabularyFiles[name] = await read(name));
  const symbols = readVocabulary(readKept, (name) => loadLibrary(name, vendor));
  const [runtime, entries, vocabulary, answers] = await Promise.all([loading, contents, symbols, reference()]);
  const files = Object.fromEntries(entries);
  const opened = chosen.native
    ? await openNative(chosen.native, spec, files, answers, options)
    : await openWasm(/** @type {import("./engine/runtime.js").Runtime} */ (runtime), spec, files, answers, options);
  const { engine } = opened;
  try {
    return new Model({
      spec,
      identity,
      vocabulary,
      engine,
      reference,
      vocabularyFiles,
      facts: {
        device: opened.device,
        deviceReason: chosen.reason,
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
 * Where a model is computed, and why not where it was asked for.
 * @param {string} device @param {import("../index.js").Spec} _spec
 */
async function chooseDevice(device, _spec) {
  if (inNode() && (device === "auto" || device === "native")) {
    try {
      const native = await import("onnxruntime-node");
      return { device: "native", native: native.default ?? native, reason: null };
    } catch (error) {
      if (device === "native") {
        throw new XLExportError(
          `device is native, and onnxruntime-node could not be loaded (${firstLine(error)}); install it with npm, ` +
            "or use wasm.",
        );
      }
    }
  } else if (device === "native") {
    throw new XLExportError("device is native, which only Node has; use auto, wasm or webgpu.");
  }
  return { device: "wasm", native: null, reason: null };
}

/**
 * @param {import("./engine/runtime.js").Runtime} runtime @param {import("../index.js").Spec} spec
 * @param {Record<string, Uint8Array>} files @param {import("./reference.js").Reference} reference
 * @param {OpenOptions} options @returns {Promise<Omit<Opened, "deviceReason">>}
 */
async function openWasm(runtime, spec, files, reference, { inPlace = true }) {
  const { ort, version, threads, note } = runtime;
  const session = await createSession(ort, spec, files, { executionProviders: ["wasm"] });
  const { module } = runtime;
  const { engine, reason } = await chooseEngine(ort, session, spec, selective(spec), reference, { module, inPlace });
  const computedBy = `ONNX Runtime ${version} in WebAssembly`;
  return { engine, reason, device: "wasm", threads, note, computedBy };
}

/**
 * @param {any} ort @param {import("../index.js").Spec} spec
 * @param {Record<string, Uint8Array>} files @param {import("./reference.js").Reference} reference
 * @param {OpenOptions} options @returns {Promise<Omit<Opened, "deviceReason">>}
 */
async function openNative(ort, spec, files, reference, { threads = 1, inPlace = true }) {
  const session = await createSession(ort, spec, files, { executionProviders: ["cpu"], intraOpNumThreads: threads });
  const { engine, reason } = await chooseEngine(ort, session, spec, selective(spec), reference, { native: true, inPlace });
  const computedBy = `ONNX Runtime ${ort.env.versions.node ?? ort.env.versions.common} of Node`;
  return { engine, reason, device: "native", threads, note: null, computedBy };
}
