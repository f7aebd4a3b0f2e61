/**
 * `spec.json`: everything that a runtime must know about an artefact, and the proof that its files are
 * intact.
 */
import { XLExportError, shown } from "./errors.js";
import { parseJson, utf8, withoutNumbers } from "./files/json.js";
import { sha256 } from "./files/sha256.js";
import { Sampler } from "./text/sampler.js";

/** @typedef {import("../index.js").Spec} Spec */
/** @typedef {import("../index.js").TensorFacts} TensorFacts */

/** Of each type of a tensor: the array that holds it, its number in ONNX, and its name in safetensors. */
export const TYPES = {
  float32: { array: Float32Array, onnx: 1, stored: "F32" },
  float16: { array: Uint16Array, onnx: 10, stored: "F16" },
  int8: { array: Int8Array, onnx: 3, stored: "I8" },
  int32: { array: Int32Array, onnx: 6, stored: "I32" },
  int64: { array: BigInt64Array, onnx: 7, stored: "I64" },
};
const SCHEMA = 1;
export const SPEC = "spec.json";
export const GRAPH = "step.onnx";
export const WEIGHTS = "weights.bin";
const VOCAB = "vocab.json";
export const SAMPLING = "sampling.json";
const AGAIN = "copy the whole folder again, or export the artefact again";
const FILE_NAME = /^\w[\w.-]{0,99}$/;
const MOST_BYTES = 2 ** 31; // of the memory of one stream; WebAssembly has 4 GiB in all
const NAME = /^[A-Za-z_][\w-]{0,99}$/; // of an input or output of a step that is no language model
const PROMISES = ["padding", "unequal", "cuts", "rows"]; // see docs/reference/step.md
const MEMORY_TYPES = ["float32", "float16", "int8"];
const FORMS = ["ring", "shift", "hidden", "own"];
const TARGETS = ["onnxruntime", "tensorrt", "web"];

/**
 * The spec in the bytes of a `spec.json`, its digest and its consistency verified.
 * @param {Uint8Array} bytes @param {string} where
 * @returns {Promise<{spec: Spec, identity: string}>}
 */
export async function readSpec(bytes, where) {
  const spec = parseJson(bytes, where);
  if (typeof spec !== "object" || spec === null || Array.isArray(spec)) {
    throw new XLExportError(`${where} is not the spec of an artefact; ${AGAIN}.`);
  }
  if (Number.isInteger(spec.schema) && spec.schema > SCHEMA) {
    throw new XLExportError(
      `${where} has schema ${spec.schema}, and this version reads up to ${SCHEMA}; take a newer ` +
        "xl-export-web.",
    );
  }
  const text = utf8(bytes, where);
  const end = text.lastIndexOf('"digest"');
  // The digest must come last: it covers only the bytes before it.
  const last = !text.includes(",", end);
  if (!last || spec.digest !== (await sha256(new TextEncoder().encode(text.slice(0, end))))) {
    throw new XLExportError(`${where} was altered: its digest does not match its content; ${AGAIN}.`);
  }
  verify(spec, where);
  return { spec, identity: await sha256(bytes) };
}

