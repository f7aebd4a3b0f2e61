/** Feeds tokens of any number to a stream, in segments; and how surprising each of them was. */
import { XLExportError, refuseStopped, shown } from "./errors.js";
import { TABLES } from "./format-tables.js";
import { logSumExp } from "./text/sampler.js";

const FIRST_TOKENS = 16; // tokens of the first segment of a long text, from which its speed is known
const MAX_SEGMENT_MS = 40; // milliseconds of a segment, so that a signal is heard in time
const IMPOSSIBLE = 9999; // nats, as in Python (runtimes/base/logits.py)
const PAUSE_AFTER_MS = 12; // milliseconds of work, so that a page stays responsive

/**
 * Feeds tokens to the one stream of a memory. Where cutting changes no answer, segments are as long as they
 * can be without keeping a signal waiting; otherwise they are as in Python.
 * @param {import("./stepper.js").Stepper} stepper @param {number[]} tokens
 * @param {import("./memory.js").Memory} memory
 * @param {{
 *   signal?: AbortSignal,
 *   targets?: number[],
 *   each?: (answers: import("./stepper.js").Answers, from: number, length: number) => void,
 * }} [options] `targets`: the token whose log-probability is wanted after each token, -1 for none. `each`:
 * hears the answers of each segment, which hold until the next one
 */
export async function feed(stepper, tokens, memory, { signal, targets, each } = {}) {
  const { rule, without } = stepper.spec;
  const { segment: longest, mask } = rule;
  const pause = pauses();
  const freely = TABLES.cuts_change_nothing[mask] && !without.includes("cuts");
  let length = freely ? Math.min(FIRST_TOKENS, longest) : longest;
  // What follows an earlier token is no answer to a text that is stopped or fails before its end.
  if (tokens.length) memory.last = null;
  for (let at = 0; at < tokens.length;) {
    refuseStopped(signal);
    const row = tokens.slice(at, at + length);
    const ends = at + row.length === tokens.length;
    const segment = { rows: [row], batch: 1, length: row.length };
    const began = performance.now();
    const wanted = targets ? [targets.slice(at, at + row.length)] : null;
    await stepper.advance(segment, memory, ends ? "last" : "none", wanted, (answers) => {
      if (ends) memory.last = stepper.lastLogits(answers.logits, segment);
      memory.saw(row);
      each?.(answers, at, row.length);
    });
    at += row.length;
    if (freely) length = nextLength(length, performance.now() - began, longest);
    await pause();
  }
}

/** @param {number} length @param {number} milliseconds @param {number} longest */
function nextLength(length, milliseconds, longest) {
  if (milliseconds > MAX_SEGMENT_MS && length > 1) return Math.ceil(length / 2);
  return milliseconds < MAX_SEGMENT_MS / 4 ? Math.min(2 * length, longest) : length;
}

/** A function to call between steps: now and then it waits one turn of the event loop, to hear a signal. */
export function pauses() {
  let last = performance.now();
  return async () => {
    if (performance.now() - last < PAUSE_AFTER_MS) return;
    await turn();
    last = performance.now();
  };
}

/** Waits one turn of the event loop. Timers of a page wait 4 ms or more, and messages do not. */
function turn() {
  return new Promise((/** @type {(value?: unknown) => void} */ resolve) => {
    if (typeof setImmediate === "function") return void setImmediate(resolve);
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

/**
 * The surprisals of tokens in nats; not a number for a token before which nothing is known. A token that the
 * model deems impossible has `IMPOSSIBLE`, which JSON can hold, and a sum.
 * @param {import("./stepper.js").Stepper} stepper @param {number[]} tokens
 * @param {import("./memory.js").Memory} memory of one stream, which has seen the tokens afterwards
 * @param {{signal?: AbortSignal, onProgress?: (fed: number, total: number) => void}} options
 */
export async function surprisals(stepper, tokens, memory, { signal, onProgress }) {
  const size = stepper.spec.model.vocab_size;
  const nats = new Float64Array(tokens.length).fill(NaN);
  const { last } = memory;
  if (last && tokens.length) nats[0] = logSumExp(last) - last[tokens[0]];
  await feed(stepper, tokens, memory, {
    signal,
    targets: [...tokens.slice(1), -1],
    each({ logits, logProbs }, from, length) {
      for (let t = 0; t < length && from + t + 1 < tokens.length; t++) {
        nats[from + t + 1] = logProbs
          ? -logProbs[t]
          : logSumExp(logits, t * size, size) - logits[t * size + tokens[from + t + 1]];
      }
      onProgress?.(from + length, tokens.length);
    },
  });
  return nats.map((value) => Math.min(value, IMPOSSIBLE)); // NaN stays NaN
}

/**
 * The factor that makes a unit of nats.
 * @param {unknown} unit
 */
export function unitFactor(unit) {
  if (unit === "bits") return 1 / Math.LN2;
  if (unit === "nats") return 1;
  throw new XLExportError(`the unit is ${shown(unit)}; expected "bits" or "nats".`);
}
