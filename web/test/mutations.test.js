/** Damaged artefacts, also such whose hashes fit: each opens, or is refused in one sentence. */
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { ownSha256 } from "../src/files/sha256.js";
import { XLExportError, open } from "../src/node.js";
import { Random } from "../src/text/random.js";
import { all, folderOf } from "./setup.js";

const COUNT = 60;
const VALUES = [
  "null",
  "-1",
  "0",
  "16777216",
  "1e400",
  "true",
  '""',
  '"../x"',
  "[]",
  "[[]]",
  "{}",
  '{"a": 1}',
  '"batch"',
];
const READ = ["step.onnx", "weights.bin", "vocab.json", "reference.json", "reference.bin"];
const folder = folderOf("shift");
const whole = Object.fromEntries(
  readdirSync(folder).map((name) => [name, new Uint8Array(readFileSync(join(folder, name)))]),
);
const random = new Random(11, 0);
const below = (/** @type {number} */ n) => Math.floor(random.next() * n);

/** The files with hashes and digest computed again. @param {Record<string, Uint8Array>} files */
function sealed(files) {
  const { digest: _, ...spec } = JSON.parse(new TextDecoder().decode(files["spec.json"]));
  for (const [name, facts] of Object.entries(spec.files ?? {})) {
    if (!facts || typeof facts !== "object" || !files[name]) continue;
    Object.assign(facts, { sha256: ownSha256(files[name]), num_bytes: files[name].length });
  }
  const head = `${JSON.stringify(spec).slice(0, -1)}, `;
  const digest = ownSha256(new TextEncoder().encode(head));
  return { ...files, "spec.json": new TextEncoder().encode(`${head}"digest": "${digest}"}`) };
}

/** A file with a byte changed, cut off, or with more at its end. @param {Uint8Array} bytes */
function damaged(bytes) {
  const kind = below(4);
  if (kind === 0) return bytes.slice(0, below(bytes.length));
  if (kind === 1) return Uint8Array.from([...bytes, 0]);
  const changed = bytes.slice();
  changed[below(kind === 2 ? Math.min(64, bytes.length) : bytes.length)] ^= 1 + below(255);
  return changed;
}

/** A spec in which one value is another. */
function otherSpec() {
  const text = new TextDecoder().decode(whole["spec.json"]);
  const values = [...text.matchAll(/: ("[^"]*"|-?\d+|\[\]|true|false|null)/g)];
  const { index = 0, 0: found } = values[below(values.length)];
  return `${text.slice(0, index)}: ${VALUES[below(VALUES.length)]}${text.slice(index + found.length)}`;
}

/** @param {Record<string, Uint8Array>} files */
async function outcome(files) {
  try {
    const model = await open(files, { device: "wasm" });
    await model.check();
    await all(model.generate([1, 2], { maxTokens: 3 }));
    await model.close();
    return "opened";
  } catch (error) {
    if (error instanceof XLExportError && !error.message.includes("\n")) return "refused";
    throw error;
  }
}

test("a damaged artefact never ends in anything but a sentence", async () => {
  const counts = { opened: 0, refused: 0 };
  for (let n = 0; n < COUNT; n++) {
    const name = READ[below(READ.length)];
    const files =
      n % 2
        ? { ...whole, "spec.json": new TextEncoder().encode(otherSpec()) }
        : { ...whole, [name]: damaged(whole[name]) };
    let made = files;
    try {
      if (n % 3) made = sealed(files);
    } catch (error) {
      assert.ok(error instanceof SyntaxError || error instanceof TypeError); // what is no JSON has no digest
    }
    counts[await outcome(made)]++;
  }
  assert.ok(counts.refused > COUNT / 3, JSON.stringify(counts));
  assert.equal(await outcome(whole), "opened"); // and WebAssembly is as sound as before
  assert.equal(await outcome(sealed(whole)), "opened");
});
