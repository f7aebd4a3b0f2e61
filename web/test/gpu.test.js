/**
 * The GPU's memory over a device that fails in silence, as WebGPU does. Chromium runs the engine in
 * tests/web.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import { GpuEngine } from "../src/engine/gpu.js";
import { XLExportError } from "../src/node.js";

const BYTES = 64; // of one stream, in one tensor
const spec = /** @type {any} */ ({
  state: [{ past: "past", present: "present", dtype: "float32", shape: ["batch", "16"] }],
});
const step = /** @type {any} */ ({ inputs: {}, outputs: { logits: { dtype: "float32", shape: [0] } } });

/** An engine whose device has `all` bytes, and the sizes of the buffers that it holds. */
function engineWith({ most = 2 ** 20, all = 2 ** 20, run = async () => ({ logits: { data: [] } }) } = {}) {
  /** @type {Set<{size: number}>} */
  const held = new Set();
  /** @type {string[]} */
  const scopes = [];
  let failed = false;
  /** @type {(info: object) => void} */
  let lose = () => {};
  const device = {
    limits: { maxBufferSize: most, maxStorageBufferBindingSize: 2 ** 20 },
    lost: new Promise((resolve) => (lose = resolve)),
    pushErrorScope: (/** @type {string} */ kind) => void scopes.push(kind),
    async popErrorScope() {
      return scopes.pop() === "out-of-memory" && failed ? { message: "Out of memory" } : null;
    },
    createBuffer({ size = 0 }) {
      const buffer = { size, destroy: () => held.delete(buffer) };
      held.add(buffer);
      failed ||= [...held].reduce((sum, each) => sum + each.size, 0) > all;
      return buffer;
    },
  };
  const fromGpuBuffer = (/** @type {any} */ buffer) => ({ buffer });
  const Tensor = Object.assign(function () {}, { fromGpuBuffer });
  return { engine: new GpuEngine({ Tensor }, { run }, device, spec), held, lose, scopes };
}

/** @param {RegExp} words */
const sentence = (words) => (/** @type {unknown} */ error) =>
  error instanceof XLExportError && words.test(error.message);

test("memory that the GPU cannot hold is refused, and what was made of it is freed", async () => {
  const { engine, held, scopes } = engineWith({ most: 2 * BYTES, all: 5 * BYTES });
  const state = await engine.create(2); // two sets of two streams
  assert.equal(held.size, 2);
  const tooLarge = sentence(/a memory tensor has 192 bytes, and this GPU takes at most 128/);
  await assert.rejects(engine.create(3), tooLarge);
  const full = sentence(/the GPU has no 128 bytes for the memory \(Out of memory\)/);
  await assert.rejects(engine.create(1), full);
  assert.equal(held.size, 2);
  engine.release(state);
  assert.deepEqual([held.size, scopes.length], [0, 0]);
});

test("a GPU that was lost computes no further step", async () => {
  const { engine, lose } = engineWith();
  const state = await engine.create(1);
  await engine.run(step, state);
  lose({ reason: "unknown", message: "the driver was restarted" });
  const words = sentence(/the GPU was lost \(the driver was restarted\); open the model again/);
  for (const work of [() => engine.run(step, state), () => engine.create(1), () => engine.write(state, [])])
    await assert.rejects(work, words);
  assert.equal(state.turn, 1);

  const during = engineWith({
    run: async () => {
      during.lose({ reason: "destroyed", message: "" });
      return { logits: { data: [] } };
    },
  });
  const fresh = await during.engine.create(1);
  await assert.rejects(during.engine.run(step, fresh), sentence(/the GPU was lost \(destroyed\)/));
  assert.equal(fresh.turn, 0);
});
