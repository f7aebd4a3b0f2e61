/**
 * Runs a session over memory that stays in WebAssembly's heap, so that no step copies it.
 *
 * Every tensor is one buffer of the heap with one OrtValue over it, made once. The ring is written in place:
 * one OrtValue is both past and present. The other forms have two sets of buffers, which change places after
 * each step. These functions are not public; `self-check.js` proves at the start that they compute what the
 * public ones do.
 */
import { TYPES, numBytes } from "../element-types.js";
import { XLExportError, firstLine } from "../errors.js";
import { signature, stateShape, writesInPlace } from "../spec.js";
import { typeOf } from "./session.js";

/**
 * @typedef {{
 *   HEAPU8: Uint8Array, PTR_SIZE: number,
 *   _malloc(bytes: number): number, _free(at: number): void,
 *   _OrtCreateTensor(type: number, at: number, bytes: number, dims: number, rank: number,
 *     where: number): number,
 *   _OrtReleaseTensor(tensor: number): number,
 *   _OrtCreateRunOptions(severity: number, verbosity: number, terminate: boolean, tag: number): number,
 *   _OrtReleaseRunOptions(options: number): void,
 *   _OrtRun(session: number, inputNames: number, inputs: number, inputCount: number, outputNames: number,
 *     outputCount: number, outputs: number, options: number): number | Promise<number>,
 *   _OrtGetLastError(code: number, message: number): void,
 *   stackSave(): number, stackAlloc(bytes: number): number, stackRestore(at: number): void,
 *   setValue(at: number, value: number, type: string): void, getValue(at: number, type: string): number,
 *   UTF8ToString(at: number): string, stringToUTF8(text: string, at: number, bytes: number): void,
 *   lengthBytesUTF8(text: string): number,
 * }} HeapModule of Emscripten, as onnxruntime-web 1.30.0 has it
 * @typedef {{at: number, bytes: number, tensor: number}} Slot a buffer of the heap, and the OrtValue over it
 * @typedef {{sets: Slot[][], turn: number, batch: number}} HeapState of some streams
 * @typedef {import("./session.js").Step} Step
 * @typedef {import("./session.js").Found} Found
 */

const CPU = 1;
const MAX_PLANS = 4; // sets of buffers for steps of one shape, the latest ones

export class HeapEngine {
  /**
   * @param {HeapModule} module
   * @param {any} session @param {import("../../index.js").Spec} spec
   */
  constructor(module, session, spec) {
    if (module.PTR_SIZE !== 4) throw new Error("its pointers do not have 4 bytes");
    this.module = module;
    this.session = session;
    this.handle = session.handler?.sessionId;
    if (!Number.isInteger(this.handle)) throw new Error("its session has no handle");
    this.spec = spec;
    this.memory = "in place";
    /** @type {number[]} Names and lists of pointers, which `free` frees. */
    this.reserved = [];
    const { inputs, outputs } = signature(spec);
    this.inputs = [...inputs, ...spec.state].map(({ name }) => name);
    this.outputs = [...outputs.map(({ name }) => name), ...spec.state.map(({ present }) => present)];
    this.inputNames = this.#pointers(this.inputs.map((name) => this.#text(name)));
    this.outputNames = this.#pointers(this.outputs.map((name) => this.#text(name)));
    this.inputValues = this.#pointers(this.inputs.map(() => 0));
    this.outputValues = this.#pointers(this.outputs.map(() => 0));
    this.options = module._OrtCreateRunOptions(3, 0, false, 0);
    this.given = inputs.map(({ name }) => name);
    this.returned = outputs.map(({ name }) => name);
    /** @type {Map<string, {slots: Slot[], answers: Slot[]}>} */
    this.plans = new Map();
  }

