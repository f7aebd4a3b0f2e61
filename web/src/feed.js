/** Feeds tokens of any number to a stream, in segments. */
import { refuseStopped } from "./errors.js";
import { pauses } from "./pause.js";

const FIRST = 16; // tokens of the first segment of a long text, from which its speed is known
const LONGEST = 40; // milliseconds of a segment, so that a signal is heard in time

/**
 * Feeds tokens to the one stream of a memory. Under the mask `same-length` segments are as long as they can
 * be without keeping a signal waiting, because cutting changes no answer; otherwise they are those of Python.
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
  const { segment: longest, mask } = stepper.spec.rule;
  const pause = pauses();
  let length = mask === "same-length" ? Math.min(FIRST, longest) : longest;
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
    if (mask === "same-length") length = nextLength(length, performance.now() - began, longest);
    await pause();
  }
}

/** @param {number} length @param {number} milliseconds @param {number} longest */
function nextLength(length, milliseconds, longest) {
  if (milliseconds > LONGEST && length > 1) return Math.ceil(length / 2);
  return milliseconds < LONGEST / 4 ? Math.min(2 * length, longest) : length;
}
