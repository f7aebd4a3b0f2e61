/** What every engine offers, and the session of ONNX Runtime that it runs. */
import { XLExportError, firstLine } from "../errors.js";
import { WEIGHTS, graphsOf } from "../spec.js";

/**
 * @typedef {Float32Array | BigInt64Array} Numbers of a tensor of type float32 or int64
 * @typedef {{data: Numbers, shape: number[]}} Input
 * @typedef {{dtype: "float32" | "int64", shape: number[]}} Output
 * @typedef {{inputs: Record<string, Input>, outputs: Record<string, Output>}} Step everything that the graph
 * reads and returns, except the memory
 * @typedef {Record<string, any>} Found the Numbers of each output by its name
 * @typedef {{
 *   memory: string,
 *   create(batch: number): any, // or a promise of it
 *   release(state: any): void,
 *   copy(state: any): Promise<any>,
 *   read(state: any): Promise<Uint8Array[]>,
 *   write(state: any, tensors: Uint8Array[]): Promise<void>,
 *   run(step: Step, state: any, onPiece: (tokens: number) => void): Found | Promise<Found>,
 *   close(): Promise<void>,
 * }} Engine `memory`: how it keeps the memory. A state belongs to the engine that made it: the tensors of
 * some streams, in the order of the spec. `onPiece`: hears after each piece of a step how many tokens it had.
 */

/** The type of the tensor of some numbers. @param {Numbers} data */
export const typeOf = (data) => (data instanceof Float32Array ? "float32" : "int64");

/**
 * The sessions of an artefact's graphs, in the order of `graphsOf`.
 * @param {any} ort @param {import("../../index.js").Spec} spec @param {Record<string, Uint8Array>} files
 * @param {object} options of ONNX Runtime
 */
export async function createSessions(ort, spec, files, options) {
  const sessions = [];
  for (const graph of graphsOf(spec)) sessions.push(await createSession(ort, spec, graph, files, options));
  return sessions;
}

/**
 * A session over the verified files of an artefact, its tensors those that the spec promises.
 * @param {any} ort @param {import("../../index.js").Spec} spec @param {{name: string, tokens: number}} graph
 * @param {Record<string, Uint8Array>} files @param {object} options of ONNX Runtime
 */
async function createSession(ort, spec, { name, tokens }, files, options) {
  // A small graph holds all its weights itself, and onnxruntime-node refuses an empty file.
  const weights = files[WEIGHTS]?.length ? { externalData: [{ path: WEIGHTS, data: files[WEIGHTS] }] } : {};
  let session;
  try {
    session = await ort.InferenceSession.create(files[name], {
      logSeverityLevel: 3,
      // Microseconds that a thread waits awake for work; by default so long that it slows other work.
      extra: { session: { intra_op: { spin_duration_us: "50" } } },
      ...weights,
      ...options,
    });
  } catch (error) {
    throw new XLExportError(
      `${name} could not be loaded by ONNX Runtime (${firstLine(error)}); export the artefact again.`,
      { cause: error },
    );
  }
  verifySignature(session, spec, name, tokens);
  return session;
}

/**
 * A tensor with numbers for its rows and tokens, if these are fixed.
 * @param {import("../../index.js").TensorFacts} tensor @param {import("../../index.js").Spec} spec
 * @param {number} tokens
 */
function fixed(tensor, { fixed_rows: rows, fixed_tokens: counts }, tokens) {
  /** @type {Record<string, number>} */
  const sizes = {};
  if (rows) sizes.batch = rows;
  if (rows || counts) sizes.tokens = tokens;
  return { ...tensor, shape: tensor.shape.map((size) => sizes[size] ?? size) };
}

/** A size as the sentence shows it: a number, or ? where it has only a name. @param {unknown} size */
const known = (size) => (typeof size === "number" ? size : "?");

/**
 * Raises XLExportError unless the graph has exactly the tensors of the spec, by which buffers are sized.
 * @param {any} session @param {import("../../index.js").Spec} spec @param {string} name of the graph
 * @param {number} tokens of its steps, if their number is fixed
 */
function verifySignature(session, spec, name, tokens) {
  for (const [what, wanted, found] of /** @type {[string, any[], any[]][]} */ ([
    ["inputs", spec.inputs, session.inputMetadata],
    ["outputs", spec.outputs, session.outputMetadata],
  ])) {
    const told = (/** @type {any} */ t, /** @type {string} */ type) =>
      `${t.name} ${type} [${t.shape.map(known).join(", ")}]`;
    const expected = wanted.map((tensor) => told(fixed(tensor, spec, tokens), tensor.dtype)).sort();
    const actual = found.map((tensor) => told(tensor, tensor.type)).sort();
    const at = expected.findIndex((line, i) => line !== actual[i]);
    if (at >= 0 || actual.length !== expected.length) {
      throw new XLExportError(
        `${name} has ${what} ${actual[Math.max(at, 0)] ?? "less"}, and spec.json promises ` +
          `${expected[Math.max(at, 0)] ?? "less"}; export the artefact again.`,
      );
    }
  }
}
