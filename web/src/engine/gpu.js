/**
 * Runs a session over memory that stays in buffers of the GPU. The graph is one that was exported with
 * `--target web`; every tensor has two buffers, which change places after each step.
 */
import { numBytes } from "../element-types.js";
import { XLExportError, firstLine } from "../errors.js";
import { stateShape } from "../spec.js";
import { typeOf } from "./session.js";

/** @typedef {import("./session.js").Step} Step */
/** @typedef {{sets: any[][], turn: number, batch: number}} GpuState of some streams */

/** `GPUBufferUsage` of the standard: STORAGE, COPY_SRC and COPY_DST; MAP_READ and COPY_DST. */
const [MEMORY_USAGE, READ_USAGE] = [0x80 | 0x04 | 0x08, 0x01 | 0x08];
const MAP_READ = 1;

/** Why this place has no WebGPU; null if it has an adapter. @returns {Promise<string | null>} */
export async function missingGpu() {
  const gpu = /** @type {any} */ (globalThis.navigator)?.gpu;
  if (!gpu) return "this browser has no WebGPU";
  try {
    return (await gpu.requestAdapter()) ? null : "WebGPU found no adapter";
  } catch (error) {
    return `WebGPU failed: ${firstLine(error)}`;
  }
}

/** The options of a session whose memory stays on the GPU. @param {import("../../index.js").Spec} spec */
export function gpuOptions(spec) {
  const kept = spec.state.map(({ present }) => [present, "gpu-buffer"]);
  return { executionProviders: ["webgpu"], preferredOutputLocation: Object.fromEntries(kept) };
}

export class GpuEngine {
  /** @param {any} ort @param {any} session @param {any} device @param {import("../../index.js").Spec} spec */
  constructor(ort, session, device, spec) {
    this.ort = ort;
    this.session = session;
    this.device = device;
    this.spec = spec;
    this.memory = "GPU buffers";
    /**
     * @type {string | null} Why the GPU computes no longer. Its calls raise no error then; they do nothing.
     */
    this.lost = null;
    device.lost.then((/** @type {{message: string, reason: string}} */ { message, reason }) => {
      this.lost = message || reason;
    });
  }

  /** @param {number} batch @returns {Promise<GpuState>} */
  async create(batch) {
    const tensors = this.spec.state.map(({ dtype, shape }) => {
      const dims = stateShape({ shape }, batch);
      return { dtype, dims, bytes: numBytes(dtype, dims) };
    });
    const sizes = tensors.map(({ bytes }) => bytes);
    const buffers = await this.#buffers([...sizes, ...sizes], MEMORY_USAGE);
    const set = (/** @type {any[]} */ own) =>
      tensors.map(({ dtype, dims, bytes }, i) => {
        const tensor = this.ort.Tensor.fromGpuBuffer(own[i], { dataType: dtype, dims });
        return { buffer: own[i], bytes, tensor };
      });
    return {
      sets: [set(buffers.slice(0, sizes.length)), set(buffers.slice(sizes.length))],
      turn: 0,
      batch,
    };
  }

  /** @param {GpuState} state */
  release(state) {
    for (const set of state.sets) for (const { buffer } of set) buffer.destroy();
    state.sets = [];
  }

