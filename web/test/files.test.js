/** Files: hashes, what is no artefact, and servers that answer something else. */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { cpSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { test } from "node:test";
import { ownSha256, sha256 } from "../src/files/sha256.js";
import { XLExportError, open } from "../src/node.js";
import { folderOf, given } from "./setup.js";

const folder = folderOf("ring");
const files = Object.fromEntries(
  readdirSync(folder).map((name) => [name, new Uint8Array(readFileSync(join(folder, name)))]),
);

test("the own SHA-256 equals the platform's, at every border of a block", async () => {
  for (const length of [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1000, 70000]) {
    const bytes = Uint8Array.from({ length }, (_, i) => (i * 31 + length) & 255);
    assert.equal(ownSha256(bytes), await sha256(bytes));
  }
});

test("what is no artefact is refused in one sentence", async () => {
  const without = Object.fromEntries(Object.entries(files).filter(([name]) => name !== "vocab.json"));
  for (const [address, words] of /** @type {[any, RegExp][]} */ ([
    [without, /vocab\.json is not among the given files/],
    [{}, /spec\.json is not among/],
    [join(folder, "nowhere"), /does not exist; give the address/],
  ])) {
    await assert.rejects(open(address, { device: "wasm" }), (error) => isSentence(error, words));
  }
  await assert.rejects(open(files, { device: /** @type {any} */ ("tpu") }), (error) =>
    isSentence(error, /device is "tpu"/),
  );
});

test("a named pipe or a device in place of a file is refused", async () => {
  for (const name of ["spec.json", "weights.bin"]) {
    for (const [program, ...options] of [["mkfifo"], ["ln", "-s", "/dev/zero"]]) {
      const copy = join(given.scratch, `${program}-${name}`);
      cpSync(folder, copy, { recursive: true });
      rmSync(join(copy, name));
      execFileSync(program, [...options, join(copy, name)]);
      await assert.rejects(open(copy, { device: "wasm" }), (error) =>
        isSentence(error, new RegExp(`${name} could not be read: it is not a regular file`)),
      );
    }
  }
});

test("a server's failures are told, and bytes are counted", async () => {
  /** @type {Record<string, (response: import("node:http").ServerResponse) => void>} */
  let special = {};
  const asked = new Set();
  const server = createServer((request, response) => {
    asked.add(request.headers["cache-control"]);
    const name = String(request.url).split("/").at(-1) ?? "";
    if (special[name]) return special[name](response);
    if (!files[name]) return response.writeHead(404).end();
    return response.end(files[name]);
  }).listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  const { port } = /** @type {import("node:net").AddressInfo} */ (server.address());
  const url = `http://127.0.0.1:${port}/model`;
  try {
    /** @type {import("../index.js").Progress[]} */
    const heard = [];
    const model = await open(url, { device: "wasm", onProgress: (progress) => heard.push(progress) });
    assert.ok(heard.every(({ loaded, total }) => loaded <= total));
    assert.equal(heard.at(-1)?.loaded, heard.at(-1)?.total);
    assert.deepEqual([...new Set(heard.map(({ file }) => file))].sort(), [
      "step.onnx",
      "vocab.json",
      "weights.bin",
    ]);
    assert.deepEqual([...asked], ["max-age=0"]); // a browser then asks whether a kept file is still the same
    await model.close();
    for (const [name, answer, words] of /** @type {[string, (response: any) => void, RegExp][]} */ ([
      [
        "spec.json",
        (response) => response.writeHead(404).end(),
        /spec\.json could not be read: the server answered 404/,
      ],
      ["weights.bin", (response) => response.writeHead(503).end(), /answered 503/],
      ["sampling.json", (response) => response.writeHead(503).end(), /answered 503/],
      [
        "weights.bin",
        (response) => response.end(files["weights.bin"].slice(5)),
        /has \d+ bytes, expected \d+/,
      ],
      [
        "weights.bin",
        (response) => response.end(Buffer.concat([files["weights.bin"], Buffer.alloc(9)])),
        /has more than the \d+ bytes/,
      ],
      [
        "weights.bin",
        (response) => response.write("x", () => response.destroy()),
        /check the address and the connection/,
      ],
    ])) {
      special = { [name]: answer };
      await assert.rejects(open(url, { device: "wasm" }), (error) => isSentence(error, words));
    }
    special = {};
    const stopped = open(url, { device: "wasm", signal: AbortSignal.abort() });
    await assert.rejects(stopped, { name: "AbortError" });
  } finally {
    server.closeAllConnections();
    server.close();
  }
  await assert.rejects(open(url, { device: "wasm" }), (error) => isSentence(error, /could not be read/));
});

/** @param {unknown} error @param {RegExp} words */
function isSentence(error, words) {
  assert.ok(error instanceof XLExportError, String(/** @type {any} */ (error)?.stack));
  assert.match(error.message, words);
  assert.match(error.message, /^[^\n]*[;:][^\n]*\.$/);
  return true;
}
