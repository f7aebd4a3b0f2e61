/**
 * Runs a session over tensors of the public interface.
 *
 * In Node, ONNX Runtime writes into the tensors that it is given, so the memory stays in place. On the web it
 * does not, silently (microsoft/onnxruntime 25786): there every step copies the memory in and out.
 */
import { TYPES, numBytes } from "../element-types.js";
import { XLExportError, firstLine } from "../errors.js";
import { stateShape, writesInPlace } from "../spec.js";
import { typeOf } from "./session.js";

/** @typedef {import("./session.js").Step} Step */
/** @typedef {{sets: any[][], turn: number, batch: number}} TensorState of some streams */

export class TensorEngine {
  /**
   * @param {any} ort @param {any} session @param {import("../../index.js").Spec} spec
   * @param {{writes: boolean}} options `writes`: whether ONNX Runtime writes into given tensors
   */
  constructor(ort, session, spec, { writes }) {
    this.ort = ort;
    this.session = session;
    this.spec = spec;
    this.writes = writes;
    this.memory = writes ? "in place" : "copied";
  }

  /** @param {number} batch @returns {TensorState} */
  create(batch) {
    const sets = this.writes && !writesInPlace(this.spec) ? 2 : 1;
    const set = () =>
      this.spec.state.map((state) => {
        const shape = stateShape(state, batch);
        return new this.ort.Tensor(state.dtype, zeros(state.dtype, shape), shape);
      });
    return { sets: Array.from({ length: sets }, set), turn: 0, batch };
  }

  /** @param {TensorState} state */
  release(state) {
    state.sets = [];
  }

  /** @param {TensorState} state */
  views(state) {
    return state.sets[state.turn].map(
      ({ data }) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength),
    );
  }

  /** @param {TensorState} state @returns {Promise<Uint8Array[]>} */
  async read(state) {
    return this.views(state).map((view) => view.slice());
  }

  /** @param {TensorState} state @param {Uint8Array[]} tensors */
  async write(state, tensors) {
    this.views(state).forEach((view, i) => view.set(tensors[i]));
  }

  /** @param {TensorState} state */
  async copy(state) {
    const copy = this.create(state.batch);
    await this.write(copy, this.views(state));
    return copy;
  }

  /** @param {Step} step @param {TensorState} state */
  async run({ inputs, outputs }, state) {
    const { Tensor } = this.ort;
    /** @type {Record<string, any>} */
    const feeds = {};
    for (const [name, { data, shape }] of Object.entries(inputs))
      feeds[name] = new Tensor(typeOf(data), data, shape);
    const past = state.sets[state.turn];
    const next = this.writes && !writesInPlace(this.spec) ? 1 - state.turn : state.turn;
    this.spec.state.forEach(({ name }, i) => (feeds[name] = past[i]));
    const options = { logSeverityLevel: 3 };
    /** @type {Record<string, any>} */
    let answers;
    try {
      if (this.writes) {
        /** @type {Record<string, any>} */
        const fetches = {};
        for (const [name, { dtype, shape }] of Object.entries(outputs))
          fetches[name] = new Tensor(dtype, zeros(dtype, shape), shape);
        this.spec.state.forEach(({ present }, i) => (fetches[present] = state.sets[next][i]));
        await this.session.run(feeds, fetches, options);
        answers = fetches;
      } else {
        answers = await this.session.run(feeds, options);
        state.sets[next] = this.spec.state.map(({ present }) => answers[present]);
      }
    } catch (error) {
      throw new XLExportError(
        `ONNX Runtime could not run the step (${firstLine(error)}); export the artefact again.`,
        { cause: error },
      );
    }
    state.turn = next;
    return Object.fromEntries(Object.keys(outputs).map((name) => [name, answers[name].data]));
  }

  async close() {
    await this.session.release();
  }
}

/** @param {keyof typeof TYPES} dtype @param {number[]} shape */
function zeros(dtype, shape) {
  return new TYPES[dtype].array(new ArrayBuffer(numBytes(dtype, shape)));
}
