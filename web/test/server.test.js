/** The page's connection to a server: operations that fail, or that are stopped. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { connect } from "../page/backend-server.js";

const end = { object: "stream.append", tokens: [1], texts: ["a"], bits: [0] };
const events = (/** @type {any[]} */ ...data) =>
  [...data.map((each) => JSON.stringify(each)), "[DONE]"].map((each) => `data: ${each}\n\n`).join("");

/**
 * A stream of a page that is connected to a server, and what was asked of that.
 * @param {(path: string) => any} answers to the operations; a text is a body of events
 */
async function stream(answers) {
  /** @type {string[]} */
  const asked = [];
  const answer = async (/** @type {string} */ path) => {
    asked.push(path);
    if (path === "v1/models") return { data: [{ id: "tiny", xl_export: { vocabulary: { kind: "char" } } }] };
    if (path === "v1/streams") return { stream: { id: "s", position: 0 } };
    return path === "v1/streams/s" ? { position: 7 } : answers(path);
  };
  Object.assign(globalThis, {
    sessionStorage: { getItem: () => null },
    fetch: async (/** @type {string} */ path) => {
      const given = await answer(path);
      const ok = typeof given === "string" || !given.error;
      return typeof given === "string"
        ? { ok, body: new Blob([given]).stream() }
        : { ok, json: async () => given };
    },
  });
  const handle = await (await connect({ model: null })).start();
  asked.length = 0;
  return { handle, asked };
}

test("an operation that is refused leaves the stream where the server has it", async () => {
  const { handle } = await stream(() => ({ error: { message: "no", code: "other_position" } }));
  await assert.rejects(handle.append([1]), /no/);
  assert.equal(handle.position, 7);
});

test("a stopped operation is cancelled on the server once it runs there", async () => {
  let cancels = 0;
  const controller = new AbortController();
  /** @type {(answer: any) => void} */
  let finish = () => {};
  const { handle } = await stream((path) => {
    if (path.endsWith("append")) return new Promise((resolve) => (finish = resolve));
    cancels++; // the first two come before the operation
    if (cancels === 3) setTimeout(() => finish({ error: { message: "cancelled", code: "cancelled" } }), 30);
    return { cancelled: cancels === 3 };
  });
  const work = handle.append([1], { signal: controller.signal });
  setTimeout(() => controller.abort(), 1);
  await assert.rejects(work, { name: "AbortError" });
  assert.equal(cancels, 3);
});

test("an operation that was stopped before it began is not sent", async () => {
  const { handle, asked } = await stream(() => end);
  await assert.rejects(handle.append([1], { signal: AbortSignal.abort() }), { name: "AbortError" });
  assert.deepEqual(asked, []);
});

test("generated tokens come in events, of which the last one has the end", async () => {
  const chunk = { object: "stream.chunk", tokens: [1], texts: ["a"], bits: [1], appended: 0 };
  const last = { ...chunk, tokens: [2], texts: ["b"], finish_reason: "length", stream: { position: 2 } };
  const { handle } = await stream(() => events(chunk, last));
  const found = [];
  for await (const { text } of handle.generate([], {})) found.push(text);
  assert.deepEqual([found, handle.ended, handle.position], [["a", "b"], "length", 2]);
});

test("an error in the last event is raised, and so is an answer that is cut", async () => {
  const failed = await stream(() => events({ error: { message: "the server stops", code: "stopping" } }));
  await assert.rejects(failed.handle.generate([], {}).next(), /the server stops/);
  const cut = await stream(() => 'data: {"object": "stream.chunk"');
  await assert.rejects(cut.handle.generate([], {}).next(), /connection to the server has ended/);
});