/** The options of a Sampler by their names in `sampling.json`, such as topK by top_k. */
const SETTINGS = new Map(
  Object.keys(new Sampler()).map((name) => [
    name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`),
    name,
  ]),
);

/**
 * The settings in the bytes of a `sampling.json`, as options of `generate`.
 * @param {Uint8Array} bytes @param {string} where
 * @returns {import("../index.js").SamplingOptions}
 */
export function readSampling(bytes, where) {
  const given = parseJson(bytes, where);
  /** @param {string} why @returns {never} */
  const refuse = (why) => {
    throw new XLExportError(`${where}: ${why}; write it again with \`xl-export set\`.`);
  };
  if (typeof given !== "object" || given === null || Array.isArray(given))
    refuse(`expected a JSON object, found ${shown(given)}`);
  /** @type {Record<string, number | null>} */
  const settings = {};
  const { top_k: written } = withoutNumbers(bytes, where);
  if (typeof given.top_k === "number" && !/^-?\d+$/.test(written))
    refuse(`top_k is ${written}; expected a whole number`);
  for (const [name, value] of Object.entries(given)) {
    const option = SETTINGS.get(name);
    if (!option)
      return refuse(`unknown key ${shown(name)}; the known keys are ${[...SETTINGS.keys()].join(", ")}`);
    if (typeof value !== "number" && !(name === "top_k" && value === null))
      refuse(`${name} is ${shown(value)}; expected a number`);
    settings[option] = value;
  }
  try {
    new Sampler(/** @type {any} */ (settings)); // refuses what is out of range
  } catch (error) {
    refuse(/** @type {Error} */ (error).message.slice(0, -1));
  }
  return /** @type {any} */ (settings);
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
  need(size(spec.model.vocab_size) || spec.model.vocab_size === 0, "its vocabulary has no size");
  spec.without ??= [];
  need(
    Array.isArray(spec.without) && spec.without.every((/** @type {any} */ name) => PROMISES.includes(name)),
    `it declines ${shown(spec.without)}`,
  );
  need(size(spec.rule.segment), "its rule has no segment length");
  need(Number.isInteger(spec.rule.mem_len) && spec.rule.mem_len >= 0, "its rule has no memory length");
  need(typeof spec.precision === "string", "precision is missing");
  need(FORMS.includes(spec.form), `its memory has the form ${shown(spec.form)}`);
  need(TARGETS.includes(spec.target), `its target is ${shown(spec.target)}`);
  need([spec.tolerance, spec.mean_tolerance].every(Number.isFinite), "it has no tolerances");
  for (const list of [spec.inputs, spec.outputs]) {
    need(Array.isArray(list), "its inputs or outputs are no list");
    const sound = (/** @type {any} */ t) => object(t) && typeof t.name === "string" && Array.isArray(t.shape);
    need(list.every(sound), "an input or output has no name or shape");
    const names = list.map((/** @type {any} */ tensor) => tensor.name);
    need(new Set(names).size === names.length, "two tensors have one name");
  }
  const outputs = new Set(spec.outputs.map((/** @type {any} */ tensor) => tensor.name));
  spec.state = spec.inputs.filter((/** @type {any} */ tensor) => tensor.present !== undefined);
  for (const { present, dtype, shape } of spec.state) {
    need(outputs.delete(present), "a memory tensor has no output of its own");
    need(MEMORY_TYPES.includes(dtype), `a memory tensor has type ${shown(dtype)}`);
    need(shape[0] === "batch" && shape.length <= 9, "a memory tensor has no batch");
    const sizes = (/** @type {unknown} */ n) => Number.isInteger(n) && Number(n) >= 0 && Number(n) <= 2 ** 24;
    need(shape.slice(1).every(sizes), "a memory tensor has no sizes");
  }
  if (!isLanguageModel(spec)) {
    for (const { name, dtype, shape, ids } of [...namedInputs(spec), ...signature(spec).outputs]) {
      need(NAME.test(name), `${shown(name)} is not the name of an input or output`);
      need(ids === undefined ? ["float32", "int64"].includes(dtype) : size(ids), `${name} has no type`);
      const sizes = shape.slice(shape[1] === "tokens" ? 2 : 1);
      need(shape[0] === "batch" && shape.length <= 8 && sizes.every(size), `${name} has no sizes`);
    }
    const inputs = namedInputs(spec);
    const types = inputs.every(({ dtype, ids }) => dtype === (ids === undefined ? "float32" : "int64"));
    need(types, "an input is neither float32 nor ids");
    need(inputs.some(isTimed), "no input has a value for each token");
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
  const counts = spec.fixed_tokens ?? [1];
  need(Array.isArray(counts) && counts.every(size) && counts.includes(1), "none of its graphs has one token");
  const graphs = graphsOf(spec).map(({ name }) => name);
  for (const name of isLanguageModel(spec) ? [...graphs, VOCAB] : graphs)
    need(Object.hasOwn(spec.files, name), `it does not list ${name}`);
  if (spec.target === "tensorrt") {
    throw new XLExportError(
      `${where} is written for TensorRT, which no browser has; export with --target onnxruntime or web.`,
    );
  }
}

/**
 * Whether a step reads token ids and returns logits. Any other step has named inputs and outputs.
 * @param {Spec} spec
 */
export function isLanguageModel(spec) {
  return spec.model.vocab_size !== 0;
}

/**
 * Raises XLExportError unless the step of an artefact is a language model's.
 * @param {Spec} spec
 */
export function refuseNoLanguageModel(spec) {
  if (isLanguageModel(spec)) return;
  throw new XLExportError(
    `this artefact is no language model: its step reads ${listed(namedInputs(spec))} and returns ` +
      `${listed(signature(spec).outputs)}; use step() with arrays by name.`,
  );
}

/** @param {{name: string}[]} tensors */
export const listed = (tensors) => tensors.map(({ name }) => name).join(", ");

/**
 * The files of the graphs: one for steps of up to `segment` tokens, or several, each for exactly so many
 * tokens, the largest first.
 * @param {Spec} spec
 */
export function graphsOf({ rule: { segment }, fixed_tokens: counts = [segment] }) {
  const largestFirst = [...counts].sort((a, b) => b - a);
  return largestFirst.map((tokens) => ({ tokens, name: tokens === segment ? GRAPH : `step.${tokens}.onnx` }));
}

/**
 * The inputs and outputs of the graph that are not its memory, in order.
 * @param {Spec} spec
 */
export function signature({ inputs, outputs }) {
  const after = new Set(inputs.map(({ present }) => present));
  return {
    inputs: inputs.filter(({ present }) => present === undefined),
    outputs: outputs.filter(({ name }) => !after.has(name)),
  };
}

/**
 * The inputs that a caller names; the positions are added to them.
 * @param {Spec} spec
 */
export function namedInputs(spec) {
  return signature(spec).inputs.filter(({ name }) => name !== "position_ids");
}

/** Whether a tensor has a value for each token. @param {{shape: (string | number)[]}} tensor */
export const isTimed = ({ shape }) => shape[1] === "tokens";

/**
 * Whether the graph computes only the logits that are asked for (see docs/reference/step.md).
 * @param {Spec} spec
 */
export function selective(spec) {
  return spec.inputs.some(({ name }) => name === "logit_rows");
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
  return spec.state.some(({ name, dtype }) => dtype === "int8" && state.name === `${name}_scale`);
}

/**
 * The shape of a memory tensor of some streams.
 * @param {{shape: (string | number)[]}} state @param {number} batch
 */
export function stateShape(state, batch) {
  return state.shape.map((size) => (size === "batch" ? batch : Number(size)));
}

/** The bytes of a tensor. @param {keyof typeof TYPES} dtype @param {number[]} shape */
export function numBytes(dtype, shape) {
  return shape.reduce((a, b) => a * b, TYPES[dtype].array.BYTES_PER_ELEMENT);
}

/**
 * The bytes that the memory of one stream takes, its position included.
 * @param {Spec} spec
 */
export function bytesPerStream(spec) {
  return spec.state.reduce((sum, state) => sum + numBytes(state.dtype, stateShape(state, 1)), 8);
}
