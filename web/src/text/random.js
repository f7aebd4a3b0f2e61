/**
 * The random numbers that `numpy.random.default_rng([seed, row])` draws in Python: a PCG64 generator (O'Neill
 * 2014, XSL-RR 128/64) that is started by NumPy's SeedSequence. So one seed gives one text in both languages,
 * as long as no probability that a draw falls next to differs in its last digits.
 */

const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;
const MASK_128 = (1n << 128n) - 1n;
const MASK_64 = (1n << 64n) - 1n;

export class Random {
  /** @param {number} seed @param {number} row */
  constructor(seed, row) {
    const [a, b, c, d] = seedState([...words(seed), ...words(row)]);
    this.increment = ((((c << 64n) | d) << 1n) | 1n) & MASK_128;
    this.state = 0n;
    this.#step();
    this.state = (this.state + ((a << 64n) | b)) & MASK_128;
    this.#step();
  }

  /** A number from 0 up to 1, of 53 random bits. */
  next() {
    this.#step();
    const turn = this.state >> 122n;
    const mixed = ((this.state >> 64n) ^ this.state) & MASK_64;
    const output = ((mixed >> turn) | (mixed << ((64n - turn) & 63n))) & MASK_64;
    return Number(output >> 11n) / 2 ** 53;
  }

  #step() {
    this.state = (this.state * MULTIPLIER + this.increment) & MASK_128;
  }
}

/** The 32-bit words of an integer, the lowest first; one word for 0. @param {number} value */
function words(value) {
  const found = [];
  for (let rest = BigInt(value); found.length === 0 || rest > 0n; rest >>= 32n)
    found.push(Number(rest & 0xffffffffn));
  return found;
}

/**
 * Four 64-bit numbers from some entropy, as NumPy's SeedSequence mixes them.
 * @param {number[]} entropy
 */
function seedState(entropy) {
  let constant = 0x43b0d7e5;
  const hash = (/** @type {number} */ value) => {
    let x = (value ^ constant) >>> 0;
    constant = Math.imul(constant, 0x931e8875) >>> 0;
    x = Math.imul(x, constant) >>> 0;
    return (x ^ (x >>> 16)) >>> 0;
  };
  const mix = (/** @type {number} */ x, /** @type {number} */ y) => {
    const mixed = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) >>> 0;
    return (mixed ^ (mixed >>> 16)) >>> 0;
  };
  const pool = Array.from({ length: 4 }, (_, i) => hash(entropy[i] ?? 0));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  }
  for (const word of entropy.slice(4)) for (let to = 0; to < 4; to++) pool[to] = mix(pool[to], hash(word));
  let factor = 0x8b51f9dd;
  const output = Array.from({ length: 8 }, (_, i) => {
    let x = (pool[i % 4] ^ factor) >>> 0;
    factor = Math.imul(factor, 0x58f38ded) >>> 0;
    x = Math.imul(x, factor) >>> 0;
    return BigInt((x ^ (x >>> 16)) >>> 0);
  });
  return [0, 2, 4, 6].map((i) => output[i] | (output[i + 1] << 32n));
}
