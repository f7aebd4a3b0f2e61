/** Log-probabilities from logits, without overflow. */

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

/** Log-probabilities (nats) of all tokens. @param {Float32Array} logits */
export function logSoftmax(logits) {
  const sum = logSumExp(logits);
  return logits.map((logit) => logit - sum);
}
