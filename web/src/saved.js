/**
 * Saved streams: the file that Python's `save_memory` writes and `load_memory` reads
 * (docs/reference/saved-streams.md).
 */
import { XLExportError } from "./errors.js";
import { readTensors, writeTensors } from "./files/safetensors.js";
import { newMemory } from "./memory.js";
import { TYPES, isScale, stateShape } from "./spec.js";

const FORMAT = "xl-export stream 1";
/** With a larger scale, its bytes would not be finite numbers. */
const MOST_SCALE = (2 - 2 ** -23) * 2 ** 120;
const MOST_POSITION = 1n << 62n;
const WHERE = "the saved stream";

/**
 * @typedef {import("./engine/session.js").Engine} Engine
 * @typedef {import("./memory.js").Memory} Memory
 * @typedef {import("../index.js").Spec} Spec
 * @typedef {import("./files/safetensors.js").StoredArray} StoredArray
 */

/**
 * The file of some streams.
 * @param {Memory} memory @param {Spec} spec @returns {Promise<Uint8Array>}
 */
export async function saveMemory(memory, spec) {
  return memory.inUse(async () => {
    const positions = new Uint8Array(memory.positions.slice().buffer);
    /** @type {Map<string, StoredArray>} */
    const arrays = new Map([["positions", { dtype: "I64", shape: [memory.batch], data: positions }]]);
    const tensors = await memory.engine.read(memory.state);
    spec.state.forEach((state, i) => {
      const bad = clearUnfinite(tensors[i], state.dtype, memory.positions);
      if (bad >= 0) {
        throw new XLExportError(
          `row ${bad} of the memory holds values that are not finite; restart it before saving.`,
        );
      }
      arrays.set(state.name, {
        dtype: TYPES[state.dtype].stored,
        shape: stateShape(state, memory.batch),
        data: tensors[i],
      });
    });
    return writeTensors({
      arrays,
      metadata: { format: FORMAT, owner: memory.owner, furthest: String(memory.furthest) },
    });
  });
}

/**
 * The memory in a saved file, ready to go on.
 * @param {Uint8Array} bytes @param {Engine} engine @param {Spec} spec @param {string} identity
 * @returns {Promise<Memory>}
 */
export async function loadMemory(bytes, engine, spec, identity) {
  const { arrays, owner, furthest } = await fromTensors(bytes);
  const damaged = (/** @type {string} */ why) =>
    new XLExportError(`${WHERE} is damaged: ${why}; start a new one.`);
  if (owner !== identity) {
    throw new XLExportError(
      `${WHERE} belongs to artefact ${owner.slice(0, 12)}, and this one is ${identity.slice(0, 12)}; open ` +
        "the artefact that the stream was started on, or start a new stream.",
    );
  }
  const positions = arrays.get("positions");
  if (positions?.dtype !== "I64" || positions.shape.length !== 1 || !positions.shape[0]) {
    throw damaged("its positions do not fit");
  }
  const found = new BigInt64Array(positions.data.buffer, positions.data.byteOffset, positions.shape[0]);
  if (found.some((position) => position > MOST_POSITION || position < -MOST_POSITION)) {
    throw damaged("its positions are too large");
  }
  if (arrays.size !== spec.state.length + 1) throw damaged("its arrays are not those of this model");
  const tensors = spec.state.map((state) => {
    const array = arrays.get(state.name);
    const shape = stateShape(state, found.length).join();
    if (array?.dtype !== TYPES[state.dtype].stored || array.shape.join() !== shape)
      throw damaged(`${state.name} does not fit`);
    if (!finite(array.data, state.dtype)) throw damaged("it holds values that are not finite");
    if (isScale(spec, state) && !floats(array.data).every((x) => x >= 0 && x <= MOST_SCALE))
      throw damaged("it holds scales that no key or value has");
    return array.data;
  });
  const memory = await newMemory(engine, identity, found.length);
  await engine.write(memory.state, tensors);
  memory.positions.set(found);
  // How far it came before it was taken back: as far as can be, where the file does not tell.
  const most = found[0] + BigInt(spec.rule.segment);
  const told = /^\d{1,19}$/.test(furthest ?? "") ? BigInt(/** @type {string} */ (furthest)) : most;
  memory.furthest = told < found[0] || told > most ? most : told;
  return memory;
}

/** @param {Uint8Array} bytes */
async function fromTensors(bytes) {
  const { arrays, metadata } = await readTensors(bytes, WHERE);
  if (metadata.format !== FORMAT || metadata.owner === undefined) throw noStream();
  return { arrays, owner: metadata.owner, furthest: metadata.furthest };
}

function noStream() {
  return new XLExportError(
    `${WHERE} holds no memory; expected a file that saveMemory or Python's save_memory wrote.`,
  );
}

/** @param {Uint8Array} bytes */
function floats(bytes) {
  return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
}

/** @param {Uint8Array} bytes @param {import("../index.js").MemoryType} dtype */
function finite(bytes, dtype) {
  if (dtype === "int8") return true;
  if (dtype === "float16") {
    return new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2).every(
      (x) => (x & 0x7c00) !== 0x7c00,
    );
  }
  return floats(bytes).every(Number.isFinite);
}

/**
 * Sets rows that start again to zero where they hold what is not finite. The answer is a row that has begun
 * and holds such values; -1 for none.
 * @param {Uint8Array} bytes @param {import("../index.js").MemoryType} dtype @param {BigInt64Array} positions
 */
function clearUnfinite(bytes, dtype, positions) {
  const stride = bytes.length / positions.length;
  for (let row = 0; row < positions.length; row++) {
    const part = bytes.subarray(row * stride, (row + 1) * stride);
    if (finite(part, dtype)) continue;
    if (positions[row] > 0n) return row;
    part.fill(0);
  }
  return -1;
}
