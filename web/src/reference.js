/**
 * The reference of an artefact: inputs and the trained model's answers, which any engine can replay.
 */
import { TYPES, numBytes } from "./element-types.js";
import { typeOf } from "./engine/session.js";
import { XLExportError, refuseStopped, shown } from "./errors.js";
import { readFields } from "./files/fields.js";
import { isLanguageModel, isTimed, namedInputs, signature } from "./spec.js";
import { logSumExp } from "./text/sampler.js";

/**
 * @typedef {import("../index.js").Spec} Spec
 * @typedef {import("./stepper.js").Stepper} Stepper
 * @typedef {import("./memory.js").Memory} Memory
 * @typedef {{number: number, at: number, length: number}} Piece some tokens of a segment: the number of the
 * segment, the first of the tokens, and how many there are
 * @typedef {{
 *   batch: number, segments: number[], restarts: boolean[][], tokens: number, compared: string, unit: string,
 *   cuts: boolean,
 *   differences: (stepper: Stepper, memory: Memory, piece: Piece) => Promise<Float64Array>,
 * }} Reference `compared` and `unit`: of the differences, in words. `cuts`: whether a part of a segment has
 * the same answers
 * @typedef {(holds: unknown, what: string) => void} Need raises an XLExportError unless it holds
 * @typedef {(stored: any, name: string, dtype: "float32" | "int64", wanted: (number | null)[]) => any} Load
 * the numbers of an array of this type and shape; null is any size
 */

const JSON_FILE = "reference.json";
const BINARY = "reference.bin";

/**
 * The reference of an artefact.
 * @param {Spec} spec @param {(file: string) => Promise<Uint8Array>} read
 * @returns {Promise<Reference>}
 */
export async function loadReference(spec, read) {
  /** @type {Need} */
  const need = (holds, what) => {
    if (holds) return;
    throw new XLExportError(
      `the reference of the artefact does not hold answers of this model (${what}); export it again.`,
    );
  };
  const [text, content] = await Promise.all([read(JSON_FILE), read(BINARY)]);
  const data = readFields(isLanguageModel(spec) ? "reference" : "step_reference", text, JSON_FILE);
  const { segments, restarts } = data;
  need(
    segments.length && segments.every((/** @type {number} */ n) => n <= spec.rule.segment),
    "its segments",
  );
  const batch = restarts[0]?.length;
  const whole = restarts.length === segments.length;
  need(whole && batch && restarts.every((/** @type {any} */ row) => row.length === batch), "its restarts");
  /** @type {Load} */
  const load = (stored, name, dtype, wanted) => {
    const { shape, offset } = stored ?? { shape: [] };
    const fits =
      stored?.dtype === dtype &&
      shape.length === wanted.length &&
      wanted.every((size, axis) => (size === null ? shape[axis] >= 1 : shape[axis] === size));
    need(fits, `${name} is ${shown(stored)}`);
    const size = numBytes(dtype, shape);
    const bytes = content.slice(offset, offset + size);
    need(bytes.length === size, `${name} does not fit into ${BINARY}`);
    return new TYPES[dtype].array(bytes.buffer);
  };
  const fed = segments.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
  const ofKind = isLanguageModel(spec) ? languageReference : namedReference;
  return { batch, segments, restarts, ...ofKind(spec, data, batch, fed, load, need) };
}

/**
 * What is compared of a language model: log-probabilities (nats) of all next tokens, and of every symbol
 * after the last one.
 * @param {Spec} spec @param {any} data @param {number} batch @param {number} fed
 * @param {Load} load @param {Need} need
 */
function languageReference(spec, { tokens, log_probs, last: ends }, batch, fed, load, need) {
  const size = spec.model.vocab_size;
  const row = (/** @type {number[]} */ ids) => ids.length === fed + 1 && ids.every((id) => id < size);
  need(tokens.length === batch && tokens.every(row), "its tokens");
  /** @type {Float32Array} */
  const logProbs = load(log_probs, "log_probs", "float32", [batch, fed]);
  /** @type {Float32Array} */
  const last = load(ends, "last", "float32", [batch, size]);
  // A token that cannot occur, as in a padded vocabulary, has the answer -Infinity.
  const sound = [logProbs, last].every((answers) => answers.every((value) => value < Infinity));
  need(sound, "a number is not a log-probability");
  return {
    tokens: logProbs.length,
    compared: `${logProbs.length} log-probabilities`,
    unit: " nats",
    cuts: !spec.fixed_rows,
    /** @type {Reference["differences"]} */
    async differences(stepper, memory, { at, length }) {
      const rows = tokens.map((/** @type {number[]} */ row) => row.slice(at, at + length));
      const targets = tokens.map((/** @type {number[]} */ row) => row.slice(at + 1, at + length + 1));
      const isLast = at + length === fed;
      const segment = { rows, batch, length };
      const found = new Float64Array(batch * length + (isLast ? last.length : 0));
      await stepper.advance(segment, memory, isLast ? "last" : "none", targets, (answers) => {
        compareTokens(found, answers, targets, size, (b, t) => logProbs[b * fed + at + t]);
        if (isLast) {
          const logits = stepper.lastLogits(answers.logits, segment);
          compareLast(found.subarray(batch * length), logits, last, size);
        }
      });
      return found;
    },
  };
}

/**
 * What is compared of any other step: its outputs. Inputs repeat: token n of a stream has the values at n mod
 * P of the inputs [B, P, …]. An output without tokens has a value for each segment.
 * @param {Spec} spec @param {any} data @param {number} batch @param {number} fed
 * @param {Load} load @param {Need} need
 */
