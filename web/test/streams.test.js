/** Streams: rows, forks, taking back, stopping, and what is refused. In this thread and in a worker. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { XLExportError, open } from "../src/index.js";
import { readSampling, writesInPlace } from "../src/spec.js";
import { Sampler } from "../src/text/sampler.js";
import { all, caseOf, devices, furthest, given } from "./setup.js";

const ring = caseOf("ring");

for (const options of [{ device: "wasm" }, { device: devices.at(-1), worker: true }]) {
  const where = options.worker ? "in a worker" : "in this thread";

  test(`rows, forks and restarts ${where}`, async () => {
    const model = await open(ring.folder, /** @type {any} */ (options));
    const [a, b] = [ring.scored.slice(0, 8), ring.scored.slice(8, 16)];
    const [one, two] = [await model.start(), await model.start(2)];
    await model.step(b, one);
    await model.step([a, b], two);
    await two.restart(0);
    assert.deepEqual([...two.positions], [0n, 8n]);
    const fork = await two.copy();
    const rows = await model.step([b, a], two);
    assert.deepEqual(rows.shape, [2, 8, model.spec.model.vocab_size]);
    const [fresh, single] = [await model.start(), await model.step(a, one)];
    const alone = await model.step(b, fresh);
    assert.ok(furthest(rows.data, [...alone.data, ...single.data]) < 1e-4);
    assert.ok(furthest((await model.step([b, a], fork)).data, rows.data) === 0);
    await fork.dispose();
    await assert.rejects(fork.copy(), /was disposed of/);
    await model.close();
    await assert.rejects(model.start(), /was closed/);
  });

  test(`a text that was stopped, left or edited goes on ${where}`, async () => {
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
    await assert.rejects(model.rewind(memory, 8), /8 tokens cannot be taken back; expected 0 to 4/);
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

  test(`mistakes are refused in one sentence ${where}`, async () => {
    const model = await open(ring.folder, /** @type {any} */ (options));
    const memory = await model.start();
    const size = model.spec.model.vocab_size;
    for (const [work, words] of /** @type {[() => Promise<any>, RegExp][]} */ ([
      [() => model.step([size], memory), /is no token of this model/],
      [() => model.step([-1], memory), /is no token of this model/],
      [() => model.step([1.5], memory), /is no token of this model/],
      [() => model.step([], memory), /the segment has 0 tokens; this artefact takes 1 to 8/],
      [() => model.step(new Array(9).fill(1), memory), /the segment has 9 tokens/],
      [() => model.step([[1], [2]], memory), /2 rows and the memory holds 1 streams/],
      [() => model.step([[1, 2], [2]], memory), /different lengths/],
      [() => model.step([1], /** @type {any} */ ({})), /use one from start/],
      [() => model.start(0), /batch is 0/],
      [() => model.score("☃", { memory }), /is not among the \d+ characters/],
      [() => model.score([1], { unit: /** @type {any} */ ("dits") }), /expected "bits" or "nats"/],
      [() => all(model.generate("")), /encodes to no tokens/],
      [() => all(model.generate([1], { maxTokens: 0 })), /maxTokens is 0/],
      [() => all(model.generate([1], { topK: 0 })), /topK is 0/],
      [() => all(model.generate([1], { seed: -1 })), /seed is -1/],
      [() => all(model.generate([1], { stop: [""] })), /a stop string is empty/],
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

test("a stop string ends a text and is not part of it", async () => {
  const model = await open(ring.folder, { device: "wasm" });
  const text = (/** @type {any[]} */ pieces) => pieces.map((piece) => piece.text).join("");
  const whole = text(await all(model.generate(ring.prompt, { maxTokens: 60, seed: 9 })));
  for (const stop of [[whole.slice(30, 33)], [whole.slice(12, 14), `${whole.slice(10, 15)}#`]]) {
    const pieces = await all(model.generate(ring.prompt, { maxTokens: 60, seed: 9, stop }));
    const at = Math.min(...stop.map((each) => whole.indexOf(each)).filter((found) => found >= 0));
    assert.equal(text(pieces), whole.slice(0, at));
    assert.equal(pieces.at(-1)?.ended, "stop");
  }
  await model.close();
});

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

test("a sampling.json is refused where Python refuses it", () => {
  for (const [text, words] of /** @type {[string, RegExp][]} */ ([
    ["null", /expected a JSON object, found null/],
    ["[]", /expected a JSON object, found \[\]/],
    ['{"topP": 0.9}', /unknown key "topP"; the known keys are temperature, top_k, top_p/],
    ['{"temperature": null}', /temperature is null; expected a number/],
    ['{"temperature": "1"}', /temperature is "1"; expected a number/],
    ['{"min_p": true}', /min_p is true; expected a number/],
    ['{"top_p": 7}', /topP is 7; expected above 0/],
  ]))
    assert.throws(
      () => readSampling(Buffer.from(text), "sampling.json"),
      (error) => error instanceof XLExportError && words.test(error.message),
      text,
    );
});

/** The name of a setting of Python, such as top_k. @param {string} name */
const inCamelCase = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());

test("every case of sampling draws its token, and logits without a finite maximum are refused", () => {
  assert.ok(given.sampling.length > 100);
  for (const { logits, settings, prompt, generated, uniform, token } of given.sampling) {
    const options = Object.entries(settings).map(([name, value]) => [inCamelCase(name), value]);
    const history = new Map(prompt.map((id) => [id, 0]));
    for (const id of generated) history.set(id, (history.get(id) ?? 0) + 1);
    const sampler = new Sampler(Object.fromEntries(options));
    assert.equal(sampler.draw(Float32Array.from(logits), history, uniform), token, JSON.stringify(settings));
  }
  for (const logits of [[0, NaN], [-Infinity, -Infinity]])
    assert.throws(() => new Sampler().draw(Float32Array.from(logits), new Map(), 0.5), XLExportError);
});

test("a text without settings is drawn as the artefact recommends", async () => {
  const { readFileSync, readdirSync } = await import("node:fs");
  const files = Object.fromEntries(
    readdirSync(ring.folder).map((name) => [name, readFileSync(`${ring.folder}/${name}`)]),
  );
  const sampling = Buffer.from('{"temperature": 0, "top_k": null, "min_p": 0.1}');
  for (const worker of [false, true]) {
    const model = await open({ ...files, "sampling.json": sampling }, { device: "wasm", worker });
    assert.deepEqual(model.sampling, { temperature: 0, topK: null, minP: 0.1 });
    const greedy = await all(model.generate(ring.prompt, { maxTokens: 30, temperature: undefined }));
    assert.deepEqual(
      greedy.map(({ token }) => token),
      ring.greedy.slice(0, 30),
    );
    const drawn = await all(model.generate(ring.prompt, { maxTokens: 30, temperature: 9, minP: 0, seed: 1 }));
    assert.notDeepEqual(drawn, greedy);
    await model.close();
  }
});

test("settings of sampling have Python's ranges", () => {
  assert.ok(given.ranges.length > 20);
  for (const { name, value, expected } of given.ranges) {
    const option = inCamelCase(name);
    const make = () => new Sampler({ [option]: value });
    if (expected === null) make();
    else
      assert.throws(
        make,
        ({ message }) => message.startsWith(`${option} is `) && message.includes(expected),
        `${option} ${value}`,
      );
  }
});

test("memory is written in place where Python does", () => {
  for (const { expected, ...spec } of given.inPlace)
    assert.equal(writesInPlace(/** @type {any} */ (spec)), expected, JSON.stringify(spec));
});
