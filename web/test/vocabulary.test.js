/** Texts and ids are those of Python, on random Unicode texts. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { loadLibrary } from "../src/engine/runtime.js";
import { XLExportError, decode } from "../src/index.js";
import { pieces } from "../src/vocabulary/subword.js";
import { readVocabulary } from "../src/vocabulary/index.js";
import { given } from "./setup.js";

/** @param {string} folder */
const vocabularyIn = (folder) =>
  readVocabulary(
    async (name) => new Uint8Array(readFileSync(join(folder, name))),
    (name) => loadLibrary(name, undefined),
  );

for (const { name, folder, texts, decoded } of given.vocabularies) {
  test(`${name}: ids and texts are Python's`, async () => {
    const vocabulary = await vocabularyIn(folder);
    for (const { text, ids } of texts) {
      if (ids === null) assert.throws(() => vocabulary.encode(text), XLExportError, JSON.stringify(text));
      else assert.deepEqual(vocabulary.encode(text), ids, JSON.stringify(text));
    }
    for (const { ids, pieces: expected } of decoded) {
      const decoder = vocabulary.decoder();
      assert.deepEqual(
        ids.map((id) => decoder(id)),
        expected,
        String(ids),
      );
      assert.equal(decode(vocabulary, ids), expected.join(""));
    }
  });
}

test("a long text is cut where Python cuts it", () => {
  const [text, ...expected] = given.chunks;
  assert.deepEqual([...pieces(text)], expected);
});

test("what is no vocabulary is refused in one sentence", async () => {
  const files = (/** @type {object} */ data) => async () => new TextEncoder().encode(JSON.stringify(data));
  for (const data of [
    null,
    [],
    {},
    { kind: "letters" },
    { kind: "char", symbols: ["ab"] },
    { kind: "char", symbols: ["a", "a"] },
    { kind: "byte", values: [300] },
    { kind: "byte", values: [] },
    { kind: "word", symbols: ["a"], unknown: "a b" },
    { kind: "ids", size: 0 },
    { kind: "ids", size: 2, names: ["a"] },
    { kind: "ids", size: 2, special: { beginning: 2 } },
    { kind: "subword", library: "sentencepiece", file: "tokenizer.model", size: 3 },
  ]) {
    await assert.rejects(readVocabulary(files(data), loadLibraryNever), XLExportError, JSON.stringify(data));
  }
  const vocabulary = await readVocabulary(files({ kind: "ids", size: 4 }), loadLibraryNever);
  assert.throws(() => vocabulary.encode("a"), /takes token ids from 0 to 3 and no text/);
});

/** @type {(name: string) => Promise<never>} */
const loadLibraryNever = async () => assert.fail("no library is needed");
