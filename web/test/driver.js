/** Answers operations on an artefact, one line of JSON each; tests/parity/operations.py describes them. */
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { loadLibrary } from "../src/engine/runtime.js";
import { sourceOf } from "../src/files/source.js";
import { XLExportError, decode, open } from "../src/node.js";
import { recommended } from "../src/open.js";
import { readSpec, writesInPlace } from "../src/spec.js";
import { Random } from "../src/text/random.js";
import { Sampler } from "../src/text/sampler.js";
import { readVocabulary } from "../src/vocabulary/index.js";

/** @type {any} */
let model = null;
/** @type {any} */
let vocabulary = null;
/** @type {Map<string, any>} */
const streams = new Map();
const SETTINGS = /(top_k|top_p|min_p|repetition_penalty|presence_penalty|frequency_penalty|temperature)/;
const camel = (/** @type {string} */ name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());
/** The settings of sampling in an operation. @param {any} given */
const settings = (given) =>
  Object.fromEntries(
    Object.entries(given)
      .filter(([name]) => SETTINGS.test(name))
      .map(([name, value]) => [camel(name), value]),
  );
const numbers = (/** @type {Iterable<number>} */ list) =>
  Array.from(list, (value) => (Number.isFinite(value) ? value : null));
const positions = (/** @type {any} */ memory) => Array.from(memory.positions, Number);

/** @type {Record<string, (asked: any, memory: any) => any>} */
const operations = {
  async open({ model: address, device = "wasm", worker = false, more = {}, ...trusted }) {
    vocabulary = null;
    streams.clear();
    await model?.close();
    model = null;
    const { expected_identity: expectedIdentity, public_key: key } = trusted;
    const publicKey = key && readFileSync(key, "utf-8");
    model = await open(address, { device, worker, expectedIdentity, publicKey, ...more });
    return { size: model.spec.model.vocab_size, memory: model.facts.memory };
  },
  async sampling({ folder }) {
    return new Sampler(await recommended(sourceOf(folder)));
  },
  async spec({ folder }) {
    await readSpec(new Uint8Array(readFileSync(join(folder, "spec.json"))), "spec.json");
    return {};
  },
  async check() {
    const { passed, tolerance, meanTolerance } = await model.check();
    return { passed, tolerance, mean_tolerance: meanTolerance };
  },
  async start({ stream, rows }) {
    const memory = await model.start(rows);
    streams.set(stream, memory);
    return { positions: positions(memory) };
  },
  async load({ stream, file, adopt }) {
    if (!existsSync(file)) return { lacks: true };
    const memory = await model.loadMemory(readFileSync(file), { adopt });
    streams.set(stream, memory);
    return { positions: positions(memory) };
  },
  async fork({ as }, memory) {
    streams.set(as, await memory.copy());
    return {};
  },
  async restart({ row }, memory) {
    await memory.restart(row);
    return { positions: positions(memory) };
  },
  async pad({ positions: wanted }, memory) {
    if (!memory.engine) return { lacks: true }; // the memory of a worker has copies of its positions
    memory.positions.set(wanted.map(BigInt));
    return { positions: positions(memory) };
  },
  async rewind({ count }, memory) {
    await model.rewind(memory, count);
    return { positions: positions(memory) };
  },
  async save({ file }, memory) {
    writeFileSync(file, await model.saveMemory(memory));
    return { positions: positions(memory) };
  },
  async step({ tokens }, memory) {
    return { logits: numbers((await model.step(tokens, memory)).data), positions: positions(memory) };
  },
  async "step by name"({ inputs }, memory) {
    const found = await model.step(inputs, memory);
    const outputs = Object.entries(found).map(([name, { data }]) => [name, Array.from(data, Number)]);
    return { outputs: Object.fromEntries(outputs), positions: positions(memory) };
  },
  async predict({ tokens }, memory) {
    return { logits: numbers((await model.predict(tokens, memory)).data), positions: positions(memory) };
  },
  async score({ tokens }, memory) {
    if (tokens.length > 1) return { lacks: true };
    const { surprisals } = await model.score(tokens[0], { memory, unit: "nats" });
    return { log_probs: numbers(surprisals).map((nats) => nats && -nats), positions: positions(memory) };
  },
  async generate({ tokens, text, max_tokens: maxTokens, seed, stop, ids_only: idsOnly, ...given }, memory) {
    const found = [];
    const options = { memory, maxTokens, seed, stop, text: !idsOnly, batchMilliseconds: 0 };
    for await (const piece of model.generate(text ?? tokens, { ...options, ...settings(given) }))
      found.push(piece);
    const pieces = found.map((piece) => piece.text);
    const ended = found.at(-1)?.ended;
    const drawn = found.map((piece) => piece.token);
    return { tokens: drawn, pieces, text: pieces.join(""), ended, positions: positions(memory) };
  },
  async vocabulary({ folder }) {
    vocabulary = await readVocabulary(
      async (name) => new Uint8Array(readFileSync(join(folder, name))),
      (name) => loadLibrary(name, undefined),
    );
    return { size: vocabulary.size };
  },
  encode({ text }) {
    const words = vocabulary ?? model.vocabulary;
    return { tokens: words.encode(text), size: words.size };
  },
  decode({ tokens }) {
    const words = vocabulary ?? model.vocabulary;
    const decoder = words.decoder();
    const pieces = [...tokens.map((/** @type {number} */ token) => decoder(token)), decoder.rest()];
    return decode(words, tokens) === pieces.join("") ? { pieces } : { escaped: "decode differs" };
  },
  draw({ logits, settings: given, prompt, generated, uniform }) {
    const history = new Map(prompt.map((/** @type {number} */ token) => [token, 0]));
    for (const token of generated) history.set(token, (history.get(token) ?? 0) + 1);
    const sampler = new Sampler(settings(given));
    return {
      token: sampler.draw(
        Float32Array.from(logits, (logit) => logit ?? NaN),
        history,
        uniform,
      ),
    };
  },
  uniforms({ seed, row }) {
    const random = new Random(seed, row);
    return { uniforms: Array.from({ length: 8 }, () => random.next()) };
  },
  in_place: ({ form, target }) => ({ in_place: writesInPlace(/** @type {any} */ ({ form, target })) }),
};

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  let answer;
  try {
    const operation = operations[asked.op];
    answer = operation ? await operation(asked, streams.get(asked.stream)) : { lacks: true };
  } catch (error) {
    const { message, stack } = /** @type {any} */ (error);
    answer = error instanceof XLExportError ? { error: message } : { escaped: String(stack) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await model?.close();
process.exit();
