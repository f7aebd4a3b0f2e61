/** The surprisal of every token of a text. */
import { XLExportError, shown } from "./errors.js";
import { feed } from "./feed.js";
import { logSumExp } from "./text/logits.js";

/**
 * The surprisals of tokens in nats; not a number for a token before which nothing is known.
 * @param {import("./stepper.js").Stepper} stepper @param {number[]} tokens
 * @param {import("./memory.js").Memory} memory of one stream, which has seen the tokens afterwards
 * @param {{signal?: AbortSignal, onProgress?: (fed: number, total: number) => void}} options
 */
export async function surprisals(stepper, tokens, memory, { signal, onProgress }) {
  if (memory.batch !== 1) {
    throw new XLExportError(
      `the memory holds ${memory.batch} streams, and one is scored; use a memory of start(1).`,
    );
  }
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
  return nats;
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
