/** What an artefact does not promise is refused before anything is computed. */
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";
import { readSpec } from "../src/spec.js";
import { Stepper } from "../src/stepper.js";

const segment = { rows: [[0], [0]], batch: 2, length: 1 };

/** @param {string} promise @param {bigint[]} positions */
async function stepWithout(promise, positions) {
  const spec = /** @type {any} */ ({ without: [promise], rule: { segment: 4 }, model: { vocab_size: 3 } });
  const memory = /** @type {any} */ ({ positions: BigInt64Array.from(positions), batch: positions.length });
  const stepper = new Stepper(/** @type {any} */ ({}), spec, false);
  await stepper.advance(segment, memory, "all", null, (answers) => answers);
}

test("a step that relies on a declined promise is refused", async () => {
  await assert.rejects(stepWithout("rows", [0n, 0n]), /promise `rows`/);
  await assert.rejects(stepWithout("padding", [-1n]), /promise `padding`: a row is at position -1/);
  await assert.rejects(stepWithout("cuts", [5n]), /`cuts`.*a step begins at a multiple of 4 tokens/);
});

test("an artefact that is no language model is refused in one sentence", async () => {
  const spec = { schema: 1, model: { vocab_size: 0 }, rule: {}, files: {} };
  const head = `${JSON.stringify(spec).slice(0, -1)}, `;
  const digest = createHash("sha256").update(head).digest("hex");
  const bytes = new TextEncoder().encode(`${head}"digest": "${digest}"}`);
  await assert.rejects(readSpec(bytes, "spec.json"), /is no language model, and this package runs only/);
});
