/** Generating text. Every token costs the same, however long the text becomes. */
import { XLExportError, refuseStopped, shown } from "./errors.js";
import { feed, pauses } from "./feed.js";
import { GrowingText } from "./text/growing.js";
import { Random } from "./text/random.js";
import { Sampler, logSumExp } from "./text/sampler.js";
import { wholeTokens } from "./vocabulary/base.js";

/**
 * @typedef {import("../index.js").GenerateOptions} GenerateOptions
 * @typedef {import("../index.js").Piece} Piece
 * @typedef {import("./memory.js").Memory} Memory
 */

/**
 * The options of a text, checked before anything is computed.
 * @param {GenerateOptions} options @param {import("../index.js").SamplingOptions} defaults of the model
 * @param {string} kind of the vocabulary
 */
export function checkedOptions(options, defaults, kind) {
  const { maxTokens = 256, seed = 0, stop = [], text = true, signal, ...rest } = options;
  const given = Object.fromEntries(Object.entries(rest).filter(([, value]) => value !== undefined));
  if (!(maxTokens === Infinity || Number.isInteger(maxTokens)) || maxTokens < 1) {
    throw new XLExportError(`maxTokens is ${shown(maxTokens)}; expected at least 1, or Infinity.`);
  }
  if (!Number.isSafeInteger(seed) || seed < 0)
    throw new XLExportError(`seed is ${shown(seed)}; expected an integer, 0 or more.`);
  const stops = typeof stop === "string" ? [stop] : [...stop];
  if (stops.some((each) => typeof each !== "string" || !(kind === "ids" ? each.trim() : each))) {
    throw new XLExportError("a stop string is empty; give at least one character, or no stop string.");
  }
  if (stops.length && !text) {
    throw new XLExportError(
      "stop strings are searched in the text, which was not asked for; leave one of them out.",
    );
  }
  return { maxTokens, seed, stops, text, sampler: new Sampler({ ...defaults, ...given }), signal };
}

/**
 * Yields a Piece for each token. However it ends, the memory has then seen the prompt and all tokens that
 * were yielded.
 * @param {import("./stepper.js").Stepper} stepper @param {import("../index.js").Vocabulary} vocabulary
 * @param {number[]} prompt @param {Memory} memory of one stream
 * @param {ReturnType<typeof checkedOptions> & {goesOn: boolean}} options goesOn: whether a later call
 * continues this text
 * @returns {AsyncGenerator<Piece, void, void>}
 */
export async function* pieces(
  stepper,
  vocabulary,
  prompt,
  memory,
  { maxTokens, seed, stops, text, sampler, signal, goesOn },
) {
  const decoder = text ? vocabulary.decoder() : wholeTokens(() => "");
  const end = vocabulary.special.end_of_document;
  // so that a word after them begins with its blank
  decoder.prime(prompt.length ? prompt : memory.tail);
  const grown = new GrowingText(decoder, stops, vocabulary.kind === "ids" ? " " : "", goesOn);
  const random = new Random(seed, 0);
  const history = new Map(prompt.map((token) => [token, 0]));
  const pause = pauses();
  /** @type {number | null} */
  let waiting = null; // a token that was yielded and not yet fed
  const feedWaiting = async () => {
    if (waiting === null) return;
    const token = waiting;
    waiting = null;
    await feed(stepper, [token], memory);
  };
  try {
    await feed(stepper, prompt, memory, { signal });
    for (let count = 1; count <= maxTokens; count++) {
      const began = performance.now();
      await feedWaiting();
      const logits = /** @type {Float32Array} */ (memory.last);
      await pause();
      refuseStopped(signal);
      const token = sampler.draw(logits, history, random.next());
      history.set(token, (history.get(token) ?? 0) + 1);
      const added = token === end ? grown.finish() : grown.add(token, count === maxTokens);
      waiting = token;
      yield {
        row: 0,
        token,
        text: added,
        ended: grown.ended,
        nats: logSumExp(logits) - logits[token],
        position: memory.position,
        milliseconds: performance.now() - began,
      };
      if (grown.ended) return;
    }
  } finally {
    if (!stepper.closed) await feedWaiting();
  }
}
