/**
 * The module computes what Python computes: reference, greedy and drawn tokens, surprisals, and saved
 * streams.
 */
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { open } from "../src/index.js";
import { all, devices, furthest, given } from "./setup.js";

for (const device of devices) {
  for (const example of given.cases) {
    test(`${example.name} on ${device} gives Python's answers`, async () => {
      const model = await open(example.folder, { device });
      assert.equal(model.facts.memory, "in place", String(model.facts.memoryReason));
      const report = await model.check();
      assert.ok(report.passed, report.sentence);
      assert.ok(report.maxDifference <= example.tolerance, report.sentence);
      assert.equal(report.tolerance, example.tolerance);

      const greedy = await all(
        model.generate(example.prompt, { temperature: 0, maxTokens: example.greedy.length }),
      );
      assert.deepEqual(
        greedy.map((piece) => piece.token),
        example.greedy,
      );
      assert.deepEqual(
        greedy.map((piece) => piece.text),
        example.pieces,
      );
      assert.equal(greedy.at(-1)?.ended, "length");
      const drawn = await all(
        model.generate(example.prompt, { ...example.draw, maxTokens: example.drawn.length }),
      );
      assert.deepEqual(
        drawn.map((piece) => piece.token),
        example.drawn,
      );

      const { surprisals } = await model.score(example.scored, { unit: "nats" });
      assert.ok(Number.isNaN(surprisals[0]));
      assert.ok(furthest(surprisals.slice(1), example.nats) <= 5e-4);
      await continuesBothWays(model, example, device);
      await model.close();
    });
  }
}

/**
 * @param {import("../index.js").Model} model
 * @param {typeof given.cases[number]} example @param {string} device
 */
async function continuesBothWays(model, example, device) {
  const python = await model.loadMemory(readFileSync(example.stream));
  assert.equal(python.position, example.prompt.length);
  assert.ok(furthest((await model.predict(example.next, python)).data, example.logits) <= 1e-3);
  const own = await model.start();
  await model.feed(example.prompt, own);
  writeFileSync(join(given.scratch, `${example.name}-${device}.stream`), await model.saveMemory(own));
  assert.ok(furthest((await model.predict(example.next, own)).data, example.logits) <= 1e-3);
  await Promise.all([python.dispose(), own.dispose()]);
}

test("a padded vocabulary passes its check", async () => {
  const model = await open(given.padded, { device: "wasm" });
  const report = await model.check();
  assert.ok(report.passed, report.sentence);
  await model.close();
});

test("copying the memory gives the same answers, and the facts say so", async () => {
  const [example] = given.cases;
  const model = await open(example.folder, { device: "wasm", inPlace: false });
  assert.equal(model.facts.memory, "copied");
  assert.equal(model.facts.memoryReason, "copies were asked for");
  const pieces = await all(
    model.generate(example.prompt, { temperature: 0, maxTokens: example.greedy.length }),
  );
  assert.deepEqual(
    pieces.map((piece) => piece.token),
    example.greedy,
  );
  await model.close();
});
