/** Saved streams: the `.npz` file that Python's `save_memory` writes and `load_memory` reads. */
import { XLExportError } from "./errors.js";
import { readNpz, textOf, writeNpz } from "./files/npz.js";
import { Memory, newMemory } from "./memory.js";
import { stateShape } from "./spec.js";

const DTYPES = { float32: "<f4", float16: "<f2" };
const MOST_POSITION = 1n << 62n;

/** @typedef {import("./engine/session.js").Engine} Engine @typedef {import("../index.js").Spec} Spec */

/**
 * The file of some streams.
 * @param {Memory} memory @param {Spec} spec @returns {Promise<Uint8Array>}
 */
export async function saveMemory(memory, spec) {
  return memory.inUse(async () => {
    const points = Uint32Array.from(memory.owner, (character) => Number(character.codePointAt(0)));
    const positions = new Uint8Array(memory.positions.slice().buffer);
    /** @type {Map<string, import("./files/npz.js").NpyArray>} */
    const arrays = new Map([
      ["owner", { dtype: `<U${points.length}`, shape: [], data: new Uint8Array(points.buffer) }],
      ["positions", { dtype: "<i8", shape: [memory.batch], data: positions }],
    ]);
    const tensors = await memory.engine.read(memory.state);
    spec.state.forEach((state, i) => {
      const bad = clearUnfinite(tensors[i], state.dtype, memory.positions);
      if (bad >= 0) {
        throw new XLExportError(
          `row ${bad} of the memory holds values that are not finite; restart it before saving.`,
        );
      }
      arrays.set(`tensor/${state.past}`, { dtype: DTYPES[state.dtype], shape: stateShape(state, memory.batch), data: tensors[i] });
    });
    return writeNpz(arrays);
  });
}

/**
 * The memory in a saved file, ready to go on.
 * @param {Uint8Array} bytes @param {Engine} engine @param {Spec} spec @param {string} identity
 * @returns {Promise<Memory>}
 */
export async function loadMemory(bytes, engine, spec, identity) {
  const where = "the saved stream";
  const arrays = await readNpz(bytes, where);
  const damaged = (/** @type {string} */ why) => new XLExportError(`${where} is damaged: ${why}; start a new one.`);
  const [owner, positions] = [arrays.get("owner"), arrays.get("positions")];
  if (!owner || !positions) throw new XLExportError(`${where} holds no stream memory; expected a file written by saveMemory or Python's save_memory.`);
  let name;
  try {
    name = textOf(owner);
  } catch {
    throw damaged("its owner is no text");
  }
  if (name !== identity) {
    throw new XLExportError(
      `${where} belongs to artefact ${name.slice(0, 12)}, and this one is ${identity.slice(0, 12)}; open the artefact ` +
        "that the stream was started on, or start a new stream.",
    );
  }
  if (positions.dtype !== "<i8" || positions.shape.length !== 1 || !positions.shape[0]) throw damaged("its positions do not fit");
  const found = new BigInt64Array(positions.data.buffer, positions.data.byteOffset, positions.shape[0]);
  if (found.some((position) => position > MOST_POSITION || position < -MOST_POSITION)) throw damaged("its positions are too large");
  if (arrays.size !== spec.state.length + 2) throw damaged("its arrays are not those of this model");
  const tensors = spec.state.map((state) => {
    const array = arrays.get(`tensor/${state.past}`);
    const shape = stateShape(state, found.length).join();
    if (!array || array.dtype !== DTYPES[state.dtype] || array.shape.join() !== shape) throw damaged(`${state.past} does not fit`);
    if (!finite(array.data, state.dtype)) throw damaged("it holds values that are not finite");
    return array.data;
  });
  const memory = newMemory(engine, identity, found.length);
  await engine.write(memory.state, tensors);
  memory.positions.set(found);
  return memory;
}

/** @param {Uint8Array} bytes @param {"float32" | "float16"} dtype */
function finite(bytes, dtype) {
  if (dtype === "float16") {
    return new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2).every((x) => (x & 0x7c00) !== 0x7c00);
  }
  return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4).every(Number.isFinite);
}

/**
 * Sets rows that start again to zero where they hold what is not finite. The answer is a row that has begun and
 * holds such values; -1 for none.
 * @param {Uint8Array} bytes @param {"float32" | "float16"} dtype @param {BigInt64Array} positions
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
