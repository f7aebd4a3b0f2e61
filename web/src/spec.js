/**
 * `spec.json`: everything that a runtime must know about an artefact, and the proof that its files are
 * intact.
 */
import { TYPES, numBytes } from "./element-types.js";
import { XLExportError, shown } from "./errors.js";
import { fault, readFields } from "./files/fields.js";
import { parseJson, utf8, withoutNumbers } from "./files/json.js";
import { sha256 } from "./files/sha256.js";
import { TABLES } from "./format-tables.js";
import { Sampler } from "./text/sampler.js";

/** @typedef {import("../index.js").Spec} Spec */
/** @typedef {import("../index.js").TensorFacts} TensorFacts */

const SCHEMA = 1;
export const SPEC = "spec.json";
export const GRAPH = "step.onnx";
export const WEIGHTS = "weights.bin";
export const SAMPLING = "sampling.json";
const FIX_COPY = "copy the whole folder again, or export the artefact again";
const MOST_BYTES = 2 ** 31; // of the memory of one stream; WebAssembly has 4 GiB in all

/**
 * The spec in the bytes of a `spec.json`, its digest and its consistency verified.
 * @param {Uint8Array} bytes @param {string} where
 * @returns {Promise<{spec: Spec, identity: string}>}
 */
export async function readSpec(bytes, where) {
  const stated = parseJson(bytes, where)?.schema;
  if (Number.isInteger(stated) && stated > SCHEMA) {
    throw new XLExportError(
      `${where} has schema ${stated}, and this version reads up to ${SCHEMA}; take a newer xl-export-web.`,
    );
  }
  const spec = readFields("spec", bytes, where);
  const text = utf8(bytes, where);
  const end = text.lastIndexOf('"digest"');
  // The digest must come last: it covers only the bytes before it.
  const last = !text.includes(",", end);
  if (!last || spec.digest !== (await sha256(new TextEncoder().encode(text.slice(0, end))))) {
    throw new XLExportError(`${where} was altered: its digest does not match its content; ${FIX_COPY}.`);
  }
  for (const tensor of [...spec.inputs, ...spec.outputs])
    for (const key of ["ids", "present", "when"]) if (tensor[key] === null) delete tensor[key];
  spec.state = spec.inputs.filter((/** @type {any} */ tensor) => tensor.present);
  const wrong = contradiction(spec);
  if (wrong) throw new XLExportError(`${where} contradicts itself: ${wrong}; ${FIX_COPY}.`);
  if (!spec.fixed_tokens.length) delete spec.fixed_tokens;
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
 * What of a spec does not follow from the rest, or does not fit it; "" for nothing. Python's `read_spec` and
 * C++ have the same rules.
 * @param {any} spec whose fields have their types
 */
function contradiction(spec) {
  const { model, form, rule, storage, files, without, rounding, mean_rounding } = spec;
  const { fixed_rows: rows, fixed_tokens: counts } = spec;
  const { reaches, sublayers, layers, heads } = model;
  const facts = TABLES.forms[form];
  const own = facts.holds === "own";
  const [answers, ...tolerances] = TABLES.limits[`${spec.precision} ${spec.memory_precision} ${spec.target}`];
  const given = signature(spec);
  const { inputs, outputs } = isLanguageModel(spec) ? languageModelTensors(model) : given;
  const state = stateTensors(spec);
  const after = state.map(({ present, dtype, shape }) => ({ name: present, dtype, shape }));
  const traced = own || !isLanguageModel(spec) || without.length || rounding || mean_rounding;
  const ascending = counts.every(
    (/** @type {number} */ n, /** @type {number} */ i) => !i || counts[i - 1] < n,
  );
  const cuttable =
    ascending &&
    counts.includes(1) &&
    counts.includes(rule.segment) &&
    storage === "external" &&
    TABLES.cuts_change_nothing[rule.mask] &&
    !without.includes("cuts");
  const graphs = [
    ...TABLES.graph_files[storage],
    ...(counts.length ? graphsOf(spec).map(({ name }) => name) : []),
  ];
  const needed = [...graphs, ...TABLES.needed, ...(isLanguageModel(spec) ? [TABLES.vocabulary] : [])];
  const missing = needed.filter((name) => !Object.hasOwn(files, name));
  const square = reaches.length === layers && reaches.every((/** @type {any} */ row) => row.length === heads);
  /** @type {[string, unknown][]} */
  const contradictions = [
    [
      "its model has no sizes",
      sublayers !== "own" && TABLES.sizes.some((/** @type {string} */ name) => !model[name]),
    ],
    ["reaches is not one for each head", reaches.length && !square],
    ["only ring memory can be int8", TYPES[memoryType(spec)].scaled && !facts.circular],
    ["memory_shapes is given, and its tensors follow from its model", spec.memory_shapes.length && !own],
    [
      "memory_shapes has too many tensors or axes",
      spec.memory_shapes.length > TABLES.max_states ||
        spec.memory_shapes.some((/** @type {number[]} */ shape) => shape.length > TABLES.max_axes),
    ],
    ["its memory is larger than any", !(bytesPerStream({ ...spec, state }) - 8 <= TABLES.max_row_bytes)],
    ["its inputs or outputs are no step's", !isLanguageModel(spec) && !isStep(given)],
    ["its inputs do not follow from its model", !sameTensors(spec.inputs, [...inputs, ...state])],
    ["its outputs do not follow from its model", !sameTensors(spec.outputs, [...outputs, ...after])],
    ["its answers do not follow from its precision", spec.answers !== answers],
    [
      "its tolerances do not follow from its precision",
      spec.tolerance !== Math.max(tolerances[0], TABLES.roundings * rounding) ||
        spec.mean_tolerance !== Math.max(tolerances[1], TABLES.roundings * mean_rounding),
    ],
    ["its graph was written, and has what only traced ones have", spec.exporter === "graph" && traced],
    ["its steps cannot be cut into its numbers of tokens", counts.length && !cuttable],
    ["its graph has fixed sizes and a large vocabulary", rows && isSelective(model)],
    [
      "its weights are in its graph, and it lists others",
      storage !== "external" &&
        TABLES.external_files.some((/** @type {string} */ name) => Object.hasOwn(files, name)),
    ],
    [`it does not list ${missing.join(", ")}`, missing.length],
  ];
  return contradictions.find(([, holds]) => holds)?.[0] ?? "";
}

/** Whether the graph of a language model computes only the logits that are asked for. @param {any} model */
const isSelective = (model) => model.cutoffs.length > 0 || model.vocab_size > TABLES.selective_from;

/** The inputs and outputs of a language model. @param {any} model @returns {any} */
function languageModelTensors(model) {
  const [inputs, outputs] = TABLES.language_model[isSelective(model) ? "selective" : "plain"].map(
    (/** @type {any[]} */ side) =>
      side.map((tensor) => ({
        ...tensor,
        shape: tensor.shape.map((/** @type {any} */ size) =>
          size === "vocab_size" ? model.vocab_size : size,
        ),
      })),
  );
  return { inputs, outputs };
}

/** The type of the memory tensors. @param {any} spec @returns {import("../index.js").MemoryType} */
const memoryType = (spec) => TABLES.memory_types[spec.memory_precision];

/** The memory tensors that follow from a model, its rule and its form. @param {any} spec @returns {any[]} */
function stateTensors(spec) {
  const { model, rule, memory_shapes: shapes } = spec;
  const { tensors, axes, holds } = TABLES.forms[spec.form];
  const dtype = memoryType(spec);
  const rows =
    holds === "own"
      ? shapes.map((/** @type {number[]} */ row, /** @type {number} */ number) => ({
          name: `${number}`,
          row,
        }))
      : headGroups(spec).map(({ name, heads, mem_len }) => {
          const { head_dim, d_model } = model;
          /** @type {Record<string, number>} */
          const sizes = { heads, mem_len, slots: mem_len + rule.segment, head_dim, d_model };
          return { name, row: axes.map((/** @type {string} */ axis) => sizes[axis]) };
        });
  const named = (/** @type {string} */ template, /** @type {string} */ name) => template.replace("{}", name);
  return rows.flatMap((/** @type {any} */ { name, row }) =>
    tensors.flatMap((/** @type {[string, string]} */ [past, present]) => {
      const tensor = {
        name: named(past, name),
        present: named(present, name),
        dtype,
        shape: ["batch", ...row],
      };
      if (!TYPES[dtype].scaled) return [tensor];
      const scale = { name: `${tensor.name}_scale`, present: `${tensor.present}_scale`, dtype: "float32" };
      return [tensor, { ...scale, shape: ["batch", ...row.slice(0, -1), 1] }];
    }),
  );
}

/**
 * The heads of each layer in groups of similar span, which share memory tensors (`head_groups` in Python).
 * @param {any} spec @returns {{name: string, heads: number, mem_len: number}[]}
 */
function headGroups({ model, rule: { mem_len }, form }) {
  const count = model.sublayers === "head-split" ? Math.floor(model.heads / 2) : model.heads;
  if (!model.reaches.length)
    return Array.from({ length: model.layers }, (_, layer) => ({ name: `${layer}`, heads: count, mem_len }));
  const splits = TABLES.forms[form].holds === "keys";
  return model.reaches.flatMap((/** @type {number[]} */ reaches, /** @type {number} */ layer) => {
    const spans = reaches.map((reach) => Math.min(reach, mem_len));
    /** @type {number[][]} */
    const groups = [];
    for (const head of [...spans.keys()].slice(0, count).sort((a, b) => reaches[b] - reaches[a])) {
      const longest = groups.length ? spans[groups[groups.length - 1][0]] : spans[head];
      const shorter = 2 * spans[head] < longest && longest - spans[head] >= TABLES.group_step;
      if (!groups.length || (splits && shorter)) groups.push([]);
      groups[groups.length - 1].push(head);
    }
    return groups.map((heads, number) => ({
      name: groups.length === 1 ? `${layer}` : `${layer}.${number}`,
      heads: heads.length,
      mem_len: spans[heads[0]],
    }));
  });
}

/** @param {any[]} found @param {any[]} wanted */
const sameTensors = (found, wanted) =>
  found.length === wanted.length &&
  found.every(({ name, dtype, shape, ids, present }, i) => {
    const { shape: sizes, ...other } = wanted[i];
    const same =
      shape.length === sizes.length &&
      shape.every((/** @type {any} */ size, /** @type {number} */ axis) => size === sizes[axis]);
    return (
      same && name === other.name && dtype === other.dtype && ids === other.ids && present === other.present
    );
  });

/**
 * Whether these are inputs and outputs of a step that is no language model (`refuse_signature` in Python).
 * @param {{inputs: any[], outputs: any[]}} signature
 */
function isStep({ inputs, outputs }) {
  const named = inputs.slice(0, -1);
  const [positions] = inputs.slice(-1);
  const names = [...inputs, ...outputs].map(({ name }) => name);
  const size = (/** @type {any} */ n) => typeof n === "number" && n >= 1 && n <= 2 ** 24;
  const sound = (/** @type {any} */ { name, dtype, shape, ids }) =>
    !fault(TABLES.name, name, name, "") &&
    shape[0] === "batch" &&
    shape.length <= TABLES.max_axes &&
    shape.slice(shape[1] === "tokens" ? 2 : 1).every(size) &&
    shape
      .slice(shape[1] === "tokens" ? 2 : 1)
      .reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b, 1) <= TABLES.max_value &&
    (ids === undefined || dtype === "int64");
  return (
    named.length > 0 &&
    outputs.length > 0 &&
    sameTensors([positions], [{ name: "position_ids", dtype: "int64", shape: ["batch", "tokens"] }]) &&
    new Set(names).size === names.length &&
    [...named, ...outputs].every(sound) &&
    named.every(({ dtype, ids }) => dtype === (ids === undefined ? "float32" : "int64")) &&
    named.some(isTimed) &&
    outputs.every(({ dtype }) => ["float32", "int64"].includes(dtype))
  );
}

