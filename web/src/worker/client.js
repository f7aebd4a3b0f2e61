/**
 * The page's side of a model that runs in a worker: the same methods, each of them a question to the worker.
 */
import { loadLibrary } from "../engine/runtime.js";
import { XLExportError, shown } from "../errors.js";
import { absoluteAddress } from "../files/source.js";
import { platform } from "../platform.js";
import { isLanguageModel, refuseNoLanguageModel } from "../spec.js";
import { readVocabulary } from "../vocabulary/index.js";
import { Asker, unpacked } from "./channel.js";

/**
 * @typedef {import("../../index.js").OpenOptions} OpenOptions
 * @typedef {import("../../index.js").Vocabulary} Vocabulary
 * @typedef {import("../../index.js").Piece} Piece
 */

const BATCH_MS = 16; // milliseconds of work whose pieces come in one message

/**
 * A model that runs in a worker of its own.
 * @param {any} address @param {OpenOptions} options @returns {Promise<WorkerModel>}
 */
export async function openInWorker(address, { signal, onProgress, worker: _, ...options }) {
  const vendor = options.vendor === undefined ? undefined : absoluteAddress(options.vendor);
  /** @type {Asker} */
  let asker;
  const { port, end } = await platform.startWorker(
    (message) => asker.receive(message),
    (error) => asker.end(error),
  );
  asker = new Asker(port);
  try {
    const isAddress = typeof address === "string" || address instanceof URL;
    const given = {
      address: isAddress ? absoluteAddress(address) : address,
      options: { ...options, vendor },
    };
    const told = await asker.ask("open", given, { signal, hear: onProgress });
    const read = async (/** @type {string} */ name) => told.vocabularyFiles[name];
    const vocabulary = isLanguageModel(told.spec)
      ? await readVocabulary(read, (name) => loadLibrary(name, vendor))
      : null;
    return new WorkerModel(asker, end, told, vocabulary);
  } catch (error) {
    await end();
    throw error;
  }
}

/** The handle of a memory that lies in the worker. */
class WorkerMemory {
  /** @param {Asker} asker @param {{id: number, positions: BigInt64Array}} told */
  constructor(asker, { id, positions }) {
    this.asker = asker;
    this.id = id;
    this.positions = positions;
    forgotten.register(this, { asker, id }, this);
  }

  get batch() {
    return this.positions.length;
  }

  get position() {
    return Number(this.positions[0]);
  }

  async copy() {
    return new WorkerMemory(this.asker, await this.asker.ask("copy", { memory: this.id }));
  }

  /** @param {number} [row] */
  async restart(row) {
    const { positions, error } = await this.asker.ask("restart", { memory: this.id, row });
    this.positions = positions;
    if (error) throw unpacked(error);
  }

  async dispose() {
    if (this.asker.ended) return; // its worker is gone, and all memory with it
    await this.asker.ask("dispose", { memory: this.id });
    forgotten.unregister(this);
  }
}

/** Disposes of a memory whose handle is no longer referenced. */
const forgotten = new FinalizationRegistry((/** @type {{asker: Asker, id: number}} */ { asker, id }) => {
  asker.ask("dispose", { memory: id }).catch(() => {});
});

class WorkerModel {
  /**
   * @param {Asker} asker @param {() => Promise<void>} end
   * @param {{spec: any, identity: string, sampling: any, facts: import("../../index.js").Facts}} told
   * @param {Vocabulary | null} vocabulary
   */
  constructor(asker, end, { spec, identity, sampling, facts }, vocabulary) {
    this.asker = asker;
    this.end = end;
    this.spec = spec;
    this.identity = identity;
    this.sampling = sampling;
    this.facts = facts;
    this.symbols = vocabulary;
  }

  get vocabulary() {
    refuseNoLanguageModel(this.spec);
    return /** @type {Vocabulary} */ (this.symbols);
  }

  /** @param {number} [batch] */
  async start(batch) {
    return new WorkerMemory(this.asker, await this.asker.ask("start", { batch }));
  }

  /** @param {any} given @param {any} memory */
  async step(given, memory) {
    return this.#over("step", { given }, memory);
  }

  /** @param {any} tokens @param {any} memory */
  async predict(tokens, memory) {
    return this.#over("predict", { tokens }, memory);
  }

  /** @param {any} prompt @param {any} memory @param {{signal?: AbortSignal}} [options] */
  async feed(prompt, memory, { signal } = {}) {
    await this.#over("feed", { prompt }, memory, { signal });
  }

  /** @param {any} prompt @param {import("../../index.js").ScoreOptions} [options] */
  async score(prompt, { memory, unit, signal, onProgress } = {}) {
    const hear = (/** @type {any} */ { fed, total }) => onProgress?.(fed, total);
    return this.#over("score", { prompt, unit }, memory, { signal, hear }, true);
  }

  /**
   * @param {any} prompt @param {import("../../index.js").GenerateOptions} [given]
   * @returns {AsyncGenerator<Piece, void, void>}
   */
  async *generate(prompt, { memory, signal, batchMilliseconds = BATCH_MS, ...options } = {}) {
    const handle = memory === undefined ? undefined : ofMemory(memory, this.asker);
    const text = await this.asker.ask("generate", { prompt, options, memory: handle?.id }, { signal });
    try {
      // The first piece comes as soon as it is there; later ones come together.
      for (let milliseconds = 0; ; milliseconds = batchMilliseconds) {
        const told = await this.asker.ask("next", { text, milliseconds }, { signal });
        if (told.positions && handle) handle.positions = told.positions;
        for (const piece of told.pieces) yield piece;
        if (told.error) throw unpacked(told.error);
        if (told.done) return;
      }
    } finally {
      if (!this.asker.ended) {
        const { positions } = await this.asker.ask("end", { text });
        if (positions && handle) handle.positions = positions;
      }
    }
  }

  /** @param {any} memory @param {number} count */
  async rewind(memory, count) {
    await this.#over("rewind", { count }, memory);
  }

  /** @param {any} memory @returns {Promise<Uint8Array>} */
  async saveMemory(memory) {
    return this.#over("saveMemory", {}, memory);
  }

  /** @param {Uint8Array | ArrayBuffer} file @param {{adopt?: boolean}} [options] */
  async loadMemory(file, { adopt = false } = {}) {
    return new WorkerMemory(this.asker, await this.asker.ask("loadMemory", { file, adopt }));
  }

  /** @param {{signal?: AbortSignal}} [options] */
  async check({ signal } = {}) {
    return this.asker.ask("check", {}, { signal });
  }

  async close() {
    if (this.asker.ended) return;
    await this.asker.ask("close", {});
    this.asker.end(new XLExportError("the model was closed; open it again."));
    await this.end();
  }

  /**
   * @param {string} method @param {object} given @param {unknown} memory
   * @param {{signal?: AbortSignal, hear?: (event: any) => void}} [options] @param {boolean} [optional]
   */
  async #over(method, given, memory, options = {}, optional = false) {
    const handle = optional && memory === undefined ? undefined : ofMemory(memory, this.asker);
    const asked = { ...given, memory: handle?.id };
    const { value, error, positions } = await this.asker.ask(method, asked, options);
    if (handle && positions) handle.positions = positions;
    if (error) throw unpacked(error);
    return value;
  }
}

/** @param {unknown} memory @param {Asker} asker */
function ofMemory(memory, asker) {
  if (!(memory instanceof WorkerMemory)) {
    throw new XLExportError(`the memory is ${shown(memory)}; use one from start() or loadMemory().`);
  }
  if (memory.asker !== asker)
    throw new XLExportError("the memory belongs to another model; use one from this model's start().");
  return memory;
}