  /** @param {GpuState} state @returns {Promise<Uint8Array[]>} */
  async read(state) {
    return Promise.all(state.sets[state.turn].map((slot) => this.#download(slot)));
  }

  /** @param {GpuState} state @param {Uint8Array[]} tensors */
  async write(state, tensors) {
    this.#refuseLost();
    state.sets[state.turn].forEach(({ buffer, bytes }, i) => {
      const whole = new Uint8Array(padded(bytes));
      whole.set(tensors[i]);
      this.device.queue.writeBuffer(buffer, 0, whole);
    });
  }

  /** @param {GpuState} state */
  async copy(state) {
    const copy = await this.create(state.batch);
    const commands = this.device.createCommandEncoder();
    state.sets[state.turn].forEach(({ buffer, bytes }, i) => {
      commands.copyBufferToBuffer(buffer, 0, copy.sets[0][i].buffer, 0, padded(bytes));
    });
    this.device.queue.submit([commands.finish()]);
    return copy;
  }

  /** @param {Step} step @param {GpuState} state */
  async run({ inputs, outputs }, state) {
    this.#refuseLost();
    const { Tensor } = this.ort;
    const next = 1 - state.turn;
    /** @type {Record<string, any>} */
    const feeds = {};
    for (const [name, { data, shape }] of Object.entries(inputs))
      feeds[name] = new Tensor(typeOf(data), data, shape);
    /** @type {Record<string, any>} */
    const fetches = {};
    for (const name of Object.keys(outputs)) fetches[name] = null;
    this.spec.state.forEach(({ name, present }, i) => {
      feeds[name] = state.sets[state.turn][i].tensor;
      fetches[present] = state.sets[next][i].tensor;
    });
    let answers;
    try {
      answers = await this.session.run(feeds, fetches, { logSeverityLevel: 3 });
    } catch (error) {
      this.#refuseLost();
      throw new XLExportError(
        `ONNX Runtime could not run the step on the GPU (${firstLine(error)}); open with device wasm.`,
        { cause: error },
      );
    }
    this.#refuseLost(); // before the memory is told to have seen the tokens
    state.turn = next;
    return Object.fromEntries(Object.keys(outputs).map((name) => [name, answers[name].data]));
  }

  async close() {
    await this.session.release();
  }

  /** @param {{buffer: any, bytes: number}} slot */
  async #download({ buffer, bytes }) {
    const [staging] = await this.#buffers([bytes], READ_USAGE);
    const commands = this.device.createCommandEncoder();
    commands.copyBufferToBuffer(buffer, 0, staging, 0, padded(bytes));
    this.device.queue.submit([commands.finish()]);
    await staging.mapAsync(MAP_READ);
    const copy = new Uint8Array(staging.getMappedRange().slice(0, bytes));
    staging.destroy();
    return copy;
  }

  /**
   * New buffers, which hold zeros. WebGPU makes one that does not fit in silence, and computes nothing with
   * it: so sizes are compared with the limits first, and its errors are asked for.
   * @param {number[]} sizes in bytes @param {number} usage
   */
  async #buffers(sizes, usage) {
    this.#refuseLost();
    const { maxBufferSize, maxStorageBufferBindingSize } = this.device.limits;
    const most = Math.min(maxBufferSize, maxStorageBufferBindingSize);
    const largest = Math.max(0, ...sizes.map(padded));
    if (largest > most) {
      throw new XLExportError(
        `a memory tensor has ${largest} bytes, and this GPU takes at most ${most}; use fewer streams, or ` +
          "open with device wasm.",
      );
    }
    for (const kind of ["validation", "out-of-memory"]) this.device.pushErrorScope(kind);
    const buffers = sizes.map((bytes) => this.device.createBuffer({ size: padded(bytes), usage }));
    const errors = await Promise.all([this.device.popErrorScope(), this.device.popErrorScope()]);
    const error = errors.find(Boolean);
    if (error) {
      for (const buffer of buffers) buffer.destroy();
      const all = sizes.reduce((sum, bytes) => sum + padded(bytes), 0);
      throw new XLExportError(
        `the GPU has no ${all} bytes for the memory (${firstLine(error.message)}); use fewer streams, ` +
          "dispose of some, or open with device wasm.",
      );
    }
    this.#refuseLost();
    return buffers;
  }

  #refuseLost() {
    if (this.lost === null) return;
    throw new XLExportError(
      `the GPU was lost (${firstLine(this.lost)}); open the model again, or with device wasm.`,
    );
  }
}

/** The size of a buffer for `bytes` bytes. @param {number} bytes */
function padded(bytes) {
  return Math.max(16, Math.ceil(bytes / 16) * 16);
}
