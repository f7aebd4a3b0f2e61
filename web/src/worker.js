/** The worker's side: it opens one model and answers the questions of `client.js` about it. */
import { XLExportError } from "./errors.js";
import { openHere } from "./open.js";
import { platform } from "./platform.js";
import { answering, packed } from "./worker/channel.js";

/**
 * @typedef {import("./memory.js").Memory} Memory
 * @typedef {{signal: AbortSignal, tell: (event: any) => void}} Context
 */

/** @type {import("./model.js").Model} */
let model;
/** @type {Map<number, Memory>} */
const memories = new Map();
/**
 * @type {Map<number, {pieces: AsyncGenerator<any>, controller: AbortController, memory: Memory | undefined}>}
 */
const texts = new Map();
let count = 0;

/** @param {Memory} memory */
function kept(memory) {
  memories.set(++count, memory);
  return { id: count, positions: memory.positions };
}

/** The memory of a handle; undefined for none. @param {number | undefined} id */
function memoryOf(id) {
  if (id === undefined) return undefined;
  const memory = memories.get(id);
  if (!memory) throw new XLExportError("the memory was disposed of; take another one from start().");
  return memory;
}

/**
 * The answer or the error of some work over a memory, with the positions that the memory has afterwards: a
 * text that was stopped has been fed in part.
 * @template T @param {number | undefined} id @param {(memory: any) => Promise<T>} work
 */
async function over(id, work) {
  const memory = memoryOf(id);
  try {
    const value = await work(memory);
    return { value, positions: memory?.positions };
  } catch (error) {
    return { error: packed(error), positions: memory?.positions };
  }
}

/** @type {Parameters<typeof answering>[1]} */
const methods = {
  async open({ address, options }, { signal, tell }) {
    model = await openHere(address, { ...options, signal, onProgress: tell });
    const { spec, identity, sampling, facts, vocabularyFiles } = model;
    return { spec, identity, sampling, facts, vocabularyFiles };
  },
  start: async ({ batch }) => kept(await model.start(batch)),
  loadMemory: async ({ file, adopt }) => kept(await model.loadMemory(file, { adopt })),
  saveMemory: ({ memory }) => over(memory, (used) => model.saveMemory(used)),
  copy: async ({ memory }) => kept(await /** @type {Memory} */ (memoryOf(memory)).copy()),
  rewind: ({ memory, count }) => over(memory, (used) => model.rewind(used, count)),
  restart: ({ memory, row }) => over(memory, (used) => used.restart(row)),
  async dispose({ memory }) {
    await memories.get(memory)?.dispose();
    memories.delete(memory);
  },
  step: ({ given, memory }) => over(memory, (used) => model.step(given, used)),
  predict: ({ tokens, memory }) => over(memory, (used) => model.predict(tokens, used)),
  feed: ({ prompt, memory }, { signal }) => over(memory, (used) => model.feed(prompt, used, { signal })),
  score: ({ prompt, memory, unit }, { signal, tell }) =>
    over(memory, (used) =>
      model.score(prompt, { memory: used, unit, signal, onProgress: (fed, total) => tell({ fed, total }) }),
    ),
  check: (_, { signal }) => model.check({ signal }),
  async close() {
    for (const { controller } of texts.values()) controller.abort();
    await model?.close();
  },

  /** Begins a text; its pieces are fetched by `next`. */
  async generate({ prompt, options, memory }) {
    const controller = new AbortController();
    const used = memoryOf(memory);
    const pieces = model.generate(prompt, { ...options, memory: used, signal: controller.signal });
    texts.set(++count, { pieces, controller, memory: used });
    return count;
  },

  /**
   * The pieces computed within `milliseconds`, at least one; whether the text is done, and its error.
   */
  async next({ text, milliseconds }, { signal }) {
    const found = texts.get(text);
    if (!found) return { pieces: [], done: true };
    const stop = () => found.controller.abort();
    signal.addEventListener("abort", stop);
    const pieces = [];
    const began = performance.now();
    try {
      do {
        const { value, done } = await found.pieces.next();
        if (done) return { pieces, done: true, positions: found.memory?.positions };
        pieces.push(value);
      } while (performance.now() - began < milliseconds);
      return { pieces, done: false, positions: found.memory?.positions };
    } catch (error) {
      return { pieces, done: true, error: packed(error), positions: found.memory?.positions };
    } finally {
      signal.removeEventListener("abort", stop);
    }
  },

  /** Ends a text; its last piece is fed first. */
  async end({ text }) {
    const found = texts.get(text);
    texts.delete(text);
    await found?.pieces.return(undefined);
    return { positions: found?.memory?.positions };
  },
};

platform.listen((port) => answering(port, methods));