  /** @param {number} batch @returns {HeapState} */
  create(batch) {
    const sets = writesInPlace(this.spec) ? 1 : 2;
    /** @type {Slot[][]} */
    const made = [];
    try {
      for (let n = 0; n < sets; n++) {
        /** @type {Slot[]} */
        const set = [];
        made.push(set);
        for (const state of this.spec.state) set.push(this.#slot(state.dtype, stateShape(state, batch)));
      }
    } catch (error) {
      for (const set of made) for (const slot of set) this.#free(slot);
      throw error;
    }
    return { sets: made, turn: 0, batch };
  }

  /** Frees the buffers of some streams. @param {HeapState} state */
  release(state) {
    for (const set of state.sets) for (const slot of set) this.#free(slot);
    state.sets = [];
  }

  /**
   * The bytes of each memory tensor, as views of the heap that the next step changes.
   * @param {HeapState} state
   */
  views(state) {
    return state.sets[state.turn].map((slot) => this.module.HEAPU8.subarray(slot.at, slot.at + slot.bytes));
  }

  /** @param {HeapState} state @returns {Promise<Uint8Array[]>} */
  async read(state) {
    return this.views(state).map((view) => new Uint8Array(view));
  }

  /** @param {HeapState} state @param {Uint8Array[]} tensors */
  async write(state, tensors) {
    this.views(state).forEach((view, i) => view.set(tensors[i]));
  }

  /** @param {HeapState} state */
  async copy(state) {
    const copy = this.create(state.batch);
    const to = this.views(copy);
    this.views(state).forEach((view, i) => to[i].set(view));
    return copy;
  }

  /**
   * Computes one step. The answers are views that hold until the next step.
   * @param {Step} step @param {HeapState} state @returns {Found}
   */
  run(step, state) {
    const { module } = this;
    const plan = this.#plan(step);
    const past = state.sets[state.turn];
    const next = writesInPlace(this.spec) ? state.turn : 1 - state.turn;
    const present = state.sets[next];
    this.given.forEach((name, i) => {
      const { buffer, byteOffset, byteLength } = step.inputs[name].data;
      module.HEAPU8.set(new Uint8Array(buffer, byteOffset, byteLength), plan.slots[i].at);
    });
    [...plan.slots, ...past].forEach((slot, i) =>
      module.setValue(this.inputValues + 4 * i, slot.tensor, "*"),
    );
    const answers = [...plan.answers, ...present];
    answers.forEach((slot, i) => module.setValue(this.outputValues + 4 * i, slot.tensor, "*"));
    const { length: inputs } = this.inputs;
    const { length: outputs } = this.outputs;
    let code;
    try {
      code = module._OrtRun(
        this.handle,
        this.inputNames,
        this.inputValues,
        inputs,
        this.outputNames,
        outputs,
        this.outputValues,
        this.options,
      );
    } catch (error) {
      throw new XLExportError(`ONNX Runtime broke off the step (${firstLine(error)}); load the page again.`, {
        cause: error,
      });
    }
    if (typeof code !== "number") throw new Error("it runs in the background");
    if (code !== 0) this.#fail();
    answers.forEach((slot, i) => {
      const found = module.getValue(this.outputValues + 4 * i, "*");
      if (found !== slot.tensor) throw new Error("it answered in other buffers");
    });
    state.turn = next;
    const found = plan.answers.map(({ at, bytes }, i) => {
      const { buffer } = module.HEAPU8;
      const name = this.returned[i];
      const { array } = /** @type {any} */ (TYPES[step.outputs[name].dtype]);
      return [name, new array(buffer, at, bytes / array.BYTES_PER_ELEMENT)];
    });
    return Object.fromEntries(found);
  }

  /** Frees what the engine holds, and ends the session. */
  async close() {
    this.free();
    await this.session.release();
  }

  /** Frees what the engine holds, and leaves the session; the streams are freed by `release`. */
  free() {
    for (const plan of this.plans.values())
      for (const slot of [...plan.slots, ...plan.answers]) this.#free(slot);
    this.plans.clear();
    for (const at of this.reserved.splice(0)) this.module._free(at);
    this.module._OrtReleaseRunOptions(this.options);
  }

  /** The buffers for steps of one shape. @param {Step} step */
  #plan({ inputs, outputs }) {
    const key = this.given.map((name) => inputs[name].shape).join(" ");
    let plan = this.plans.get(key);
    if (plan) return plan;
    if (this.plans.size >= MAX_PLANS) {
      const [oldest, old] = /** @type {[string, {slots: Slot[], answers: Slot[]}]} */ (
        this.plans.entries().next().value
      );
      this.plans.delete(oldest);
      for (const slot of [...old.slots, ...old.answers]) this.#free(slot);
    }
    plan = {
      slots: this.given.map((name) => this.#slot(typeOf(inputs[name].data), inputs[name].shape)),
      answers: this.returned.map((name) => this.#slot(outputs[name].dtype, outputs[name].shape)),
    };
    this.plans.set(key, plan);
    return plan;
  }

  /** @param {keyof typeof TYPES} type @param {number[]} shape @returns {Slot} */
  #slot(type, shape) {
    const { module } = this;
    const bytes = numBytes(type, shape);
    const at = this.#reserve(bytes);
    module.HEAPU8.fill(0, at, at + bytes);
    const stack = module.stackSave();
    const dims = module.stackAlloc(4 * Math.max(1, shape.length));
    shape.forEach((size, i) => module.setValue(dims + 4 * i, size, "i32"));
    const tensor = module._OrtCreateTensor(TYPES[type].onnx, at, bytes, dims, shape.length, CPU);
    module.stackRestore(stack);
    if (tensor === 0) {
      module._free(at);
      this.#fail();
    }
    return { at, bytes, tensor };
  }

  /** @param {number} bytes */
  #reserve(bytes) {
    const at = this.module._malloc(Math.max(bytes, 1));
    if (at === 0)
      throw new XLExportError(
        `WebAssembly's heap has no ${bytes} bytes left; use fewer streams, or dispose of some.`,
      );
    return at;
  }

  /** @param {Slot} slot */
  #free({ at, tensor }) {
    this.module._OrtReleaseTensor(tensor);
    this.module._free(at);
  }

  /** @param {string} text */
  #text(text) {
    const bytes = this.module.lengthBytesUTF8(text) + 1;
    const at = this.#reserve(bytes);
    this.reserved.push(at);
    this.module.stringToUTF8(text, at, bytes);
    return at;
  }

  /** @param {number[]} values */
  #pointers(values) {
    const at = this.#reserve(4 * values.length);
    this.reserved.push(at);
    values.forEach((value, i) => this.module.setValue(at + 4 * i, value, "*"));
    return at;
  }

  /** @returns {never} */
  #fail() {
    const { module } = this;
    const stack = module.stackSave();
    const at = module.stackAlloc(8);
    module._OrtGetLastError(at, at + 4);
    const message = module.getValue(at + 4, "*");
    const reason = message ? module.UTF8ToString(message) : "no reason was given";
    module.stackRestore(stack);
    throw new XLExportError(
      `ONNX Runtime could not run the step (${firstLine(reason)}); export the artefact again.`,
    );
  }
}
