/**
 * The element types of tensors. A new type is a row here; a type of memory is also a row of CONVERSIONS in
 * conversion.js.
 *
 * - array: holds the numbers; float16 as its bits.
 * - onnx: its number in ONNX.
 * - stored: its name in safetensors files; null if our files have no such tensors.
 * - exponent: the bits that are all set in a number that is not finite; 0 if all numbers are finite.
 * - scaled: whether each vector of a memory has a scale, in a tensor of its own.
 */
export const TYPES = {
  float32: { array: Float32Array, onnx: 1, stored: "F32", exponent: 0x7f800000, scaled: false },
  float16: { array: Uint16Array, onnx: 10, stored: "F16", exponent: 0x7c00, scaled: false },
  int8: { array: Int8Array, onnx: 3, stored: "I8", exponent: 0, scaled: true },
  int32: { array: Int32Array, onnx: 6, stored: null, exponent: 0, scaled: false },
  int64: { array: BigInt64Array, onnx: 7, stored: "I64", exponent: 0, scaled: false },
};

/** The bytes of a tensor. @param {keyof typeof TYPES} dtype @param {number[]} shape */
export function numBytes(dtype, shape) {
  return shape.reduce((a, b) => a * b, TYPES[dtype].array.BYTES_PER_ELEMENT);
}

/** Whether all numbers of a tensor are finite. @param {Uint8Array} bytes @param {keyof typeof TYPES} dtype */
export function areFinite(bytes, dtype) {
  const { array, exponent } = TYPES[dtype];
  if (!exponent) return true;
  const { buffer, byteOffset, length } = bytes;
  const numbers =
    array.BYTES_PER_ELEMENT === 2
      ? new Uint16Array(buffer, byteOffset, length / 2)
      : new Uint32Array(buffer, byteOffset, length / 4);
  return numbers.every((bits) => (bits & exponent) !== exponent);
}
