/** Runs several graphs, each for so many tokens, over one memory. */
import { TYPES } from "../element-types.js";
import { graphsOf, isTimed, signature } from "../spec.js";
import { typeOf } from "./session.js";

/** @typedef {import("./session.js").Engine} Engine */
/** @typedef {import("./session.js").Step} Step */

/** A step runs the largest graph that fits, and again for the rest: 19 tokens are 16, 1, 1 and 1. */
export class PieceEngine {
  /** @param {any[]} engines of one kind, of each of the graphs @param {import("../../index.js").Spec} spec */
  constructor(engines, spec) {
    this.engines = engines;
    this.tokens = graphsOf(spec).map(({ tokens }) => tokens);
    const { inputs, outputs } = signature(spec);
    this.timed = new Set([...inputs, ...outputs].filter(isTimed).map(({ name }) => name));
    this.memory = engines[0].memory;
  }

  create = (/** @type {number} */ batch) => this.engines[0].create(batch);
  release = (/** @type {any} */ state) => this.engines[0].release(state);
  copy = (/** @type {any} */ state) => this.engines[0].copy(state);
  read = (/** @type {any} */ state) => this.engines[0].read(state);
  write = (/** @type {any} */ state, /** @type {Uint8Array[]} */ tensors) =>
    this.engines[0].write(state, tensors);

  /**
   * @param {Step} step @param {any} state @param {(tokens: number) => void} onPiece
   * @returns {Promise<import("./session.js").Found>}
   */
  async run({ inputs, outputs }, state, onPiece) {
    const [batch, tokens] = inputs.position_ids.shape;
    /** @type {import("./session.js").Found} */
    const whole = {};
    for (const [name, { dtype, shape }] of Object.entries(outputs))
      whole[name] = new TYPES[dtype].array(shape.reduce((a, b) => a * b, 1));
    for (let at = 0, count = 0; at < tokens; at += count) {
      const graph = this.tokens.findIndex((fits) => fits <= tokens - at);
      count = this.tokens[graph];
      const sized = (/** @type {string} */ name, /** @type {number[]} */ shape) =>
        this.timed.has(name) ? [batch, count, ...shape.slice(2)] : shape;
      const wanted = wantedIn(inputs.logit_rows, at, count, tokens);
      /** @type {Step} */
      const part = { inputs: {}, outputs: {} };
      for (const [name, { data, shape }] of Object.entries(inputs)) {
        const numbers = this.timed.has(name) ? tokensOf(data, batch, at, count, tokens) : data;
        part.inputs[name] = { data: numbers, shape: sized(name, shape) };
      }
      for (const [name, { dtype, shape }] of Object.entries(outputs))
        part.outputs[name] = { dtype, shape: sized(name, shape) };
      if (wanted) {
        part.inputs.logit_rows = { data: wanted.rows, shape: [wanted.rows.length] };
        part.outputs.logits.shape = [wanted.rows.length, outputs.logits.shape[1]];
      }
      const found = await this.engines[graph].run(part, state);
      onPiece(count);
      for (const [name, numbers] of Object.entries(found)) {
        if (wanted && name === "logits") {
          const size = outputs.logits.shape[1];
          wanted.places.forEach((to, i) =>
            whole.logits.set(numbers.subarray(i * size, (i + 1) * size), to * size),
          );
          continue;
        }
        const row = whole[name].length / batch;
        const offset = this.timed.has(name) ? (row / tokens) * at : 0;
        const size = numbers.length / batch;
        for (let b = 0; b < batch; b++)
          whole[name].set(numbers.subarray(b * size, (b + 1) * size), b * row + offset);
      }
    }
    return whole;
  }

  free() {
    for (const engine of this.engines) engine.free?.();
  }

  async close() {
    for (const engine of this.engines) await engine.close();
  }
}

/**
 * Of the positions b T + t whose logits are wanted, those in a piece: their positions there, and their places
 * among all. Null if the graph computes all logits.
 * @param {import("./session.js").Input | undefined} asked @param {number} at @param {number} count
 * @param {number} tokens
 */
function wantedIn(asked, at, count, tokens) {
  if (!asked) return null;
  const all = Array.from(/** @type {BigInt64Array} */ (asked.data), Number);
  const places = [...all.keys()].filter((i) => all[i] % tokens >= at && all[i] % tokens < at + count);
  const row = (/** @type {number} */ n) => Math.floor(n / tokens) * count + (n % tokens) - at;
  return { places, rows: BigInt64Array.from(places, (i) => BigInt(row(all[i]))) };
}

/**
 * The numbers of `count` tokens from token `at` on, of each row of `tokens`.
 * @param {import("./session.js").Numbers} data
 * @param {number} batch @param {number} at @param {number} count @param {number} tokens
 */
function tokensOf(data, batch, at, count, tokens) {
  const size = data.length / batch / tokens;
  const part = /** @type {any} */ (new TYPES[typeOf(data)].array(batch * count * size));
  for (let b = 0; b < batch; b++) {
    const first = (b * tokens + at) * size;
    part.set(data.subarray(first, first + count * size), b * count * size);
  }
  return part;
}
