/**
 * The reference of an artefact: tokens and the trained model's answers, which any engine can replay.
 *
 * New artefacts have `reference.json` and plain float32 arrays beside it, older ones `reference.npz`.
 */
import { XLExportError, refuseStopped, shown } from "./errors.js";
import { parseJson } from "./files/json.js";
import { readNpz } from "./files/npz.js";
import { logSumExp } from "./text/logits.js";

/**
 * @typedef {{tokens: number[][], segments: number[], restarts: boolean[][], logProbs: Float32Array,
 *   last: Float32Array}}
 *   Reference `logProbs` [B · N] and `last` [B · V] in nats
 * @typedef {import("../index.js").Spec} Spec
 * @typedef {import("./stepper.js").Stepper} Stepper
 */

const JSON_FILE = "reference.json";
const NPZ_FILE = "reference.npz";
/** The largest difference, and the largest mean difference, that may pass (docs/reference/answers.md). */
const LIMITS = /** @type {Record<string, [number, number]>} */ ({
  fp32: [1e-4, 1e-4],
  fp16: [5e-2, 1e-2],
  "int8-stored": [1e-4, 1e-4],
});
const LOSSY = /** @type {[number, number]} */ ([0.5, 5e-2]);
/** Of older artefacts, whose reference holds the answers of the machine that exported. */
const OLDER_LOSSY = /** @type {[number, number]} */ ([0.5, 2e-2]);
/** Of memory in int8 beside PyTorch's answers with such memory. */
const MEMORY_IN_BYTES = /** @type {[number, number]} */ ([2e-2, 2e-3]);

/** The limits of an artefact: those of the coarser of weights and memory. @param {Spec} spec */
export function limits(spec) {
  const lossy = spec.answers === "stored-weights" ? LOSSY : OLDER_LOSSY;
  const pair = [spec.precision, spec.memory_precision ?? "fp32"].map((name) => LIMITS[name] ?? lossy);
  if (spec.answers === "memory-in-bytes") pair[1] = MEMORY_IN_BYTES;
  return { most: Math.max(pair[0][0], pair[1][0]), mean: Math.max(pair[0][1], pair[1][1]) };
}

/**
 * The names of the files in which an artefact keeps its reference.
 * @param {Spec} spec @param {(file: string) => Promise<Uint8Array>} read
 * @returns {Promise<Reference>}
 */
export async function loadReference(spec, read) {
  const fail = (/** @type {string} */ why) =>
    new XLExportError(
      `the reference of the artefact does not hold answers of this model (${why}); export it again.`,
    );
  let found;
  if (Object.hasOwn(spec.files, JSON_FILE)) {
    found = await fromJson(parseJson(await read(JSON_FILE), JSON_FILE), read, fail);
  } else if (Object.hasOwn(spec.files, NPZ_FILE)) {
    found = await fromNpz(await read(NPZ_FILE), fail);
  } else {
    throw fail("it has no reference.json");
  }
  const { tokens, segments, restarts, logProbs, last } = found;
  const size = spec.model.vocab_size;
  const fed = segments.reduce((a, b) => a + b, 0);
  const token = (/** @type {number} */ id) => Number.isInteger(id) && id >= 0 && id < size;
  if (!tokens.length || !tokens.every((row) => row.length === fed + 1 && row.every(token)))
    throw fail("its tokens");
  if (!segments.every((n) => Number.isInteger(n) && n >= 1 && n <= spec.rule.segment))
    throw fail("its segments");
  if (restarts.length !== segments.length || restarts.some((row) => row.length !== tokens.length))
    throw fail("its restarts");
  if (logProbs.length !== tokens.length * fed || !fed) throw fail("its log-probabilities");
  if (last.length !== tokens.length * size) throw fail("its last answers");
  // A token that cannot occur, as in a padded vocabulary, has the answer -Infinity.
  if (![logProbs, last].every((answers) => answers.every((value) => value < Infinity)))
    throw fail("a number is not a log-probability");
  return found;
}

/**
 * @param {any} data @param {(file: string) => Promise<Uint8Array>} read @param {(why: string) => Error} fail
 * @returns {Promise<Reference>}
 */
