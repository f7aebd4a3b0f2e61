/** Feeds segments to an engine: checks of what a step is given, positions, and what a step asks for. */
import { XLExportError, shown } from "./errors.js";
import { checkedIds } from "./vocabulary/base.js";

/**
 * @typedef {import("./memory.js").Memory} Memory
 * @typedef {import("./engine/session.js").Engine} Engine
 * @typedef {import("./engine/session.js").Answers} Answers
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
  if (length < 1 || length > spec.rule.segment) {
    throw new XLExportError(
      `the segment has ${length} tokens; this artefact takes 1 to ${spec.rule.segment}: feed them in ` +
        "several pieces, or export it with a larger --segment.",
    );
  }
  return { rows, batch: rows.length, length };
}

/**
 * Raises XLExportError for a step that relies on a promise that the artefact does not keep.
 * @param {import("../index.js").Spec} spec @param {Memory} memory
 */
function refuseUnpromised(spec, memory) {
  if (!spec.without.length) return;
  const refuse = (/** @type {string} */ promise, /** @type {string} */ why) => {
    if (!spec.without.includes(promise)) return;
    throw new XLExportError(`this artefact does not keep the promise \`${promise}\`: ${why}.`);
  };
  if (memory.batch > 1) refuse("rows", "give each stream a memory of its own");
  for (const at of memory.positions) {
    if (at < 0n) refuse("padding", `a row is at position ${at}; start each row at position 0`);
    if (at % BigInt(spec.rule.segment) !== 0n) {
      refuse(
        "cuts",
        `a row is at position ${at}, and a step begins at a multiple of ${spec.rule.segment} tokens; feed ` +
          "whole segments, and a shorter one only at the end of a stream",
      );
    }
  }
}

/**
 * Targets of the shape of a segment; -1 means that none is wanted.
 * @param {unknown} targets @param {Segment} segment @param {number} size @returns {number[][]}
 */
export function checkedTargets(targets, segment, size) {
  const given = /** @type {any} */ (targets);
  const rows = segment.batch === 1 && typeof given?.[0] !== "object" ? [given] : given;
  const fits =
    Array.isArray(rows) &&
    rows.length === segment.batch &&
    rows.every((row) => row?.length === segment.length);
  if (!fits) {
    throw new XLExportError(
      `the targets are ${shown(targets)}; expected ${segment.batch} rows of ${segment.length}.`,
    );
  }
  const numbers = rows.map((/** @type {any} */ row) => Array.from(row, Number));
  const wrong = numbers.flat().find((target) => !Number.isInteger(target) || target < -1 || target >= size);
  if (wrong !== undefined) {
    throw new XLExportError(
      `the target ${wrong} is outside the vocabulary; expected -1 (not wanted) to ${size - 1}.`,
    );
  }
  return numbers;
}

export class Stepper {
  /** @param {Engine} engine @param {import("../index.js").Spec} spec @param {boolean} chosen */
  constructor(engine, spec, chosen) {
    this.engine = engine;
    this.spec = spec;
    this.chosen = chosen;
    /** @type {Promise<unknown>} The steps that wait: an engine computes one at a time. */
    this.queue = Promise.resolve();
    this.closed = false;
  }

  /**
   * Feeds one segment and advances the memory. The logits are [batch · length · V] for a vocabulary of
   * moderate size, and otherwise those of the wanted positions.
   * @template T
   * @param {Segment} segment @param {Memory} memory @param {Which} which
   * @param {number[][] | null} targets
   * @param {(answers: Answers) => T} use takes what it wants of the answers, which hold until it returns
   * @returns {Promise<T>}
   */
  async advance(segment, memory, which, targets, use) {
    // A text that goes on after `close` would compute with a session that was freed.
    if (this.closed) throw new XLExportError("the model was closed; open it again.");
    const turn = this.queue.then(async () => use(await this.#run(segment, memory, which, targets)));
    this.queue = turn.catch(() => {});
    return turn;
  }

  /**
   * @param {Segment} segment
   * @param {Memory} memory @param {Which} which @param {number[][] | null} targets
   */
  async #run({ rows, batch, length }, memory, which, targets) {
    refuseUnpromised(this.spec, memory);
    const { fixed_rows: fixed, rule } = this.spec;
    if (fixed && (batch !== fixed || length !== rule.segment)) {
      throw new XLExportError(
        `the step has ${batch} rows of ${length} tokens, and this artefact was traced for exactly ${fixed} ` +
          `rows of ${rule.segment}; feed that.`,
      );
    }
    const tokens = new BigInt64Array(batch * length);
    const positions = new BigInt64Array(batch * length);
    for (let b = 0; b < batch; b++) {
      const row = rows[b];
      const first = memory.positions[b];
      for (let t = 0; t < length; t++) {
        tokens[b * length + t] = BigInt(row[t]);
        positions[b * length + t] = first + BigInt(t);
      }
    }
    const step = { tokens, positions, batch, length, targets: null, rows: null };
    await this.#clearRestarted(memory);
    const answers = await this.engine.run(
      this.chosen ? chosenStep(step, which, targets) : step,
      memory.state,
    );
    for (let b = 0; b < batch; b++) memory.positions[b] += BigInt(length);
    this.#observe(answers.logits, answers.logProbs, memory);
    return answers;
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
   * Notes whether the memory may hold values that are not finite: such a value, where it is visible, makes
   * the last answer not a number.
   * @param {Float32Array} logits @param {Float32Array | null} logProbs @param {Memory} memory
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
   * Sets the tensors of rows that start a new text to zero, where they may hold what is not finite: a mask
   * hides it with weight 0, and 0 times NaN is NaN.
   * @param {Memory} memory
   */
  async #clearRestarted(memory) {
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

/**
 * The inputs of a graph that computes only the logits that are asked for.
 * @param {import("./engine/session.js").Step} step @param {Which} which @param {number[][] | null} targets
 */
function chosenStep(step, which, targets) {
  const { batch, length } = step;
  const wanted = new BigInt64Array(batch * length).fill(-1n);
  targets?.forEach((row, b) => row.forEach((target, t) => (wanted[b * length + t] = BigInt(target))));
  const count = which === "none" ? 0 : which === "last" ? batch : batch * length;
  const at = (/** @type {number} */ i) => BigInt(which === "last" ? (i + 1) * length - 1 : i);
  return { ...step, targets: wanted, rows: BigInt64Array.from({ length: count }, (_, i) => at(i)) };
}
