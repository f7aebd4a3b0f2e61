/** Chooses how the memory is kept: in place where that is proved to compute the same, else by copies. */
import { Memory } from "../memory.js";
import { replay } from "../reference.js";
import { Stepper } from "../stepper.js";
import { firstLine } from "../errors.js";
import { HeapEngine } from "./heap.js";
import { TensorEngine } from "./tensors.js";

/** @typedef {import("./session.js").Engine} Engine */

/** Tokens of the reference, in segments of 1, 7 and 9: all but the first read what a step has written. */
const TOKENS = 17;
const SAME = 1e-4; // nats between memory in place and copies: both run one session

/**
 * An engine over a session, and why it copies the memory where it does.
 * @param {any} ort @param {any} session @param {import("../../index.js").Spec} spec @param {boolean} chosen
 * @param {import("../reference.js").Reference} reference
 * @param {{module?: import("./heap.js").HeapModule | null, native?: boolean, inPlace?: boolean}} options
 * @returns {Promise<{engine: Engine, reason: string | null}>}
 */
export async function chooseEngine(
  ort,
  session,
  spec,
  chosen,
  reference,
  { module = null, native = false, inPlace = true },
) {
  const copies = new TensorEngine(ort, session, spec, { writes: false });
  if (!inPlace) return { engine: copies, reason: "copies were asked for" };
  if (!native && !module) return { engine: copies, reason: "the inside of ONNX Runtime was not reached" };
  let engine;
  try {
    engine = module
      ? new HeapEngine(module, session, spec, chosen)
      : new TensorEngine(ort, session, spec, { writes: true });
    const [mine, copied] = [
      await answers(engine, spec, chosen, reference),
      await answers(copies, spec, chosen, reference),
    ];
    const worst = Math.max(...mine.map((value, i) => Math.abs(value - copied[i])));
    if (!(worst <= SAME)) throw new Error(`it differs from copies by ${worst.toPrecision(2)} nats`);
    return { engine, reason: null };
  } catch (error) {
    if (engine instanceof HeapEngine) engine.free(); // the copies go on with its session
    return { engine: copies, reason: `memory in place failed its self-check: ${firstLine(error)}` };
  }
}

/**
 * Raises an error where an engine differs from the first answers of the reference by more than may pass.
 * @param {Engine} engine @param {import("../../index.js").Spec} spec @param {boolean} chosen
 * @param {import("../reference.js").Reference} reference
 */
export async function refuseDifferent(engine, spec, chosen, reference) {
  const worst = Math.max(...(await answers(engine, spec, chosen, reference)));
  if (!(worst <= spec.tolerance))
    throw new Error(`its first answers differ from the reference by ${worst.toPrecision(2)} nats`);
}

/**
 * The differences from the reference in its first segments.
 * @param {Engine} engine @param {import("../../index.js").Spec} spec @param {boolean} chosen
 * @param {import("../reference.js").Reference} reference
 */
async function answers(engine, spec, chosen, reference) {
  const batch = reference.tokens.length;
  const memory = new Memory(engine, await engine.create(batch), "", new BigInt64Array(batch));
  try {
    const found = await replay(new Stepper(engine, spec, chosen), beginning(reference, TOKENS), memory);
    return found.flatMap((differences) => [...differences]);
  } finally {
    await memory.dispose();
  }
}

/**
 * The first tokens of a reference. It has no `last`, which would be of another token.
 * @param {import("../reference.js").Reference} reference @param {number} most
 */
function beginning(reference, most) {
  const { tokens, logProbs, segments } = reference;
  const fed = logProbs.length / tokens.length;
  const count = Math.min(most, fed);
  const kept = [];
  for (let at = 0; at < count; at += kept[kept.length - 1])
    kept.push(Math.min(segments[kept.length], count - at));
  const answers = tokens.flatMap((_, row) => [...logProbs.subarray(row * fed, row * fed + count)]);
  return {
    ...reference,
    tokens: tokens.map((row) => row.slice(0, count + 1)),
    segments: kept,
    logProbs: Float32Array.from(answers),
    last: new Float32Array(0),
  };
}
