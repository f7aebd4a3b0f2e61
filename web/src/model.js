/** A model that was opened: it starts streams, feeds them, scores and continues texts, and checks itself. */
import { XLExportError, refuseStopped, shown } from "./errors.js";
import { feed, pauses, surprisals, unitFactor } from "./feed.js";
import { checkedOptions, pieces } from "./generate.js";
import { newMemory, refuseForeign } from "./memory.js";
import { replay } from "./reference.js";
import { plain } from "./files/source.js";
import { loadMemory, saveMemory } from "./saved.js";
import { Stepper, checkedInputs, checkedSegment } from "./stepper.js";
import { isLanguageModel, refuseNoLanguageModel } from "./spec.js";
import { checkedIds } from "./vocabulary/base.js";

/**
 * @typedef {import("./memory.js").Memory} Memory
 * @typedef {import("../index.js").Prompt} Prompt
 * @typedef {{
 *   spec: import("../index.js").Spec, identity: string,
 *   vocabulary: import("../index.js").Vocabulary | null,
 *   sampling: import("../index.js").SamplingOptions,
 *   engine: import("./engine/session.js").Engine, facts: import("../index.js").Facts,
 *   reference: import("./reference.js").Reference,
 *   vocabularyFiles: Record<string, Uint8Array>,
 * }} Parts of a model
 */

export class Model {
  /** @param {Parts} parts */
  constructor({ spec, identity, sampling, vocabulary, engine, facts, reference, vocabularyFiles }) {
    this.spec = spec;
    this.identity = identity;
    this.sampling = sampling;
    this.symbols = vocabulary;
    this.facts = facts;
    this.engine = engine;
    this.stepper = new Stepper(engine, spec);
    this.reference = reference;
    /** The files of the vocabulary, from which the page of a worker makes its own. */
    this.vocabularyFiles = vocabularyFiles;
    this.closed = false;
  }

  /** The vocabulary of a language model; a step of any other kind has none, and says so. */
  get vocabulary() {
    refuseNoLanguageModel(this.spec);
    return /** @type {import("../index.js").Vocabulary} */ (this.symbols);
  }

  /** The memory of some new streams, all at position 0. @param {number} [batch] @returns {Promise<Memory>} */
  async start(batch = 1) {
    this.#refuseClosed();
    return newMemory(this.engine, this.identity, batch);
  }

