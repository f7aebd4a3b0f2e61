/** Memory in place that computes something else is found at the start, and copied instead. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { loadRuntime } from "../src/engine/runtime.js";
import { chooseEngine } from "../src/engine/self-check.js";
import { createSessions } from "../src/engine/session.js";
import { newMemory } from "../src/memory.js";
import { loadReference } from "../src/reference.js";
import { readSpec } from "../src/spec.js";
import { folderOf, counted } from "./setup.js";

const NOTHING = { buffers: 0, tensors: 0, options: 0 };
const read = async (/** @type {string} */ name) =>
  new Uint8Array(readFileSync(join(folderOf("ring"), name)));

test("a module whose steps do nothing, fail or answer elsewhere is not used", async () => {
  const { spec } = await readSpec(await read("spec.json"), "spec.json");
  const files = { "step.onnx": await read("step.onnx"), "weights.bin": await read("weights.bin") };
  const runtime = await loadRuntime("wasm", {});
  const { ort } = runtime;
  const [session] = await createSessions(ort, spec, files, { executionProviders: ["wasm"] });
  const real = /** @type {any} */ (runtime.module); // it is started with the first session
  const contents = { spec, reference: await loadReference(spec, read) };
  const held = counted(real);
  const choose = (/** @type {any} */ other) =>
    chooseEngine(ort, [session], contents, { module: new Proxy(real, { get: other }) });
  for (const [run, words] of /** @type {[() => any, RegExp][]} */ ([
    [() => 0, /failed its self-check: it differs from copies by/],
    [() => 1, /failed its self-check: ONNX Runtime could not run the step/],
    [() => Promise.resolve(0), /failed its self-check: it runs in the background/],
  ])) {
    const { engine, reason } = await choose((/** @type {any} */ target, /** @type {string} */ name) =>
      name === "_OrtRun" ? run : target[name],
    );
    assert.equal(engine.memory, "copied");
    assert.match(String(reason), words);
    assert.deepEqual(held(), NOTHING);
  }
  const { engine: sound, reason: none } = await chooseEngine(ort, [session], contents, { module: real });
  assert.equal(none, null);
  const after = held();
  for (let n = 0; n < 3; n++) {
    const memory = await newMemory(sound, "", 2);
    const fork = await memory.copy();
    await memory.restart(1);
    for (const each of [memory, fork]) await each.dispose();
  }
  assert.deepEqual(held(), after);
  /** @type {any} */ (sound).free();
  assert.deepEqual(held(), NOTHING);
  const { reason } = await chooseEngine(ort, [session], contents, { module: null });
  assert.match(reason ?? "", /^the inside of ONNX Runtime was not reached/);
  await session.release();
});
