/**
 * SHA-256, by the platform where it offers that, and by the code below in a page that was not loaded over
 * HTTPS, because `crypto.subtle` is absent there.
 */

/**
 * The SHA-256 of some bytes, in hexadecimal.
 * @param {Uint8Array} bytes
 * @returns {Promise<string>}
 */
export async function sha256(bytes) {
  const subtle = globalThis.crypto?.subtle;
  if (!subtle) return ownSha256(bytes);
  const digest = await subtle.digest("SHA-256", /** @type {Uint8Array<ArrayBuffer>} */ (bytes));
  return hexadecimal(new Uint8Array(digest));
}

/** The first 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4, 4.2.2). */
const ROUNDS = new Uint32Array(64);
/** The same of their square roots: the first state (FIPS 180-4, 5.3.3). */
const START = new Uint32Array(8);
fillConstants();

/**
 * The same in plain JavaScript, about ten times slower.
 * @param {Uint8Array} bytes
 */
export function ownSha256(bytes) {
  const state = START.slice();
  const words = new Uint32Array(64);
  const whole = bytes.length - (bytes.length % 64);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  for (let at = 0; at < whole; at += 64) absorb(state, words, view, at);
  // The end of the text, a bit of 1, zeros, and its length in bits fill one or two more blocks.
  const rest = bytes.length - whole;
  const end = new Uint8Array(rest < 56 ? 64 : 128);
  end.set(bytes.subarray(whole));
  end[rest] = 0x80;
  const tail = new DataView(end.buffer);
  tail.setUint32(end.length - 8, Math.floor(bytes.length / 0x20000000));
  tail.setUint32(end.length - 4, (bytes.length << 3) >>> 0);
  for (let at = 0; at < end.length; at += 64) absorb(state, words, tail, at);
  const digest = new DataView(new ArrayBuffer(32));
  state.forEach((word, i) => digest.setUint32(4 * i, word));
  return hexadecimal(new Uint8Array(digest.buffer));
}

/** @param {Uint32Array} state @param {Uint32Array} w @param {DataView} view @param {number} at */
function absorb(state, w, view, at) {
  for (let i = 0; i < 16; i++) w[i] = view.getUint32(at + 4 * i);
  for (let i = 16; i < 64; i++) {
    const x = w[i - 15];
    const y = w[i - 2];
    const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
    const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  let [a, b, c, d, e, f, g, h] = state;
  for (let i = 0; i < 64; i++) {
    const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
    const first = (h + s1 + ((e & f) ^ (~e & g)) + ROUNDS[i] + w[i]) | 0;
    const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
    const second = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
    [h, g, f, e, d, c, b, a] = [g, f, e, (d + first) | 0, c, b, a, (first + second) | 0];
  }
  [a, b, c, d, e, f, g, h].forEach((word, i) => (state[i] += word));
}

function fillConstants() {
  const fraction = (/** @type {number} */ x) => Math.floor((x - Math.floor(x)) * 0x100000000);
  let found = 0;
  for (let n = 2; found < 64; n++) {
    let prime = true;
    for (let divisor = 2; divisor * divisor <= n; divisor++) prime &&= n % divisor !== 0;
    if (!prime) continue;
    if (found < 8) START[found] = fraction(Math.sqrt(n));
    ROUNDS[found++] = fraction(Math.cbrt(n));
  }
}

/** @param {Uint8Array} bytes */
function hexadecimal(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
