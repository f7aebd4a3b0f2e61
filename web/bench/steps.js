/**
 * Times single tokens for `python -m benchmarks web`: `node steps.js ARTEFACT DEVICE copies|in-place`.
 *
 * It reads one JSON line at a time and answers with one: {"check": true}, {"feed": [stream, tokens]} and
 * {"time": [stream, tokens]}, which answers the milliseconds of each token.
 */
import { createInterface } from "node:readline";
import { open } from "../src/index.js";

const [folder, device, memory] = process.argv.slice(2);
const model = await open(folder, { device: /** @type {any} */ (device), inPlace: memory !== "copies" });
const { vocab_size: size } = model.spec.model;
/** @type {Record<string, import("../index.js").Memory>} */
const streams = {};

/** @param {any} question */
async function answer({ check, feed, time }) {
  if (check) return { ...(await model.check()), facts: model.facts };
  const [name, count] = feed ?? time;
  const stream = (streams[name] ??= await model.start());
  const tokens = Array.from({ length: count }, (_, i) => (stream.position + i) % size);
  if (feed) await model.feed(tokens, stream);
  const times = [];
  for (const token of time ? tokens : []) {
    const began = performance.now();
    await model.predict([token], stream);
    times.push(performance.now() - began);
  }
  return { position: stream.position, times };
}

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await answer(JSON.parse(line)))}\n`);
}
await model.close();
