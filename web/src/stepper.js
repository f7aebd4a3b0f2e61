/** Feeds steps to an engine: checks of what a step is given, positions, and what a step asks for. */
import { XLExportError, shown } from "./errors.js";
import { isTimed, listed, namedInputs, selective, signature } from "./spec.js";
import { checkedIds } from "./vocabulary/base.js";

/**
 * @typedef {import("./memory.js").Memory} Memory
 * @typedef {import("./engine/session.js").Engine} Engine
 * @typedef {import("./engine/session.js").Step} Step
 * @typedef {import("./engine/session.js").Found} Found
 * @typedef {{logits: Float32Array, logProbs: Float32Array | null}} Answers of a language model
 * @typedef {{inputs: Step["inputs"], batch: number, length: number}} NamedStep
 * @typedef {"all" | "last" | "none"} Which positions of a segment whose logits are wanted
 * @typedef {{rows: number[][], batch: number, length: number}} Segment
 */

/**
 * One segment of tokens as rows of equal length: `[3, 4]` is one row, `[[3, 4], [5, 6]]` are two.
 * @param {unknown} tokens @param {import("../index.js").Spec} spec @param {Memory} memory @returns {Segment}
 */
export function checkedSegment(tokens, spec, memory) {
  const nested = Array.isArray(tokens) && tokens.length > 0 && typeof tokens[0] === "object";
  const rows = (nested ? tokens : [tokens]).map((row, n) =>
    checkedIds(row, spec.model.vocab_size, nested ? `row ${n}` : "the segment"),
  );
  const { length } = rows[0];
  if (rows.some((row) => row.length !== length)) {
    throw new XLExportError("the rows of the segment have different lengths; feed rows of equal length.");
  }
  if (rows.length !== memory.batch) {
    throw new XLExportError(
      `the tokens have ${rows.length} rows and the memory holds ${memory.batch} streams; give one row per ` +
        "stream.",
    );
  }
  refuseLength(length, spec);
  return { rows, batch: rows.length, length };
}

/** @param {number} length @param {import("../index.js").Spec} spec */
function refuseLength(length, spec) {
  if (length >= 1 && length <= spec.rule.segment) return;
  throw new XLExportError(
    `the segment has ${length} tokens; this artefact takes at most ${spec.rule.segment}: feed them in ` +
      "several pieces, or export it with a larger segment.",
  );
}

/**
 * The named inputs of one step. Numbers without a shape have the one that the spec expects.
 * @param {any} given @param {import("../index.js").Spec} spec @param {Memory} memory @returns {NamedStep}
 */
export function checkedInputs(given, spec, memory) {
  const wanted = namedInputs(spec);
  const { length: count } = Object.keys(given ?? {});
  if (count !== wanted.length)
    throw new XLExportError(`${count} inputs were given; expected ${listed(wanted)}.`);
  const { batch } = memory;
  /** @type {number | null} */
  let length = null;
  /** @type {Step["inputs"]} */
  const inputs = {};
  for (const tensor of wanted) {
    const { name, ids } = tensor;
    const data = checkedNumbers(given[name]?.data ?? given[name], name, ids);
    const timed = isTimed(tensor);
    const sizes = /** @type {number[]} */ (tensor.shape.slice(timed ? 2 : 1));
    const each = batch * sizes.reduce((a, b) => a * b, 1);
    const tokens = data.length / each;
    if (!Number.isInteger(tokens) || (timed ? tokens !== (length ?? tokens) : tokens !== 1)) {
      throw new XLExportError(
        `${name} has ${data.length} numbers; expected ${each}` +
          (timed ? " for each token, and the same number of tokens in every input." : "."),
      );
    }
    const shape = timed ? [batch, tokens, ...sizes] : [batch, ...sizes];
    const told = given[name].shape ?? shape;
    if (String(told) !== String(shape))
      throw new XLExportError(`${name} has the shape ${shown(told)}; expected ${shown(shape)}.`);
    if (timed) length = tokens;
    inputs[name] = { data, shape };
  }
  refuseLength(Number(length), spec);
  return { inputs, batch, length: Number(length) };
}

/**
 * The numbers of an input, as its tensor holds them.
 * @param {any} given @param {string} name @param {number} [ids] how many ids there are
 */