/**
 * Raises XLExportError for an artefact that this package does not run.
 * @param {Spec} spec @param {string} where
 */
export function refuseUnserved(spec, where) {
  const refuse = (/** @type {boolean} */ holds, /** @type {string} */ why) => {
    if (holds) throw new XLExportError(`${where} ${why}.`);
  };
  refuse(
    spec.target === "tensorrt",
    "is written for TensorRT, which no browser has; export with --target onnxruntime or web",
  );
  refuse(
    !Object.hasOwn(spec.files, GRAPH),
    `has no ${GRAPH}; export the run again without --${spec.storage}`,
  );
  refuse(
    bytesPerStream(spec) > MOST_BYTES,
    "has a memory larger than WebAssembly can hold; export a smaller one",
  );
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
 * The files of the graphs: one for steps of up to `segment` tokens, or several, each for a fixed number of
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
  return spec.state.some(({ name, dtype }) => TYPES[dtype].scaled && state.name === `${name}_scale`);
}

/**
 * The shape of a memory tensor of some streams.
 * @param {{shape: (string | number)[]}} state @param {number} batch
 */
export function stateShape(state, batch) {
  return state.shape.map((size) => (size === "batch" ? batch : Number(size)));
}

/**
 * The bytes that the memory of one stream takes, its position included.
 * @param {Spec} spec
 */
export function bytesPerStream(spec) {
  return spec.state.reduce((sum, state) => sum + numBytes(state.dtype, stateShape(state, 1)), 8);
}
