/**
 * What the tests share: the artefacts and vocabularies that Python has written, and which devices run here.
 */
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { loadLibrary } from "../src/engine/runtime.js";
import "../src/node.js";
import { readVocabulary } from "../src/vocabulary/index.js";

const path = process.env.XL_EXPORT_CASES;
if (!path)
  throw new Error("XL_EXPORT_CASES names no file; the tests are started by tests/web/test_module.py");

/**
 * @type {{
 *   scratch: string, chunks: string[], folders: Record<string, string>,
 *   vocabularies: {name: string, folder: string, texts: string[]}[],
 * }}
 */
export const given = JSON.parse(readFileSync(path, "utf-8"));

/** The devices of Node: WebAssembly, and the native package where npm has installed it. */
export const devices = ["wasm"];
try {
  createRequire(import.meta.url).resolve("onnxruntime-node");
  devices.push("native");
} catch {
  console.log("onnxruntime-node is not installed: its tests are left out");
}

/** All items of an async iterator. @template T @param {AsyncIterable<T>} items */
export async function all(items) {
  const found = [];
  for await (const item of items) found.push(item);
  return found;
}

/**
 * The largest difference of two lists of numbers of equal length.
 * @param {ArrayLike<number>} a @param {ArrayLike<number>} b
 */
export function furthest(a, b) {
  if (a.length !== b.length) throw new Error(`${a.length} numbers and ${b.length}`);
  let worst = 0;
  for (let i = 0; i < a.length; i++) worst = Math.max(worst, Math.abs(a[i] - b[i]));
  return worst;
}

/** The folder of an artefact. @param {string} name */
export function folderOf(name) {
  const found = given.folders[name];
  if (!found) throw new Error(`no artefact is named ${name}`);
  return found;
}

/** The vocabulary in a folder. @param {string} folder */
export const vocabularyIn = (folder) =>
  readVocabulary(
    async (name) => new Uint8Array(readFileSync(join(folder, name))),
    (name) => loadLibrary(name, undefined),
  );

/**
 * A function that counts what is reserved and not yet freed in a module of Emscripten from now on.
 * @param {any} module
 */
export function counted(module) {
  /** @type {Record<string, Set<number>>} */
  const held = { buffers: new Set(), tensors: new Set(), options: new Set() };
  for (const [kind, make, free] of [
    ["buffers", "_malloc", "_free"],
    ["tensors", "_OrtCreateTensor", "_OrtReleaseTensor"],
    ["options", "_OrtCreateRunOptions", "_OrtReleaseRunOptions"],
  ]) {
    const [made, freed] = [module[make], module[free]];
    module[make] = (/** @type {any[]} */ ...given) => {
      const at = made(...given);
      held[kind].add(at);
      return at;
    };
    module[free] = (/** @type {any[]} */ ...given) => {
      held[kind].delete(given[0]);
      return freed(...given);
    };
  }
  return () => Object.fromEntries(Object.entries(held).map(([kind, { size }]) => [kind, size]));
}
