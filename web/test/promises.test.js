/** What an artefact does not promise is refused before anything is computed. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Stepper } from "../src/stepper.js";

const segment = { rows: [[0], [0]], batch: 2, length: 1 };

/** @param {string} promise @param {bigint[]} positions */
async function stepWithout(promise, positions) {
  const spec = /** @type {any} */ ({
    without: [promise],
    rule: { segment: 4 },
    model: { vocab_size: 3 },
    inputs: [],
  });
  const memory = /** @type {any} */ ({ positions: BigInt64Array.from(positions), batch: positions.length });
  const stepper = new Stepper(/** @type {any} */ ({}), spec);
  await stepper.advance(segment, memory, "all", null, (answers) => answers);
}

test("a step that relies on a declined promise is refused", async () => {
  await assert.rejects(stepWithout("rows", [0n, 0n]), /promise `rows`/);
  await assert.rejects(stepWithout("padding", [-1n]), /promise `padding`, and a row is at position -1/);
  await assert.rejects(stepWithout("cuts", [5n]), /`cuts`.*a step begins at a multiple of 4 tokens/);
});
