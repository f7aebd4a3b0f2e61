/** Chooses how the memory is kept: in place where that is proved to compute the same, else by copies. */
import { Memory } from "../memory.js";
import { replay } from "../reference.js";
import { Stepper } from "../stepper.js";
import { firstLine } from "../errors.js";
import { HeapEngine } from "./heap.js";
import { PieceEngine } from "./pieces.js";
import { TensorEngine } from "./tensors.js";

/** @typedef {import("./session.js").Engine} Engine */

/** Tokens of the reference, more than its first segment: the later ones read what a step has written. */
const CHECKED_TOKENS = 17;
const UNREACHED =
  "the inside of ONNX Runtime was not reached: another release, or a page without blob: in script-src";
const TOLERANCE = 1e-4; // between memory in place and copies, as in the reference: both run one session

/**
 * An engine over the sessions of an artefact's graphs, and why it copies the memory where it does.
 * @param {any} ort @param {any[]} sessions
 * @param {{spec: import("../../index.js").Spec, reference: import("../reference.js").Reference}} contents
 * @param {{module?: import("./heap.js").HeapModule | null, native?: boolean, inPlace?: boolean}} options
 * @returns {Promise<{engine: Engine, reason: string | null}>}
 */
export async function chooseEngine(
  ort,
  sessions,
  { spec, reference },
  { module = null, native = false, inPlace = true },
) {
  const over = (/** @type {(session: any) => Engine} */ make) =>
    sessions.length > 1 ? new PieceEngine(sessions.map(make), spec) : make(sessions[0]);
  const copies = over((session) => new TensorEngine(ort, session, spec, { writes: false }));
  if (!inPlace) return { engine: copies, reason: "copies were asked for" };
  if (!native && !module) return { engine: copies, reason: UNREACHED };
  let engine;
  try {
    engine = over((session) =>
      module ? new HeapEngine(module, session, spec) : new TensorEngine(ort, session, spec, { writes: true }),
    );
    const [mine, copied] = [
      await answers(engine, spec, reference),
      await answers(copies, spec, reference),
    ];
    const worst = Math.max(...mine.map((value, i) => Math.abs(value - copied[i])));
    if (!(worst <= TOLERANCE)) throw new Error(`it differs from copies by ${worst.toPrecision(2)}`);
    return { engine, reason: null };
  } catch (error) {
    /** @type {any} */ (engine)?.free?.(); // the copies go on with its sessions
    return { engine: copies, reason: `memory in place failed its self-check: ${firstLine(error)}` };
  }
}

/**
 * Raises an error where an engine differs from the first answers of the reference by more than may pass.
 * @param {Engine} engine @param {import("../../index.js").Spec} spec
 * @param {import("../reference.js").Reference} reference
 */
export async function refuseDifferent(engine, spec, reference) {
  const worst = Math.max(...(await answers(engine, spec, reference)));
  if (!(worst <= spec.tolerance))
    throw new Error(`its first answers differ from the reference by ${worst.toPrecision(2)}`);
}

/**
 * The differences from the reference in its first segments.
 * @param {Engine} engine @param {import("../../index.js").Spec} spec
 * @param {import("../reference.js").Reference} reference
 */
async function answers(engine, spec, reference) {
  const { batch } = reference;
  const memory = new Memory(engine, await engine.create(batch), "", new BigInt64Array(batch));
  try {
    const found = await replay(new Stepper(engine, spec), reference, memory, { most: CHECKED_TOKENS });
    return found.flatMap((differences) => [...differences]);
  } finally {
    await memory.dispose();
  }
}