async function fromJson(data, read, fail) {
  const { tokens, segments, restarts } = data ?? {};
  if (![tokens, segments, restarts].every(Array.isArray) || ![...tokens, ...restarts].every(Array.isArray)) {
    throw fail("its lists");
  }
  /** @param {any} facts */
  const floats = async (facts) => {
    const count = facts?.shape?.reduce?.((/** @type {number} */ a, /** @type {number} */ b) => a * b, 1);
    if (facts?.dtype !== "float32" || typeof facts.file !== "string" || !Number.isSafeInteger(count)) {
      throw fail(`an array is ${shown(facts)}`);
    }
    const bytes = await read(facts.file);
    const offset = facts.offset ?? 0;
    if (!Number.isSafeInteger(offset) || offset < 0 || count < 0 || offset + 4 * count > bytes.length) {
      throw fail(`${facts.file} is too short`);
    }
    return littleEndian(bytes.subarray(offset, offset + 4 * count));
  };
  return {
    tokens,
    segments,
    restarts,
    logProbs: await floats(data.log_probs),
    last: await floats(data.last),
  };
}

/** @param {Uint8Array} bytes @param {(why: string) => Error} fail @returns {Promise<Reference>} */
async function fromNpz(bytes, fail) {
  const arrays = await readNpz(bytes, NPZ_FILE);
  const get = (/** @type {string} */ name, /** @type {string} */ dtype, /** @type {number} */ rank) => {
    const array = arrays.get(name);
    if (!array || array.dtype !== dtype || array.shape.length !== rank) throw fail(`its ${name}`);
    return array;
  };
  const integers = (/** @type {Uint8Array} */ data) =>
    Array.from(new BigInt64Array(data.buffer, data.byteOffset, data.length / 8), Number);
  const rows = (/** @type {any[]} */ values, /** @type {number[]} */ [count, width]) =>
    Array.from({ length: count }, (_, i) => values.slice(i * width, (i + 1) * width));
  const tokens = get("tokens", "<i8", 2);
  const restarts = get("restarts", "|b1", 2);
  return {
    tokens: rows(integers(tokens.data), tokens.shape),
    segments: integers(get("segments", "<i8", 1).data),
    restarts: rows(Array.from(restarts.data, Boolean), restarts.shape),
    logProbs: littleEndian(get("log_probs", "<f4", 2).data),
    last: littleEndian(get("last", "<f4", 2).data),
  };
}

/** @param {Uint8Array} bytes */
function littleEndian(bytes) {
  return new Float32Array(bytes.slice().buffer);
}

/**
 * The differences (nats) of an engine's answers from the reference, segment by segment.
 * @param {Stepper} stepper @param {Reference} reference
 * @param {import("./memory.js").Memory} memory of as many streams
 * @param {{signal?: AbortSignal, pause?: () => Promise<void>}} [options]
 * @returns {Promise<Float64Array[]>}
 */
export async function replay(stepper, reference, memory, { signal, pause } = {}) {
  const { tokens, restarts, logProbs, last } = reference;
  const size = stepper.spec.model.vocab_size;
  const fed = tokens[0].length - 1;
  const differences = [];
  let at = 0;
  for (const [number, length] of reference.segments.entries()) {
    refuseStopped(signal);
    await pause?.();
    restarts[number].forEach((restart, row) => restart && (memory.positions[row] = 0n));
    const rows = tokens.map((row) => row.slice(at, at + length));
    const targets = tokens.map((row) => row.slice(at + 1, at + length + 1));
    const ends = at + length === fed;
    const segment = { rows, batch: rows.length, length };
    const found = new Float64Array(rows.length * length + (ends ? last.length : 0));
    await stepper.advance(segment, memory, ends ? "last" : "none", targets, (answers) => {
      compareTokens(found, answers, targets, size, (b, t) => logProbs[b * fed + at + t]);
      if (ends)
        compareLast(
          found.subarray(rows.length * length),
          stepper.lastLogits(answers.logits, segment),
          last,
          size,
        );
    });
    differences.push(found);
    at += length;
  }
  return differences;
}

/**
 * The differences of the log-probabilities of some targets [B, T].
 * @param {Float64Array} found is filled @param {import("./engine/session.js").Answers} answers
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
