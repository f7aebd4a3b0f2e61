/** What a memory has seen when a step fails, and how a text is cut. The engines and models are stand-ins. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { PieceEngine } from "../src/engine/pieces.js";
import { feed } from "../src/feed.js";
import { Stepper } from "../src/stepper.js";

const shape = ["batch", "tokens"];
const timed = (/** @type {string} */ name, dtype = "float32") => ({ name, dtype, shape });

for (const [form, seen] of [
  ["own", 7n],
  ["ring", 3n],
]) {
  test(`a step of a memory of form ${form} fails in its second piece`, async () => {
    const spec = {
      model: { vocab_size: 0 },
      rule: { segment: 4 },
      inputs: [timed("x"), timed("position_ids", "int64")],
      outputs: [timed("y")],
      state: [],
      form,
      without: [],
      fixed_tokens: [1, 4],
    };
    let runs = 0;
    const run = async () => {
      if (++runs === 2) throw new Error("out of memory");
      return { y: new Float32Array(4) };
    };
    const engine = new PieceEngine([{ run }, { run }], /** @type {any} */ (spec));
    const memory = { positions: BigInt64Array.of(3n), adopted: [], unsure: false };
    const step = { batch: 1, length: 5, inputs: { x: { data: new Float32Array(5), shape: [1, 5] } } };
    const stepper = new Stepper(/** @type {any} */ (engine), /** @type {any} */ (spec));
    const fed = stepper.advanceNamed(step, /** @type {any} */ (memory), () => null);
    await assert.rejects(fed, /out of memory/);
    assert.deepEqual([...memory.positions], [seen]);
  });
}

for (const [without, lengths] of [
  [[], [16, 32, 32]],
  [["cuts"], [32, 32, 16]],
]) {
  test(`a text of 80 tokens in segments of 32, without the promises [${without}]`, async () => {
    /** @type {number[]} */
    const found = [];
    const stepper = {
      spec: { rule: { segment: 32, mask: "same-length" }, without },
      advance: async (/** @type {{length: number}} */ { length }) => found.push(length),
    };
    await feed(/** @type {any} */ (stepper), Array(80).fill(1), /** @type {any} */ ({ last: null }));
    assert.deepEqual(found, lengths);
  });
}
