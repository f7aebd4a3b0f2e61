/** The model in a worker of the browser: one of those that `xl-export web` put next to the page. */
import { readTensors, writeTensors } from "../src/files/safetensors.js";
import { XLExportError, open } from "../src/index.js";
import { Refusal } from "./stream.js";
import { NAMES_OF_TOKENS } from "./tokens.js";

const MOST_THREADS = 4; // more only wait for each other in models that a page can hold
const MIN_THREADED_BYTES = 32e6; // bytes; in smaller models a second thread waits longer than it computes
const BATCH_MS = 60; // milliseconds of work whose tokens come in one message

/**
 * @param {{
 *   model: string | null, wanted: URLSearchParams, progress: (loaded: number, total: number) => void,
 * }} options
 */
export async function connect({ model: name, wanted, progress }) {
  const response = await fetch("site.json").catch(() => null);
  const site = response?.ok ? await response.json().catch(() => null) : null;
  if (!Array.isArray(site?.models) || !site.models.length)
    throw new Refusal(
      "site.json, which lists the models of this page, could not be read; copy the whole folder again.",
    );
  const chosen = site.models.find((/** @type {any} */ each) => each.name === name) ?? site.models[0];
  const most = Math.min(MOST_THREADS, navigator.hardwareConcurrency || 1);
  const useful = chosen.num_bytes < MIN_THREADED_BYTES ? 1 : most;
  const model = await open(new URL(chosen.path, location.href), {
    vendor: new URL("../vendor/", import.meta.url),
    worker: wanted.get("worker") !== "no",
    device: /** @type {any} */ (wanted.get("device") ?? "auto"),
    threads: globalThis.crossOriginIsolated ? Number(wanted.get("threads")) || useful : 1,
    onProgress: ({ loaded, total }) => progress(loaded, total),
  });
  return new WorkerBackEnd(model, chosen.name, site);
}

export class WorkerBackEnd {
  /** @param {any} model @param {string} name @param {any} site what is in `site.json` */
  constructor(model, name = "", site = {}) {
    this.model = model;
    this.name = name;
    this.site = site;
    /** @type {import("./back-end.d.ts").Description} */
    this.known = this.#known();
  }

  describe() {
    return this.known;
  }

  #known() {
    const { facts, spec, vocabulary } = this.model;
    const { layers, heads, head_dim: width, parameters } = spec.model;
    const threads = facts.threads > 1 ? `, ${facts.threads} threads` : "";
    return {
      name: this.name,
      models: (this.site.models ?? []).map((/** @type {any} */ each) => each.name),
      facts: [
        `${(parameters / 1e6).toFixed(1)} million parameters, computed by ${facts.computedBy}${threads}`,
        `memory ${facts.memory}`,
        facts.deviceReason,
        facts.memoryReason,
        facts.threadsReason,
      ]
        .filter(Boolean)
        .join("; "),
      tokens: NAMES_OF_TOKENS[vocabulary.kind],
      trainedTokens: spec.trained_tokens ?? null,
      parameters,
      where: "in your browser: nothing leaves it",
      openings: (vocabulary.kind !== "ids" && this.site.openings) || [], // ids have no words
      concern: spec.concern,
      special: vocabulary.special,
      names:
        vocabulary.kind === "ids"
          ? Array.from({ length: vocabulary.size }, (_, id) => vocabulary.decoder()(id))
          : null,
      bytesPerStream: facts.bytesPerStream,
      bytesPerToken: 2 * 4 * layers * heads * width, // keys and values of every layer in fp32
      sampling: renamed(this.model.sampling ?? {}, snake),
      manual: this.site.manual,
    };
  }

  /** @param {string} text */
  async tokenize(text) {
    const ids = this.model.vocabulary.encode(text);
    const decoder = this.model.vocabulary.decoder();
    const texts = ids.map((/** @type {number} */ id) => decoder(id));
    if (texts.length) texts[texts.length - 1] += decoder.rest();
    return { ids, texts };
  }

  async start() {
    return new WorkerHandle(this.model, await this.model.start());
  }

  async list() {
    return [];
  }

  /** @param {Uint8Array} file */
  async load(file) {
    return {
      handle: new WorkerHandle(this.model, await this.model.loadMemory(file), false),
      note: await noteOf(file),
      file,
    };
  }

  check() {
    return this.model.check();
  }
}

export class WorkerHandle {
  /** @type {"end" | "length" | "stopped" | null} */
  ended = null;

  /** @param {any} model @param {any} memory @param {boolean} predicts */
  constructor(model, memory, predicts = true) {
    this.model = model;
    this.memory = memory;
    this.predicts = predicts;
  }

  get position() {
    return this.memory.position;
  }

  /** @param {number[]} ids @param {{signal?: AbortSignal}} [options] */
  async append(ids, { signal } = {}) {
    if (!ids.length) return [];
    const { surprisals } = await this.model.score(ids, { memory: this.memory, signal });
    this.predicts = true;
    return Array.from(surprisals);
  }

  /** @param {number[]} prompt @param {any} options */
  async *generate(prompt, { max_tokens: maxTokens, top_k, seed, signal, ...sampling }) {
    const options = {
      ...renamed(sampling, camel),
      topK: top_k || null,
      maxTokens,
      seed,
      signal,
      memory: this.memory,
      batchMilliseconds: BATCH_MS,
    };
    this.ended = "stopped";
    try {
      for await (const { token, text, nats, ended } of this.model.generate(prompt, options)) {
        this.ended = ended ?? this.ended;
        yield { token, text, bits: nats / Math.LN2 };
      }
    } catch (error) {
      if (/** @type {Error} */ (error).name !== "AbortError") throw error;
    }
  }

  /** @param {number} count @param {number} [last] */
  async rewind(count, last) {
    if (count === 0 && this.predicts) return true;
    const again = last === undefined ? [] : [last]; // fed again, so that the next token is predicted
    try {
      await this.model.rewind(this.memory, count + again.length);
    } catch (error) {
      if (error instanceof XLExportError) return false; // too many for the ring, or no ring
      throw error;
    }
    this.predicts = false;
    if (again.length) await this.model.feed(again, this.memory);
    this.predicts = again.length > 0;
    return true;
  }

  async restart() {
    await this.memory.restart();
    this.predicts = true;
  }

  async fork() {
    return new WorkerHandle(this.model, await this.memory.copy(), this.predicts);
  }

  /** @param {unknown} note */
  async save(note) {
    // Every other reader passes over a name among the metadata that it does not know.
    const { arrays, metadata } = await readTensors(await this.model.saveMemory(this.memory), "the stream");
    const file = await writeTensors({ arrays, metadata: { ...metadata, page: JSON.stringify(note) } });
    return new Blob([/** @type {any} */ (file)]);
  }

  async dispose() {
    await this.memory.dispose();
  }
}

/** The note of the page in a file; null if it has none. @param {Uint8Array} file */
async function noteOf(file) {
  try {
    return JSON.parse((await readTensors(file, "the stream")).metadata.page);
  } catch {
    return null; // a file of another program
  }
}

/** The page's names and the module's: `top_p` and `topP`. @param {string} name */
const camel = (name) => name.replace(/_(.)/g, (_, letter) => letter.toUpperCase());

/** @param {string} name */
const snake = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);

/** @param {Record<string, any>} settings @param {(name: string) => string} name */
function renamed(settings, name) {
  return Object.fromEntries(Object.entries(settings).map(([old, value]) => [name(old), value]));
}