function checkedNumbers(given, name, ids) {
  const types = ids === undefined ? ["number"] : ["number", "bigint"];
  const fits = (/** @type {unknown} */ number) => types.includes(typeof number);
  const sample = ArrayBuffer.isView(given) ? Array.from(/** @type {any} */ (given).subarray(0, 1)) : given;
  if (!Array.isArray(sample) || !sample.every(fits)) {
    const wanted = ids === undefined ? "a Float32Array" : "an Int32Array or BigInt64Array";
    throw new XLExportError(
      `${name} is ${shown(given)}; expected ${wanted}, or an object of it and its shape.`,
    );
  }
  if (ids === undefined) {
    const numbers = new Float32Array(given); // a copy: the step may have to wait for others
    if (!numbers.every(Number.isFinite))
      throw new XLExportError(
        `${name} has a number that is not finite, and every later answer of the stream would be NaN; ` +
          "replace it, or leave the step out.",
      );
    return numbers;
  }
  const outside = given.find((/** @type {any} */ id) => !Number.isInteger(Number(id)) || id < 0 || id >= ids);
  if (outside !== undefined)
    throw new XLExportError(`${name} has the id ${outside}; expected 0 to ${ids - 1}.`);
  return BigInt64Array.from(given, BigInt);
}

/**
 * Raises XLExportError for a step that relies on a promise that the artefact does not keep.
 * @param {import("../index.js").Spec} spec @param {Memory} memory
 */
function refuseUnpromised(spec, memory) {
  if (!spec.without.length) return;
  const refuse = (/** @type {string} */ promise, /** @type {string} */ why) => {
    if (!spec.without.includes(promise)) return;
    throw new XLExportError(`this artefact does not keep the promise \`${promise}\`, ${why}.`);
  };
  const { batch } = memory;
  if (batch > 1)
    refuse(
      "rows",
      `so rows would change each other, and the memory has ${batch}; give each stream a memory of its own`,
    );
  for (const at of memory.positions) {
    if (at < 0n) refuse("padding", `and a row is at position ${at}; start each row at position 0`);
    if (at % BigInt(spec.rule.segment) !== 0n) {
      refuse(
        "cuts",
        `and a row is at position ${at}; a step begins at a multiple of ${spec.rule.segment} tokens: feed ` +
          "whole segments, and a shorter one only at the end",
      );
    }
  }
}

export class Stepper {
  /** @param {Engine} engine @param {import("../index.js").Spec} spec */
  constructor(engine, spec) {
    this.engine = engine;
    this.spec = spec;
    /** Whether the graph of a language model computes only the logits that are asked for. */
    this.chosen = selective(spec);
    /** @type {Promise<unknown>} The steps that wait: an engine computes one at a time. */
    this.queue = Promise.resolve();
    this.closed = false;
  }

