/** The page's connection to a server: requests whose socket changes, or that are stopped. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { connect } from "../page/backend-server.js";

const end = { event: "end", tokens: [1], texts: ["a"], bits: [0] };

/** A socket whose other end is the test. */
class FakeSocket {
  static OPEN = 1;
  /** @type {FakeSocket[]} */
  static all = [];
  readyState = 0;
  /** @type {any[]} */
  sent = [];
  /** @type {any} */
  onopen;
  /** @type {any} */
  onclose;
  /** @type {any} */
  onmessage;

  constructor() {
    FakeSocket.all.push(this);
  }

  open() {
    this.readyState = FakeSocket.OPEN;
    this.onopen();
  }

  close() {
    this.readyState = 2; // `onclose` comes later
  }

  /** @param {string} text */
  send(text) {
    this.sent.push(JSON.parse(text));
  }

  answer() {
    this.onmessage({ data: JSON.stringify({ tag: this.sent.at(-1).tag, ...end }) });
  }
}

/** Two streams of a page that is connected to a server without other answers. */
async function streams() {
  FakeSocket.all = [];
  let count = 0;
  const answers = (/** @type {string} */ path) => {
    if (path === "v1/models") return { data: [{ id: "tiny", xl_export: { vocabulary: { kind: "char" } } }] };
    return path === "v1/streams" ? { stream: { id: `s${count++}`, position: 0 } } : { position: 0 };
  };
  Object.assign(globalThis, {
    WebSocket: FakeSocket,
    location: { href: "http://server/" },
    sessionStorage: { getItem: () => null },
    fetch: async (/** @type {string} */ path) => ({ ok: true, json: async () => answers(path) }),
  });
  const backEnd = await connect({ model: null });
  return [await backEnd.start(), await backEnd.start()];
}

/** Lets everything go on that waits for nothing else. */
const settled = () => new Promise((resolve) => setImmediate(resolve));

test("a socket that closes fails its own requests only", async () => {
  const [one, two] = await streams();
  const failing = one.append([1]);
  FakeSocket.all[0].open();
  await settled();
  const answered = two.append([1]);
  FakeSocket.all[1].open();
  await settled();
  FakeSocket.all[0].onclose();
  await assert.rejects(failing, /connection to the stream has ended/);
  FakeSocket.all[1].answer();
  assert.deepEqual(await answered, [0]);
});

test("a request that is stopped while it connects is not sent", async () => {
  const [stream] = await streams();
  const controller = new AbortController();
  const work = stream.append([1], { signal: controller.signal });
  controller.abort();
  FakeSocket.all[0].open();
  await assert.rejects(work, { name: "AbortError" });
  assert.deepEqual(FakeSocket.all[0].sent, []);
});
