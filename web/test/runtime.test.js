/** WebAssembly is started once, and one caller's signal and threads are not those of the next. */
import assert from "node:assert/strict";
import { test } from "node:test";

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
  assert.match(note, /^one thread: the first model .* has started WebAssembly with so many$/);
  assert.equal((await loadRuntime("wasm", {})).note, null);
});
