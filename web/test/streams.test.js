/** Streams that are stopped, left, taken back, disposed of or used twice. In this thread and in a worker. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { XLExportError, open } from "../src/node.js";
import { Sampler } from "../src/text/sampler.js";
import { all, devices, folderOf, furthest } from "./setup.js";

const tokens = (/** @type {number} */ count) => Array.from({ length: count }, (_, i) => (i * 7 + 3) % 60);
const ring = { folder: folderOf("ring"), prompt: tokens(21), scored: tokens(29) };

for (const options of [{ device: "wasm" }, { device: devices.at(-1), worker: true }]) {
  const where = options.worker ? "in a worker" : "in this thread";

  test(`what was disposed of or closed is refused ${where}`, async () => {
    const model = await open(ring.folder, /** @type {any} */ (options));
    const memory = await model.start(2);
    assert.deepEqual((await model.step([[1], [2]], memory)).shape, [2, 1, model.spec.model.vocab_size]);
    await memory.dispose();
    await assert.rejects(memory.copy(), /was disposed of/);
    await model.close();
    await assert.rejects(model.start(), /was closed/);
  });

  test(`a text that was stopped, left or edited continues ${where}`, async () => {
    const model = await open(ring.folder, /** @type {any} */ (options));
    const memory = await model.start();
    const controller = new AbortController();
    /** @type {number[]} */
    const seen = [...ring.prompt];
    await assert.rejects(
      async () => {
        for await (const piece of model.generate(ring.prompt, {
          memory,
          maxTokens: Infinity,
          signal: controller.signal,
        })) {
          seen.push(piece.token);
          if (seen.length === ring.prompt.length + 5) controller.abort();
        }
      },
      { name: "AbortError" },
    );
    assert.equal(memory.position, seen.length);
    for await (const piece of model.generate([], { memory, maxTokens: 9, batchMilliseconds: 0, seed: 4 })) {
      seen.push(piece.token);
      if (piece.position === seen.length + 1) break;
      if (seen.length % 4 === 0) break;
    }
    assert.equal(memory.position, seen.length);
    const expected = await model.start();
    await model.feed(seen, expected);
    const [mine, right] = [await model.predict([3], memory), await model.predict([3], expected)];
    assert.ok(furthest(mine.data, right.data) < 1e-4);
    await model.feed(ring.prompt.slice(0, 5), memory);
    await model.rewind(memory, 5);
    assert.ok(
      furthest((await model.predict([5], memory)).data, (await model.predict([5], expected)).data) < 1e-4,
    );
    await assert.rejects(model.rewind(memory, 8), /cannot take back 8; expected 0 to 4 tokens/);
    await model.close();
  });

  test(`a stopped feed or score leaves its position, and nothing to draw from ${where}`, async () => {
    const model = await open(ring.folder, /** @type {any} */ (options));
    const text = Array.from({ length: 20_000 }, (_, i) => ring.scored[i % ring.scored.length]);
    const feed = model.feed.bind(model, text);
    const score = (/** @type {any} */ memory, /** @type {any} */ { signal }) =>
      model.score(text, { memory, signal });
    for (const work of [feed, score]) {
      const memory = await model.start();
      await model.predict([1, 2, 3], memory);
      const controller = new AbortController();
      setTimeout(() => controller.abort(), 60);
      await assert.rejects(work(memory, { signal: controller.signal }), { name: "AbortError" });
      assert.ok(memory.position > 3 && memory.position < text.length, String(memory.position));
      await assert.rejects(all(model.generate([], { memory })), /encodes to no tokens/);
      const { surprisals } = await model.score([1, 2], { memory });
      assert.ok(Number.isNaN(surprisals[0]) && surprisals[1] > 0, String(surprisals));
    }
    await model.close();
  });

  test(`a memory in use is left alone, and a model that is closed ends its texts ${where}`, async () => {
    const model = await open(ring.folder, /** @type {any} */ (options));
    const memory = await model.start();
    const pieces = model.generate(ring.prompt, { memory, maxTokens: Infinity, batchMilliseconds: 0 });
    await pieces.next();
    await assert.rejects(memory.restart(), /something else is using this memory/);
    await assert.rejects(memory.dispose(), /something else is using this memory/);
    assert.equal(memory.position, ring.prompt.length);
    await pieces.return();
    await memory.restart();
    await assert.rejects(all(model.generate([], { memory })), /encodes to no tokens/);
    await memory.dispose();
    await memory.dispose();

    const [left, running] = [await model.start(), model.generate([1], { maxTokens: Infinity })];
    await running.next();
    const ended = model.generate([1], { maxTokens: Infinity });
    await ended.next();
    await model.close();
    await assert.rejects(running.next(), /the model was closed; open it again/);
    await ended.return();
    await left.dispose();
  });

  test(`values that only JavaScript can give are refused ${where}`, async () => {
    const model = await open(ring.folder, /** @type {any} */ (options));
    const memory = await model.start();
    for (const [work, words] of /** @type {[() => Promise<any>, RegExp][]} */ ([
      [() => model.step([1.5], memory), /is no token of this model/],
      [() => model.step([[1], [2]], memory), /2 rows and the memory holds 1 streams/],
      [() => model.step([[1, 2], [2]], memory), /different lengths/],
      [() => model.step([1], /** @type {any} */ ({})), /use one from start/],
      [() => model.score([1], { unit: /** @type {any} */ ("dits") }), /expected "bits" or "nats"/],
      [() => all(model.generate([1], { seed: -1 })), /seed is -1/],
      [() => all(model.generate([1], { stop: "a", text: false })), /leave one of them out/],
    ])) {
      await assert.rejects(
        work,
        (error) => error instanceof XLExportError && words.test(error.message),
        String(words),
      );
    }
    assert.equal(memory.position, 0);
    await model.close();
  });
}

test("two streams of one model may be used at once, and one stream may not", async () => {
  const model = await open(ring.folder, { device: "wasm" });
  const [a, b] = await Promise.all([model.score(ring.scored), model.score(ring.scored)]);
  assert.deepEqual(a.surprisals, b.surprisals);
  const memory = await model.start();
  const both = await Promise.allSettled([model.feed(ring.prompt, memory), model.feed(ring.prompt, memory)]);
  assert.deepEqual(both.map(({ status }) => status).sort(), ["fulfilled", "rejected"]);
  assert.equal(memory.position, ring.prompt.length);
  for (let turns = 0; turns < 8; turns++) {
    const [one, two] = [0, 1].map(() => model.generate([1], { memory, maxTokens: 2 }));
    const first = [one.next()];
    for (let n = 0; n < turns; n++) await null; // the second text comes at each of the first one's pauses
    first.push(two.next());
    const told = await Promise.allSettled(first);
    assert.deepEqual(told.map(({ status }) => status).sort(), ["fulfilled", "rejected"], `${turns} turns`);
    await Promise.all([one.return(), two.return()]);
  }
  await model.close();
});

test("logits without a finite maximum are refused", () => {
  for (const logits of [[0, NaN], [-Infinity, -Infinity]])
    assert.throws(() => new Sampler().draw(Float32Array.from(logits), new Map(), 0.5), XLExportError);
});
