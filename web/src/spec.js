/**
 * `spec.json`: everything that a runtime must know about an artefact, and the proof that its files are
 * intact.
 */
import { XLExportError, shown } from "./errors.js";
import { canonical, parseExact, parseJson, utf8 } from "./files/json.js";
import { sha256 } from "./files/sha256.js";

/** @typedef {import("../index.js").Spec} Spec */
/** @typedef {import("../index.js").TensorFacts} TensorFacts */

export const SCHEMA = 1;
export const SPEC = "spec.json";
export const GRAPH = "step.onnx";
export const WEIGHTS = "weights.bin";
export const VOCAB = "vocab.json";
const AGAIN = "copy the whole folder again, or export the artefact again";
const FILE_NAME = /^\w[\w.-]{0,99}$/;
const SELECTIVE_FROM = 8192; // tokens; a larger vocabulary computes only the logits that are asked for
const MOST_BYTES = 2 ** 31; // of the memory of one stream; WebAssembly has 4 GiB in all
const BYTES = { int64: 8, int32: 4, float32: 4, float16: 2, int8: 1 };
const MEMORY_TYPES = ["float32", "float16", "int8"];

/**
 * The spec in the bytes of a `spec.json`, its digest and its consistency verified.
 * @param {Uint8Array} bytes @param {string} where
 * @returns {Promise<{spec: Spec, identity: string}>}
 */
export async function readSpec(bytes, where) {
  const exact = parseExact(utf8(bytes, where), where);
  const spec = parseJson(bytes, where);
  if (!(exact instanceof Map)) throw new XLExportError(`${where} is not the spec of an artefact; ${AGAIN}.`);
  if (Number.isInteger(spec.schema) && spec.schema > SCHEMA) {
    throw new XLExportError(
      `${where} has schema ${spec.schema}, and this version reads up to ${SCHEMA}; take a newer ` +
        "xl-export-web.",
    );
  }
  const stated = exact.get("digest");
  exact.delete("digest");
  const identity = await sha256(new TextEncoder().encode(canonical(exact)));
  if (stated !== identity) {
    throw new XLExportError(`${where} was altered: its digest does not match its content; ${AGAIN}.`);
  }
  verify(spec, where);
  return { spec, identity };
}

/**
 * Raises XLExportError unless a spec has the fields that this package reads, with values that can be.
 * @param {any} spec @param {string} where
 */
function verify(spec, where) {
  const need = (/** @type {unknown} */ holds, /** @type {string} */ what) => {
    if (!holds) throw new XLExportError(`${where} contradicts itself: ${what}; ${AGAIN}.`);
  };
  const size = (/** @type {unknown} */ value) =>
    Number.isInteger(value) && Number(value) >= 1 && Number(value) <= 2 ** 24;
  const object = (/** @type {unknown} */ value) =>
    typeof value === "object" && value !== null && !Array.isArray(value);
  need(spec.schema === SCHEMA, "its schema is no number that this version knows");
  need(object(spec.model) && object(spec.rule) && object(spec.files), "model, rule or files are missing");
  need(size(spec.model.vocab_size), "its vocabulary has no size");
  need(Array.isArray(spec.model.cutoffs), "the cutoffs of its model are no list");
  need(size(spec.rule.segment), "its rule has no segment length");
  need(Number.isInteger(spec.rule.mem_len) && spec.rule.mem_len >= 0, "its rule has no memory length");
  need(typeof spec.precision === "string" && typeof spec.form === "string", "precision or form is missing");
  need(Array.isArray(spec.state), "its memory tensors are no list");
  for (const state of spec.state) {
    need(
      object(state) && typeof state.past === "string" && typeof state.present === "string",
      "a memory tensor has no name",
    );
    need(MEMORY_TYPES.includes(state.dtype), `a memory tensor has type ${shown(state.dtype)}`);
    need(
      Array.isArray(state.shape) && state.shape[0] === "batch" && state.shape.length <= 9,
      "a memory tensor has no batch",
    );
    need(
      state.shape.slice(1).every((/** @type {unknown} */ n) => typeof n === "string" && /^\d{1,8}$/.test(n)),
      "a memory tensor has no sizes",
    );
  }
  for (const name of ["past", "present"]) {
    const names = spec.state.map((/** @type {any} */ state) => state[name]);
    need(new Set(names).size === names.length, "two memory tensors have one name");
  }
  for (const list of [spec.inputs ?? [], spec.outputs ?? []]) {
    need(Array.isArray(list), "its inputs or outputs are no list");
    const sound = (/** @type {any} */ t) => object(t) && typeof t.name === "string" && Array.isArray(t.shape);
    need(list.every(sound), "an input or output has no name or shape");
  }
  need(bytesPerStream(spec) <= MOST_BYTES, "its memory is larger than WebAssembly can hold");
  for (const [name, facts] of Object.entries(spec.files)) {
    need(FILE_NAME.test(name), `it lists ${shown(name)}, a file outside its folder`);
    need(
      object(facts) &&
        /^[0-9a-f]{64}$/.test(facts.sha256) &&
        Number.isSafeInteger(facts.num_bytes) &&
        facts.num_bytes >= 0,
      `it does not say what ${name} holds`,
    );
  }
  for (const name of [GRAPH, VOCAB]) need(Object.hasOwn(spec.files, name), `it does not list ${name}`);
  if (spec.target === "tensorrt") {
    throw new XLExportError(
      `${where} is written for TensorRT, which no browser has; export with --target onnxruntime or web.`,
    );
  }
}

