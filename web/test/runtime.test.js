/** WebAssembly is started once, and one caller's signal and threads do not affect the next. */
import assert from "node:assert/strict";
import { cpSync, mkdirSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { given } from "./setup.js";

// A copy of the module that has started nothing.
const { loadRuntime } = await import(/** @type {string} */ ("../src/engine/runtime.js?once"));

test("a caller that stops leaves WebAssembly to the others, who hear why threads are fewer", async () => {
  const controller = new AbortController();
  const first = loadRuntime("wasm", { signal: controller.signal });
  const second = loadRuntime("wasm", { threads: 3 });
  controller.abort();
  await assert.rejects(first, { name: "AbortError" });
  const { threads, note } = await second;
  assert.equal(threads, 1);
  assert.match(note, /^one thread: the first model .* has started WebAssembly with that number$/);
  assert.equal((await loadRuntime("wasm", {})).note, null);
});

test("a file of ONNX Runtime that is missing is not blamed on an artefact", async () => {
  const { loadRuntime } = await import(/** @type {string} */ ("../src/engine/runtime.js?missing"));
  const dist = dirname(createRequire(import.meta.url).resolve("onnxruntime-web"));
  const vendor = join(given.scratch, "vendor/");
  mkdirSync(vendor);
  for (const name of ["ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs"])
    cpSync(join(dist, name), join(vendor, name));
  const words = /^ONNX Runtime could not be loaded \(.*\.wasm.*put the files of onnxruntime-web/;
  await assert.rejects(loadRuntime("wasm", { vendor: `file://${vendor}` }), { message: words });
});
