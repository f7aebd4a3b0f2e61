/**
 * The reference of an artefact: tokens and the trained model's answers, which any engine can replay.
 */
import { XLExportError, refuseStopped, shown } from "./errors.js";
import { parseJson } from "./files/json.js";
import { logSumExp } from "./text/logits.js";

/**
 * @typedef {{tokens: number[][], segments: number[], restarts: boolean[][], logProbs: Float32Array,
 *   last: Float32Array}}
 *   Reference `logProbs` [B · N] and `last` [B · V] in nats
 * @typedef {import("../index.js").Spec} Spec
 * @typedef {import("./stepper.js").Stepper} Stepper
 */

const JSON_FILE = "reference.json";

/**
 * The reference of an artefact.
 * @param {Spec} spec @param {(file: string) => Promise<Uint8Array>} read
 * @returns {Promise<Reference>}
 */
export async function loadReference(spec, read) {
  const fail = (/** @type {string} */ why) =>
    new XLExportError(
      `the reference of the artefact does not hold answers of this model (${why}); export it again.`,
    );
  if (!Object.hasOwn(spec.files, JSON_FILE)) throw fail("it has no reference.json");
  const found = await fromJson(parseJson(await read(JSON_FILE), JSON_FILE), read, fail);
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
