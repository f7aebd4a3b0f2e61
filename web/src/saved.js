/**
 * Saved streams: the file that Python's `save_memory` writes and `load_memory` reads
 * (docs/reference/saved-streams.md).
 */
import { converted } from "./conversion.js";
import { TYPES, areFinite } from "./element-types.js";
import { XLExportError, shown } from "./errors.js";
import { readTensors, writeTensors } from "./files/safetensors.js";
import { TABLES } from "./format-tables.js";
import { newMemory } from "./memory.js";
import { isScale, stateShape } from "./spec.js";

const FORMAT = "xl-export stream 1";
/** With a larger scale, its bytes would not be finite numbers. */
const MOST_SCALE = (2 - 2 ** -23) * 2 ** 120;
const MOST_POSITION = 1n << 62n;
const WHERE = "the saved stream";
const MEMORY_TYPES = /** @type {import("../index.js").MemoryType[]} */ (Object.values(TABLES.memory_types));

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
      metadata: {
        format: FORMAT,
        ...spec.memory_identity,
        artefact: memory.owner,
        ...(memory.adopted.some(Boolean) && { adopted: memory.adopted.join() }),
        furthest: String(memory.furthest),
      },
    });
  });
}

/**
 * The memory in a saved file, ready to go on.
 * @param {Uint8Array} bytes @param {Engine} engine @param {Spec} spec @param {string} identity
 * @param {boolean} adopt whether streams that other weights computed continue too
 * @returns {Promise<Memory>}
 */
export async function loadMemory(bytes, engine, spec, identity, adopt) {
  const { arrays, metadata } = await fromTensors(bytes);
  refuseOther(metadata, spec.memory_identity, adopt);
  const positions = arrays.get("positions");
  if (positions?.dtype !== "I64" || positions.shape.length !== 1 || !positions.shape[0]) {
    throw damaged("its positions do not fit");
  }
  const found = new BigInt64Array(positions.data.buffer, positions.data.byteOffset, positions.shape[0]);
  if (found.some((position) => position > MOST_POSITION || position < -MOST_POSITION)) {
    throw damaged("its positions are too large");
  }
  arrays.delete("positions");
  const tensors = [];
  for (const state of spec.state) {
    if (isScale(spec, state)) continue; // it follows its bytes
    const shape = stateShape(state, found.length);
    const { numbers, scales } = converted(take(arrays, state.name, shape), state.dtype, shape.at(-1) ?? 1);
    tensors.push(numbers);
    if (scales) tensors.push(new Uint8Array(scales.buffer, scales.byteOffset, scales.byteLength));
  }
  if (arrays.size) throw damaged("its arrays do not fit this model");
  const adopted = metadata.adopted?.split(",") ?? Array(found.length).fill("");
  if (adopted.length !== found.length || !adopted.every((row) => /^[0-9a-f ]*$/.test(row))) {
    throw damaged("`adopted` does not have the hashes of its streams");
  }
  const memory = await newMemory(engine, identity, found.length);
  await engine.write(memory.state, tensors);
  memory.positions.set(found);
  const before = metadata.weights === spec.memory_identity.weights ? "" : metadata.weights;
  memory.adopted = adopted.map((row) => `${row} ${before}`.trim());
  // How far it came before it was taken back: as far as can be, if the file does not tell.
  const most = found[0] + BigInt(spec.rule.segment);
  const told = /^\d{1,19}$/.test(metadata.furthest ?? "") ? BigInt(metadata.furthest) : most;
  memory.furthest = told < found[0] || told > most ? most : told;
  return memory;
}

/** @param {Uint8Array} bytes */
async function fromTensors(bytes) {
  const { arrays, metadata } = await readTensors(bytes, WHERE);
  const whole = metadata.layout !== undefined && metadata.weights !== undefined;
  if (metadata.format !== FORMAT || !whole) throw noStream();
  return { arrays, metadata };
}

/**
 * Raises XLExportError if a file's streams have another layout, or other weights that are not adopted.
 * @param {Record<string, string>} metadata @param {Spec["memory_identity"]} mine @param {boolean} adopt
 */
function refuseOther({ layout, weights }, mine, adopt) {
  if (layout !== mine.layout) {
    throw new XLExportError(
      `${WHERE} has another memory: its form, rule or vocabulary differs; open an artefact with the same ` +
        "ones, or start a new stream.",
    );
  }
  if (weights !== mine.weights && !adopt) {
    throw new XLExportError(
      `${WHERE} was computed by other weights (${shown(weights.slice(0, 12))}, and this model has ` +
        `${mine.weights.slice(0, 12)}); give { adopt: true } to continue it with this model, or open a ` +
        "model with those weights.",
    );
  }
}

/**
 * Takes a memory tensor, in any element type, with its scales out of the arrays of a file.
 * @param {Map<string, StoredArray>} arrays @param {string} name @param {number[]} shape
 */
function take(arrays, name, shape) {
  const array = arrays.get(name);
  const dtype = MEMORY_TYPES.find((type) => TYPES[type].stored === array?.dtype);
  if (!array || !dtype || array.shape.join() !== shape.join()) throw damaged(`${name} does not fit`);
  arrays.delete(name);
  if (!areFinite(array.data, dtype)) throw damaged("it holds values that are not finite");
  if (!TYPES[dtype].scaled) return { dtype, numbers: array.data };
  const stored = arrays.get(`${name}_scale`);
  if (stored?.dtype !== TYPES.float32.stored || stored.shape.join() !== [...shape.slice(0, -1), 1].join())
    throw damaged(`the scales of ${name} do not fit`);
  arrays.delete(`${name}_scale`);
  const { buffer, byteOffset, length } = stored.data;
  const scales = new Float32Array(buffer, byteOffset, length / 4);
  if (!areFinite(stored.data, "float32")) throw damaged("it holds values that are not finite");
  if (!scales.every((x) => x >= 0 && x <= MOST_SCALE))
    throw damaged("it holds scales that no key or value has");
  return { dtype, numbers: array.data, scales };
}

/** @param {string} why */
function damaged(why) {
  return new XLExportError(`${WHERE} is damaged: ${why}; start a new one.`);
}

function noStream() {
  return new XLExportError(
    `${WHERE} holds no memory; expected a file that saveMemory or Python's save_memory wrote.`,
  );
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
    if (areFinite(part, dtype)) continue;
    if (positions[row] > 0n) return row;
    part.fill(0);
  }
  return -1;
}
