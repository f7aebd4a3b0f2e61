/** Memory tensors in another precision, for streams that continue in an artefact of another precision. */
import { XLExportError } from "./errors.js";

/** @typedef {import("../index.js").MemoryType} MemoryType */

/** @param {number} half the bits of a float16 */
function fromHalf(half) {
  const [exponent, mantissa] = [(half >> 10) & 31, half & 1023];
  const size = exponent ? (1024 + mantissa) * 2 ** (exponent - 25) : mantissa * 2 ** -24;
  return half & 0x8000 ? -size : size;
}

/** The nearest whole number, and the even one of two that are equally near. @param {number} x */
function toEven(x) {
  const near = Math.round(x);
  return near - x === 0.5 && near % 2 ? near - 1 : near;
}

/** The bits of the nearest float16. @param {number} x */
function toHalf(x) {
  const size = Math.abs(x);
  // 2^exponent <= size, except for numbers below the normal ones.
  let exponent = Math.max(size ? Math.floor(Math.log2(size)) : -14, -14);
  if (size < 2 ** exponent && exponent > -14) exponent -= 1; // the logarithm was rounded
  // In units of the last place; a sum that carries runs over into the exponent, as it should.
  const bits = (exponent + 14) * 1024 + toEven(size * 2 ** (10 - exponent));
  if (bits >= 31 * 1024) {
    throw new XLExportError(
      "the saved stream holds numbers beyond 65504, the largest in fp16; continue it in an artefact with " +
        "memory in fp32.",
    );
  }
  return bits | (x < 0 || Object.is(x, -0) ? 0x8000 : 0);
}

/**
 * The numbers of a memory tensor in another type, and the scales of its vectors if the type has them.
 * @param {{dtype: MemoryType, numbers: Uint8Array, scales?: Float32Array}} stored
 * @param {MemoryType} dtype @param {number} width numbers of a vector, which share a scale
 * @returns {{numbers: Uint8Array, scales?: Float32Array}}
 */
export function converted({ dtype: from, numbers, scales }, dtype, width) {
  if (from === dtype) return { numbers, scales };
  return CONVERSIONS[dtype].narrowed(CONVERSIONS[from].widened(numbers, width, scales), width);
}

/**
 * From each type to float32, and back.
 * @type {Record<MemoryType, {
 *   widened(numbers: Uint8Array, width: number, scales?: Float32Array): Float32Array,
 *   narrowed(floats: Float32Array, width: number): {numbers: Uint8Array, scales?: Float32Array},
 * }>}
 */
const CONVERSIONS = {
  float32: {
    widened: ({ buffer, byteOffset, length }) => new Float32Array(buffer, byteOffset, length / 4),
    narrowed: (floats) => ({ numbers: bytesOf(floats) }),
  },
  float16: {
    widened: ({ buffer, byteOffset, length }) =>
      Float32Array.from(new Uint16Array(buffer, byteOffset, length / 2), fromHalf),
    narrowed: (floats) => ({ numbers: bytesOf(Uint16Array.from(floats, toHalf)) }),
  },
  int8: {
    widened: ({ buffer, byteOffset, length }, width, scales) =>
      Float32Array.from(
        new Int8Array(buffer, byteOffset, length),
        (byte, at) => byte * /** @type {Float32Array} */ (scales)[Math.floor(at / width)],
      ),
    narrowed: inBytes,
  },
};

/**
 * The rule by which graphs write memory in int8: a scale is max |x| / 127.
 * @param {Float32Array} floats @param {number} width
 */
function inBytes(floats, width) {
  const bytes = new Int8Array(floats.length);
  const scales = new Float32Array(width ? floats.length / width : 0);
  for (let vector = 0; vector < scales.length; vector++) {
    const x = floats.subarray(vector * width, (vector + 1) * width);
    scales[vector] = x.reduce((most, each) => Math.max(most, Math.abs(each)), 0) / 127;
    const divisor = scales[vector] || 1;
    x.forEach((each, i) => {
      const rounded = toEven(Math.fround(each / divisor));
      bytes[vector * width + i] = Math.max(-127, Math.min(127, rounded));
    });
  }
  return { numbers: bytesOf(bytes), scales };
}

/** @param {Float32Array | Uint16Array | Int8Array} array */
function bytesOf(array) {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}