  /**
   * The logits [batch, tokens, V] of the token after each token of one segment; outputs by name if the
   * artefact is no language model.
   * @param {unknown} given @param {Memory} memory
   */
  async step(given, memory) {
    if (isLanguageModel(this.spec)) return this.#segment(given, memory, "all");
    return this.#with(memory, async (used) =>
      this.stepper.advanceNamed(checkedInputs(given, this.spec, used), used, (found, outputs) => {
        used.saw([]);
        const copied = Object.entries(outputs).map(([name, { shape }]) => [
          name,
          { data: found[name].slice(), shape },
        ]);
        return Object.fromEntries(copied);
      }),
    );
  }

  /**
   * The logits [batch, V] of the token after the last one of one segment.
   * @param {unknown} tokens @param {Memory} memory
   */
  async predict(tokens, memory) {
    return this.#segment(tokens, memory, "last");
  }

  /**
   * The surprisal of every token of a text of any length.
   * @param {Prompt} prompt @param {import("../index.js").ScoreOptions} [options]
   */
  async score(prompt, { memory, unit = "bits", signal, onProgress } = {}) {
    const factor = unitFactor(unit);
    const tokens = this.tokens(prompt);
    const values = await this.#with(memory, (used) => {
      refuseSeveral(used);
      return surprisals(this.stepper, tokens, used, { signal, onProgress });
    });
    return { tokens, unit, surprisals: values.map((nats) => nats * factor) };
  }

  /**
   * Feeds a text of any length to a stream.
   * @param {Prompt} prompt @param {Memory} memory @param {{signal?: AbortSignal}} [options]
   */
  async feed(prompt, memory, { signal } = {}) {
    const tokens = this.tokens(prompt);
    await this.#with(memory, (used) => {
      refuseSeveral(used);
      return feed(this.stepper, tokens, used, { signal });
    });
  }

  /**
   * Takes back the last tokens that a stream has seen. A ring still holds what came before the last segment:
   * its tokens went to slots that were already too far away to be visible.
   * @param {Memory} memory @param {number} count
   */
  async rewind(memory, count) {
    const { form, rule } = this.spec;
    refuseForeign(memory, this.engine, this.identity);
    refuseSeveral(memory);
    if (form !== "ring") {
      throw new XLExportError(
        `no step can be taken back from memory of the form ${form}, only from a ring; copy() the memory ` +
          "before steps that you may want to take back, or restart() it.",
      );
    }
    // What lies beyond a segment behind the furthest position was written over.
    const written = Number(memory.furthest - memory.positions[0]);
    const most = Math.max(0, Math.min(rule.segment - written, memory.position));
    if (!Number.isInteger(count) || count < 0 || count > most) {
      throw new XLExportError(`cannot take back ${shown(count)}; expected 0 to ${most} tokens.`);
    }
    await memory.inUse(async () => {
      memory.positions[0] -= BigInt(count);
      if (count) [memory.last, memory.tail] = [null, memory.tail.slice(0, -count)];
    });
  }

  /**
   * Continues a text token by token.
   * @param {Prompt} prompt @param {import("../index.js").GenerateOptions} [options]
   * @returns {AsyncGenerator<import("../index.js").Piece, void, void>}
   */
  async *generate(prompt, options = {}) {
    const checked = checkedOptions(options, this.sampling, this.vocabulary.kind);
    const memory = /** @type {Memory | undefined} */ (options.memory);
    const tokens = this.tokens(prompt);
    if (!tokens.length && !memory?.last) {
      throw new XLExportError(
        "the prompt encodes to no tokens; give at least one symbol, or a memory that has seen some.",
      );
    }
    this.#refuseClosed();
    const used = memory ?? (await this.start());
    try {
      refuseForeign(used, this.engine, this.identity);
      refuseSeveral(used);
      used.take();
      try {
        yield* pieces(this.stepper, this.vocabulary, tokens, used, { ...checked, goesOn: Boolean(memory) });
      } finally {
        used.leave();
      }
    } finally {
      if (!memory) await used.dispose();
    }
  }

  /** The file of some streams, which Python can read too. @param {Memory} memory */
  async saveMemory(memory) {
    refuseForeign(memory, this.engine, this.identity);
    return saveMemory(memory, this.spec);
  }

  /**
   * The streams in a file that this or Python's `save_memory` wrote.
   * @param {Uint8Array | ArrayBuffer} file @param {{adopt?: boolean}} [options]
   */
  async loadMemory(file, { adopt = false } = {}) {
    this.#refuseClosed();
    const bytes = file instanceof ArrayBuffer ? new Uint8Array(file) : plain(file);
    return loadMemory(bytes, this.engine, this.spec, this.identity, adopt);
  }

  /**
   * How far every log-probability of the reference is from what is computed here.
   * @param {{signal?: AbortSignal}} [options] @returns {Promise<import("../index.js").CheckReport>}
   */
  async check({ signal } = {}) {
    refuseStopped(signal);
    const { reference } = this;
    const memory = await this.start(reference.batch);
    const began = performance.now();
    try {
      const found = await replay(this.stepper, reference, memory, { signal, pause: pauses() });
      const seconds = (performance.now() - began) / 1000;
      return report(found, reference, seconds, this.spec, this.facts.computedBy);
    } finally {
      await memory.dispose();
    }
  }

  /**
   * Ends the session and frees what it holds. Steps that wait are computed first, and later ones are refused.
   */
  async close() {
    if (this.closed) return;
    this.closed = true;
    this.stepper.closed = true;
    await this.stepper.queue;
    await this.engine.close();
  }

  /** Token ids of a text, or ids as they are. @param {Prompt} prompt */
  tokens(prompt) {
    if (typeof prompt === "string") return this.vocabulary.encode(prompt);
    return checkedIds(prompt, this.vocabulary.size, "the prompt");
  }

  /** @param {unknown} tokens @param {Memory} memory @param {"all" | "last"} which */
  async #segment(tokens, memory, which) {
    const { size } = this.vocabulary;
    return this.#with(memory, async (used) => {
      const segment = checkedSegment(tokens, this.spec, used);
      return this.stepper.advance(segment, used, which, null, ({ logits }) => {
        const last = this.stepper.lastLogits(logits, segment);
        used.last = last;
        used.saw(segment.rows[0]);
        if (which === "last") return { data: last.slice(), shape: [segment.batch, size] };
        return { data: new Float32Array(logits), shape: [segment.batch, segment.length, size] };
      });
    });
  }

  /**
   * Runs some work over a memory, or over one that is made for it.
   * @template T @param {unknown} memory @param {(used: Memory) => Promise<T>} work
   * @returns {Promise<T>}
   */
  async #with(memory, work) {
    const used = memory ?? (await this.start());
    this.#refuseClosed();
    refuseForeign(used, this.engine, this.identity);
    try {
      return await used.inUse(() => work(used));
    } finally {
      if (!memory) await used.dispose();
    }
  }

  #refuseClosed() {
    if (this.closed) throw new XLExportError("the model was closed; open it again.");
  }
}

/** @param {Memory} memory */
function refuseSeveral(memory) {
  if (memory.batch !== 1) {
    throw new XLExportError(
      `the memory holds ${memory.batch} streams, and a text goes into one; use a memory of start(1).`,
    );
  }
}

/**
 * @param {Float64Array[]} found @param {import("./reference.js").Reference} reference @param {number} seconds
 * @param {import("../index.js").Spec} spec @param {string} computedBy
 */
function report(found, { tokens, compared, unit }, seconds, spec, computedBy) {
  let [sum, count, worst] = [0, 0, 0];
  for (const differences of found) {
    for (const value of differences) {
      sum += value;
      count++;
      worst = Math.max(worst, value); // what is not a number stays one, and passes no limit
    }
  }
  const mean = sum / count;
  const means =
    spec.mean_tolerance < spec.tolerance
      ? `, ${mean.toExponential(2)} in the mean (tolerance ${spec.mean_tolerance})`
      : "";
  return {
    passed: worst <= spec.tolerance && mean <= spec.mean_tolerance,
    maxDifference: worst,
    tolerance: spec.tolerance,
    meanDifference: mean,
    meanTolerance: spec.mean_tolerance,
    tokens,
    seconds,
    computedBy,
    sentence:
      `${compared} differ from the reference by at most ${worst.toExponential(2)}${unit} ` +
      `(tolerance ${spec.tolerance})${means}`,
  };
}
