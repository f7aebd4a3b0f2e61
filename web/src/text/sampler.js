/**
 * Draws the next token from logits: greedily, or with temperature, top-k and top-p, by the rules of Python.
 */
import { XLExportError, shown } from "../errors.js";

/** @typedef {import("./random.js").Random} Random */

export class Sampler {
  /** @param {{temperature?: number, topK?: number | null, topP?: number}} options */
  constructor({ temperature = 1, topK = null, topP = 1 } = {}) {
    if (!(temperature >= 0 && temperature <= 1e6)) {
      throw new XLExportError(
        `temperature is ${shown(temperature)}; expected 0 (greedy) or a positive number.`,
      );
    }
    if (topK !== null && !(Number.isInteger(topK) && topK >= 1)) {
      throw new XLExportError(`topK is ${shown(topK)}; expected at least 1, or null for all tokens.`);
    }
    if (!(topP > 0 && topP <= 1))
      throw new XLExportError(`topP is ${shown(topP)}; expected above 0 and at most 1.`);
    this.temperature = temperature;
    this.topK = topK;
    this.topP = topP;
  }

  /** One token id from logits [V]. @param {Float32Array} logits @param {Random} random */
  draw(logits, random) {
    const top = likeliest(logits);
    if (!Number.isFinite(logits[top])) {
      throw new XLExportError(
        "the model's logits are not finite, so no token can be drawn; its weights are damaged or diverged.",
      );
    }
    if (this.temperature === 0) return top;
    const scaled = new Float64Array(logits.length);
    for (let i = 0; i < scaled.length; i++) scaled[i] = (logits[i] - logits[top]) / this.temperature;
    const weights = keepTopK(scaled, this.topK).map(Math.exp);
    return pick(keepTopP(weights, this.topP), random.next());
  }
}

/**
 * The index of the largest value; the first of equals, and of a value that is not a number.
 * @param {Float32Array} logits
 */
export function likeliest(logits) {
  let best = 0;
  for (let i = 0; i < logits.length; i++) {
    if (Number.isNaN(logits[i])) return i;
    if (logits[i] > logits[best]) best = i;
  }
  return best;
}

/**
 * Logits in which all but the k largest are minus infinity. Of equals the smaller id is kept.
 * @param {Float64Array} logits @param {number | null} k
 */
function keepTopK(logits, k) {
  if (k === null || k >= logits.length) return logits;
  const border = logits.slice().sort()[logits.length - k];
  let equals = k;
  for (const value of logits) if (value > border) equals--;
  return logits.map((value) => (value > border || (value === border && equals-- > 0) ? value : -Infinity));
}

/**
 * Weights, zero outside the smallest set of tokens that together have the share p.
 * @param {Float64Array} weights @param {number} p
 */
function keepTopP(weights, p) {
  if (p >= 1) return weights;
  const order = [...weights.keys()]
    .filter((i) => weights[i] > 0)
    .sort((a, b) => weights[b] - weights[a] || a - b);
  const share = p * weights.reduce((a, b) => a + b, 0);
  const kept = new Float64Array(weights.length);
  let sum = 0;
  for (const i of order) {
    sum += weights[i];
    if (sum - weights[i] >= share) break;
    kept[i] = weights[i];
  }
  return kept;
}

/**
 * The index where the cumulative share of weights first exceeds a number from 0 to 1.
 * @param {Float64Array} weights @param {number} uniform
 */
function pick(weights, uniform) {
  const total = weights.reduce((a, b) => a + b, 0);
  const shares = new Float64Array(weights.length);
  let sum = 0;
  for (let i = 0; i < weights.length; i++) shares[i] = sum += weights[i] / total;
  const found = shares.findIndex((share) => share / sum > uniform);
  return found < 0 ? likeliest(Float32Array.from(weights)) : found;
}