  /**
   * Feeds one segment and advances the memory. The logits are [batch · length · V] for a vocabulary of
   * moderate size, and otherwise only of the wanted positions.
   * @template T
   * @param {Segment} segment @param {Memory} memory @param {Which} which
   * @param {number[][] | null} targets
   * @param {(answers: Answers) => T} use takes what it wants of the answers, which hold until it returns
   * @returns {Promise<T>}
   */
  async advance(segment, memory, which, targets, use) {
    const { batch, length } = segment;
    const step = this.#languageStep(segment, which, targets);
    return this.#inTurn({ batch, length, ...step }, memory, ({ logits, log_probs: logProbs = null }) =>
      use({ logits, logProbs }),
    );
  }

  /**
   * Feeds the named inputs of one step and advances the memory.
   * @template T
   * @param {NamedStep} step @param {Memory} memory
   * @param {(found: Found, outputs: Step["outputs"]) => T} use as in `advance`
   * @returns {Promise<T>}
   */
  async advanceNamed({ inputs, batch, length }, memory, use) {
    /** @type {Step["outputs"]} */
    const outputs = {};
    for (const { name, dtype, shape } of signature(this.spec).outputs) {
      /** @type {Record<string, number>} */
      const axes = { batch, tokens: length };
      outputs[name] = {
        dtype: /** @type {"float32" | "int64"} */ (dtype),
        shape: shape.map((size) => axes[size] ?? Number(size)),
      };
    }
    return this.#inTurn({ inputs, outputs, batch, length }, memory, (found) => use(found, outputs));
  }

  /**
   * @template T
   * @param {Step & {batch: number, length: number}} step @param {Memory} memory
   * @param {(found: Found) => T} use @returns {Promise<T>}
   */
  async #inTurn(step, memory, use) {
    // A text that continued after `close` would compute with a session that was freed.
    if (this.closed) throw new XLExportError("the model was closed; open it again.");
    const turn = this.queue.then(async () => use(await this.#run(step, memory)));
    this.queue = turn.catch(() => {});
    return turn;
  }

  /** @param {Step & {batch: number, length: number}} step @param {Memory} memory */
  async #run({ inputs, outputs, batch, length }, memory) {
    refuseUnpromised(this.spec, memory);
    const { fixed_rows: fixed, fixed_tokens: counts, rule } = this.spec;
    if (fixed && (batch !== fixed || (!counts && length !== rule.segment))) {
      throw new XLExportError(
        `the step has ${batch} rows of ${length} tokens, and this artefact was exported for exactly ` +
          `${fixed} rows of ${counts ? "1 to " : ""}${rule.segment}; feed that.`,
      );
    }
    const positions = new BigInt64Array(batch * length);
    for (let b = 0; b < batch; b++) {
      const first = memory.positions[b];
      for (let t = 0; t < length; t++) positions[b * length + t] = first + BigInt(t);
    }
    await this.#clearRestarted(memory);
    const given = { ...inputs, position_ids: { data: positions, shape: [batch, length] } };
    const ring = this.spec.form === "ring";
    let left = length;
    const advance = (/** @type {number} */ count) => {
      left -= count;
      for (let b = 0; b < batch; b++) memory.positions[b] += BigInt(count);
      // Outputs may be ids, or not read the memory; only the logits of a ring show what it holds.
      if (!ring) memory.unsure = true;
    };
    // If a later piece fails, the memory has seen the earlier ones; of a ring the slots are written again.
    const onPiece = ring ? () => {} : advance;
    const found = await this.engine.run({ inputs: given, outputs }, memory.state, onPiece);
    advance(left);
    if (ring) this.#observe(found.logits, found.log_probs, memory);
    return found;
  }

  /**
   * What the graph of a language model reads, without the positions, and what it returns.
   * @param {Segment} segment @param {Which} which @param {number[][] | null} targets @returns {Step}
   */
  #languageStep({ rows, batch, length }, which, targets) {
    const shape = [batch, length];
    const ids = (/** @type {number[][]} */ lists) => {
      const data = new BigInt64Array(batch * length);
      for (let b = 0; b < batch; b++)
        for (let t = 0; t < length; t++) data[b * length + t] = BigInt(lists[b][t]);
      return data;
    };
    /** @type {Step["inputs"]} */
    const inputs = { input_ids: { data: ids(rows), shape } };
    const size = this.spec.model.vocab_size;
    if (!this.chosen) return { inputs, outputs: { logits: { dtype: "float32", shape: [...shape, size] } } };
    const count = which === "none" ? 0 : which === "last" ? batch : batch * length;
    const at = (/** @type {number} */ i) => BigInt(which === "last" ? (i + 1) * length - 1 : i);
    inputs.targets = { data: targets ? ids(targets) : new BigInt64Array(batch * length).fill(-1n), shape };
    inputs.logit_rows = { data: BigInt64Array.from({ length: count }, (_, i) => at(i)), shape: [count] };
    return {
      inputs,
      outputs: {
        logits: { dtype: "float32", shape: [count, size] },
        log_probs: { dtype: "float32", shape },
      },
    };
  }

  /**
   * The logits [batch · V] after each row's last token, copied out of the answer of `advance`.
   * @param {Float32Array} logits @param {Segment} segment
   */
  lastLogits(logits, { batch, length }) {
    const size = this.spec.model.vocab_size;
    const last = new Float32Array(batch * size);
    const stride = logits.length / batch;
    for (let b = 0; b < batch; b++) {
      const end = this.chosen ? (b + 1) * stride : (b * length + length) * size;
      last.set(logits.subarray(end - size, end), b * size);
    }
    return last;
  }

  /**
   * Notes whether the memory may hold values that are not finite: a visible one makes the last answer not a
   * number.
   * @param {Float32Array} logits @param {Float32Array | undefined} logProbs @param {Memory} memory
   */
  #observe(logits, logProbs, memory) {
    const told = logits.length ? logits : logProbs;
    const size = logits.length ? this.spec.model.vocab_size : 1;
    const stride = told ? told.length / memory.batch : 0;
    for (let b = 1; told && b <= memory.batch; b++) {
      for (let i = b * stride - size; i < b * stride; i++)
        if (!Number.isFinite(told[i])) memory.unsure = true;
    }
  }

  /**
   * Sets the tensors of rows that start a new text to zero if they may hold what is not finite: a mask
   * hides it with weight 0, and 0 times NaN is NaN. Every step writes a whole memory unless it is a ring, so
   * such a memory is always cleared.
   * @param {Memory} memory
   */
  async #clearRestarted(memory) {
    if (memory.adopted.some(Boolean)) {
      memory.positions.forEach((position, row) => {
        if (position <= 0n) memory.adopted[row] = ""; // a new text was not adopted
      });
    }
    if (!memory.unsure) return;
    const rows = [...memory.positions.keys()].filter((row) => memory.positions[row] <= 0n);
    if (!rows.length) return;
    const tensors = await this.engine.read(memory.state);
    for (const tensor of tensors) {
      const stride = tensor.length / memory.batch;
      for (const row of rows) tensor.fill(0, row * stride, (row + 1) * stride);
    }
    await this.engine.write(memory.state, tensors);
    memory.unsure = rows.length < memory.batch;
  }
}