/**
 * Whether the graph computes only the logits that are asked for (see docs/reference/step.md).
 * @param {Spec} spec
 */
export function selective(spec) {
  return tensors(spec).inputs.some(({ name }) => name === "logit_rows");
}

/**
 * Inputs and outputs of the graph. Artefacts from before the fields `inputs` and `outputs` have those that
 * follow from the size of the vocabulary.
 * @param {Spec} spec
 * @returns {{inputs: TensorFacts[], outputs: TensorFacts[]}}
 */
export function tensors(spec) {
  if (spec.inputs && spec.outputs) return { inputs: spec.inputs, outputs: spec.outputs };
  const chosen = spec.model.cutoffs.length > 0 || spec.model.vocab_size > SELECTIVE_FROM;
  const ids = ["input_ids", "position_ids", ...(chosen ? ["targets"] : [])];
  const where = chosen ? ["rows"] : ["batch", "tokens"];
  const memory = (/** @type {"past" | "present"} */ side) =>
    spec.state.map((state) => ({
      name: state[side],
      dtype: state.dtype,
      shape: sizes(state.shape),
      optional: false,
    }));
  return {
    inputs: [
      ...ids.map((name) => fact(name, "int64", ["batch", "tokens"])),
      ...(chosen ? [fact("logit_rows", "int64", ["rows"])] : []),
      ...memory("past"),
    ],
    outputs: [
      fact("logits", "float32", [...where, spec.model.vocab_size]),
      ...(chosen ? [fact("log_probs", "float32", ["batch", "tokens"])] : []),
      ...memory("present"),
    ],
  };
}

/**
 * @param {string} name
 * @param {TensorFacts["dtype"]} dtype @param {(string | number)[]} shape @returns {TensorFacts}
 */
function fact(name, dtype, shape) {
  return { name, dtype, shape, optional: false };
}

/** @param {string[]} shape */
function sizes(shape) {
  return shape.map((size) => (/^\d+$/.test(size) ? Number(size) : size));
}

/**
 * Whether past and present of the memory are one buffer. A graph for WebGPU makes a ring anew in each step.
 * @param {Spec} spec
 */
export function writesInPlace(spec) {
  return spec.form === "ring" && spec.target !== "web";
}

/**
 * Whether a memory tensor holds the scales of another one, whose numbers are bytes.
 * @param {Spec} spec @param {Spec["state"][number]} state
 */
export function isScale(spec, state) {
  return spec.state.some(({ past, dtype }) => dtype === "int8" && state.past === `${past}_scale`);
}

/**
 * The shape of a memory tensor of some streams.
 * @param {{shape: string[]}} state @param {number} batch
 */
export function stateShape(state, batch) {
  return state.shape.map((size) => (size === "batch" ? batch : Number(size)));
}

/**
 * The bytes that the memory of one stream takes, its position included.
 * @param {Spec} spec
 */
export function bytesPerStream(spec) {
  const bytes = spec.state.map(
    (state) => stateShape(state, 1).reduce((a, b) => a * b, 1) * BYTES[state.dtype],
  );
  return bytes.reduce((a, b) => a + b, 8);
}
