/** A long text: 10,000 tokens and 100 restarts leave the memory of the process where it was. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { captured } from "../src/engine/capture.js";
import { open } from "../src/index.js";
import { folderOf, counted, devices } from "./setup.js";

const [TOKENS, RESTARTS] = [10_000, 100];

for (const device of devices) {
  test(`10,000 tokens on ${device} take no more memory than the first ones`, async () => {
    const model = await open(folderOf("ring"), { device: /** @type {any} */ (device) });
    const held = device === "wasm" ? counted(captured()) : () => null;
    const memory = await model.start();
    let checked = 0;
    let before = 0;
    for await (const piece of model.generate([1], { memory, maxTokens: TOKENS, text: false, seed: 3 })) {
      if (piece.position === 1000) before = taken();
      if (piece.position % 3000 === 0) checked++;
    }
    assert.equal(memory.position, TOKENS + 1);
    assert.equal(checked, 3);
    let kept = null;
    for (let n = 0; n < RESTARTS; n++) {
      await memory.restart();
      await model.feed([1, 2, 3, 4, 5], memory);
      const fork = await memory.copy();
      await fork.dispose();
      kept ??= held(); // with the buffers for steps of five tokens
    }
    assert.deepEqual(held(), kept); // 8 MiB would not show a stream that is not freed
    assert.ok(taken() - before < 8 << 20, `${taken() - before} bytes more`);
    await model.close();
  });
}

/** The bytes that JavaScript and WebAssembly hold, after a collection of what nobody holds. */
function taken() {
  /** @type {any} */ (globalThis).gc?.();
  const { heapUsed, external, arrayBuffers } = process.memoryUsage();
  return heapUsed + external + arrayBuffers;
}