function namedReference(spec, data, batch, fed, load, need) {
  const steps = data.segments.length;
  const lossy = spec.precision !== "fp32" || spec.state.some(({ dtype }) => dtype !== "float32");
  /**
   * @param {import("../index.js").TensorFacts[]} list @param {any} stored
   * @param {number | null} tokens @param {number[]} once the axes of a tensor that has no tokens
   */
  const tensors = (list, stored, tokens, once) => {
    need(Object.keys(stored).length === list.length, "its inputs or outputs");
    return list.map((tensor) => {
      const { name, dtype } = tensor;
      const timed = isTimed(tensor);
      const sizes = tensor.shape.slice(timed ? 2 : 1).map(Number);
      const wanted = timed ? [batch, tokens, ...sizes] : [batch, ...once, ...sizes];
      const type = /** @type {"float32" | "int64"} */ (dtype);
      const numbers = load(stored[name], name, type, wanted);
      const size = sizes.reduce((a, b) => a * b, 1);
      const count = numbers.length / batch / size;
      need(count <= Math.max(fed, steps), `${name} has more values than there are tokens`);
      return { name, timed, sizes, size, data: numbers, count };
    });
  };
  const inputs = tensors(namedInputs(spec), data.inputs, null, []);
  const outputs = tensors(signature(spec).outputs, data.outputs, fed, [steps]);
  /**
   * What differences from an output are relative to: 1, and in a lower precision, whose limits are wide, the
   * root mean square of the output if that is smaller.
   * @param {Float32Array} output
   */
  const scaleOf = (output) =>
    lossy ? Math.min(1, Math.sqrt(output.reduce((sum, x) => sum + x * x, 0) / output.length)) || 1 : 1;
  return {
    tokens: batch * fed,
    compared: `${outputs.map(({ name }) => name).join(", ")} of ${batch * fed} tokens`,
    unit: "",
    cuts: false, // an output for each step follows from the whole segment
    /** @type {Reference["differences"]} */
    async differences(stepper, memory, { number, at, length }) {
      /** @type {import("./stepper.js").NamedStep["inputs"]} */
      const step = {};
      for (const { name, data: values, count, sizes, size, timed } of inputs) {
        step[name] = { data: values, shape: [batch, ...sizes] };
        if (!timed) continue;
        const numbers = /** @type {any} */ (new TYPES[typeOf(values)].array(batch * length * size));
        for (let b = 0; b < batch; b++)
          for (let t = 0; t < length; t++) {
            const from = (b * count + ((at + t) % count)) * size;
            numbers.set(values.subarray(from, from + size), (b * length + t) * size);
          }
        step[name] = { data: numbers, shape: [batch, length, ...sizes] };
      }
      return stepper.advanceNamed({ inputs: step, batch, length }, memory, (found) => {
        /** @type {number[]} */
        const apart = [];
        for (const { name, data: right, count, size, timed } of outputs) {
          // A rounding may change an id to any other.
          if (lossy && right instanceof BigInt64Array) continue;
          const scale = scaleOf(right);
          const stride = (timed ? length : 1) * size;
          for (let b = 0; b < batch; b++)
            for (let i = 0; i < stride; i++) {
              const wanted = Number(right[(b * count + (timed ? at : number)) * size + i]);
              const mine = Number(found[name][b * stride + i]);
              apart.push(Math.abs(mine - wanted) / Math.max(scale, Math.abs(wanted)));
            }
        }
        return Float64Array.from(apart);
      });
    },
  };
}

/**
 * The differences of an engine's answers from the reference, segment by segment.
 * @param {Stepper} stepper @param {Reference} reference @param {Memory} memory of the reference's streams
 * @param {{signal?: AbortSignal, pause?: () => Promise<void>, most?: number}} [options] `most`: only the
 * first segments are compared, and the last of them is cut after this number of tokens if it can be
 * @returns {Promise<Float64Array[]>}
 */
export async function replay(stepper, reference, memory, { signal, pause, most = Infinity } = {}) {
  const found = [];
  let at = 0;
  for (const [number, whole] of reference.segments.entries()) {
    if (at >= most) break;
    refuseStopped(signal);
    await pause?.();
    reference.restarts[number].forEach((restart, row) => restart && (memory.positions[row] = 0n));
    const length = reference.cuts ? Math.min(whole, most - at) : whole;
    found.push(await reference.differences(stepper, memory, { number, at, length }));
    at += length;
  }
  return found;
}

/**
 * The differences of the log-probabilities of some targets [B, T].
 * @param {Float64Array} found is filled @param {import("./stepper.js").Answers} answers
 * @param {number[][]} targets @param {number} size V @param {(b: number, t: number) => number} right
 */
function compareTokens(found, { logits, logProbs }, targets, size, right) {
  targets.forEach((row, b) =>
    row.forEach((target, t) => {
      const i = b * row.length + t;
      const mine = logProbs ? logProbs[i] : logits[i * size + target] - logSumExp(logits, i * size, size);
      found[i] = difference(mine, right(b, t));
    }),
  );
}

/**
 * How far two log-probabilities are apart; 0 where both are -Infinity.
 * @param {number} mine @param {number} right
 */
function difference(mine, right) {
  return mine === right ? 0 : Math.abs(mine - right);
}

/**
 * The differences of all log-probabilities [B, V] after the last token.
 * @param {Float64Array} found is filled @param {Float32Array} logits @param {Float32Array} last
 * @param {number} size V
 */
function compareLast(found, logits, last, size) {
  for (let from = 0; from < last.length; from += size) {
    const sum = logSumExp(logits, from, size);
    for (let i = from; i < from + size; i++) found[i] = difference(logits[i] - sum, last[i]);
  }
}
