/** Draws the next token from logits (docs/reference/step.md, "Sampling"). */
import { XLExportError, shown } from "../errors.js";

export class Sampler {
  /** @param {import("../../index.js").SamplingOptions} options */
  constructor({
    temperature = 1,
    topK = null,
    topP = 1,
    minP = 0,
    repetitionPenalty = 1,
    presencePenalty = 0,
    frequencyPenalty = 0,
  } = {}) {
    const whole = topK === null || Number.isSafeInteger(topK);
    require({ temperature }, temperature >= 0 && temperature <= 1e6, "0 to 1,000,000");
    const inside = whole && (topK ?? 1) >= 1;
    require({ topK }, inside, "a whole number, 1 to 9,007,199,254,740,991, or null for all");
    require({ topP }, topP > 0 && topP <= 1, "above 0 and at most 1");
    require({ minP }, minP >= 0 && minP <= 1, "0 to 1");
    require({ repetitionPenalty }, repetitionPenalty >= 0.01 && repetitionPenalty <= 100, "0.01 to 100");
    require({ presencePenalty }, Math.abs(presencePenalty) <= 2, "-2 to 2");
    require({ frequencyPenalty }, Math.abs(frequencyPenalty) <= 2, "-2 to 2");
    this.temperature = temperature;
    this.topK = topK;
    this.topP = topP;
    this.minP = minP;
    this.repetitionPenalty = repetitionPenalty;
    this.presencePenalty = presencePenalty;
    this.frequencyPenalty = frequencyPenalty;
  }

  /**
   * One token id.
   * @param {Float32Array} logits [V]
   * @param {Map<number, number>} history how often each token was generated; 0 for tokens of the prompt only
   * @param {number} uniform a random number of [0, 1)
   */
  draw(logits, history, uniform) {
    const scores = Float64Array.from(logits);
    for (const [token, count] of history) {
      const score = scores[token];
      scores[token] = score > 0 ? score / this.repetitionPenalty : score * this.repetitionPenalty;
      if (count) scores[token] -= this.presencePenalty + this.frequencyPenalty * count;
    }
    const highest = scores.reduce((a, b) => Math.max(a, b), -Infinity); // NaN where there is one
    if (!Number.isFinite(highest)) {
      throw new XLExportError(
        "the model's logits are not finite, so no token can be drawn; its weights are damaged or diverged.",
      );
    }
    if (this.temperature === 0) return scores.indexOf(highest);
    const weights = scores.map((score) => Math.exp((score - highest) / this.temperature));
    if (this.topK !== null && this.topK < scores.length) {
      const edge = scores.slice().sort()[scores.length - this.topK];
      for (let i = 0; i < weights.length; i++) if (scores[i] < edge) weights[i] = 0;
    }
    dropBelow(this.minP, weights); // the largest weight is 1
    if (this.topP < 1) {
      const sorted = weights.slice().sort().reverse();
      const sums = runningSums(sorted);
      const enough = this.topP * sums[sums.length - 1];
      dropBelow(sorted[sums.findIndex((sum) => sum >= enough)], weights);
    }
    const sums = runningSums(weights);
    const wanted = uniform * sums[sums.length - 1];
    return sums.findIndex((sum) => sum > wanted);
  }
}

/** @param {Record<string, unknown>} given one setting @param {boolean} inside @param {string} expected */
function require(given, inside, expected) {
  const [[name, value]] = Object.entries(given);
  if (!inside) throw new XLExportError(`${name} is ${shown(value)}; expected ${expected}.`);
}

/** @param {number} least @param {Float64Array} weights */
function dropBelow(least, weights) {
  for (let i = 0; i < weights.length; i++) if (weights[i] < least) weights[i] = 0;
}

/** @param {Float64Array} weights */
function runningSums(weights) {
  let sum = 0;
  return weights.map((weight) => (sum += weight));
}

/**
 * The log of the sum of exponentials of `count` logits from an offset on.
 * @param {Float32Array} logits @param {number} [from] @param {number} [count]
 */
export function logSumExp(logits, from = 0, count = logits.length - from) {
  let top = -Infinity;
  for (let i = from; i < from + count; i++) if (logits[i] > top) top = logits[i];
  let sum = 0;
  for (let i = from; i < from + count; i++) sum += Math.exp(logits[i] - top);
  return top + Math.log(sum);
}
