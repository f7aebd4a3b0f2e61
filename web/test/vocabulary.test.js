/** Texts that are cut or stopped anywhere, and what is no vocabulary. tests/parity compares ids and texts. */
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { loadLibrary } from "../src/engine/runtime.js";
import { ownSha256 } from "../src/files/sha256.js";
import { XLExportError, decode } from "../src/node.js";
import { GrowingText } from "../src/text/growing.js";
import { pieces } from "../src/vocabulary/subword.js";
import { readVocabulary } from "../src/vocabulary/index.js";
import { given, vocabularyIn } from "./setup.js";

test("half a character at the end of a text is shown, or waits for the rest of the text", async () => {
  const content = new TextEncoder().encode(JSON.stringify({ kind: "byte" }));
  const bytes = await readVocabulary(async () => content, loadLibraryNever);
  for (const goesOn of [false, true]) {
    const text = new GrowingText(bytes.decoder(), ["stop"], "", goesOn);
    assert.equal(text.add(97, false) + text.add(0xc3, true), goesOn ? "a" : "a\ufffd");
    assert.equal(text.ended, "length");
  }
  const ended = new GrowingText(bytes.decoder(), [], "");
  assert.equal(ended.add(0xc3, false) + ended.finish(), "\ufffd");
});

test("a stop string of byte tokens ends the text at once", async () => {
  const found = given.vocabularies.find(({ name }) => name === "byte-fallback");
  assert.ok(found);
  const vocabulary = await vocabularyIn(found.folder);
  const text = new GrowingText(vocabulary.decoder(), ["\n"], "");
  const pieces = vocabulary.encode("the cat\n").map((id) => text.add(id, false));
  assert.equal(pieces.join(""), "the cat");
  assert.equal(text.ended, "stop");
});

test("a newline of byte tokens is shown once", async () => {
  const found = given.vocabularies.find(({ name }) => name === "byte-fallback");
  assert.ok(found);
  const vocabulary = await vocabularyIn(found.folder);
  const [line, the] = ["the cat\n", " the"].map((text) => vocabulary.encode(text));
  const decoder = vocabulary.decoder();
  decoder.prime(line);
  const after = new GrowingText(decoder, ["\n"], "");
  const added = the.map((id) => after.add(id, false)).join("");
  assert.equal(added, decode(vocabulary, [...line, ...the]).slice(8));
  const turn = new GrowingText(vocabulary.decoder(), [], "", true);
  const shown = line.map((id, at) => turn.add(id, at === line.length - 1));
  assert.equal(shown.join(""), "the cat\n");
});

test("a long text is cut where Python cuts it", () => {
  const [text, ...expected] = given.chunks;
  assert.deepEqual([...pieces(text)], expected);
});

test("a vocabulary with any other value in any field opens, or is refused in one sentence", async () => {
  const odd = [null, -1, 0, 5, 1.5, true, "", "x", [], [5], [[]], {}, { a: 1 }, { length: 3 }];
  for (const kind of ["byte-values", "char", "word-lines", "ids-names", "byte-level", "byte-fallback"]) {
    const found = given.vocabularies.find(({ name }) => name === kind);
    assert.ok(found, kind);
    const read = (/** @type {string} */ name) => JSON.parse(readFileSync(join(found.folder, name), "utf-8"));
    const files = Object.fromEntries(readdirSync(found.folder).map((name) => [name, read(name)]));
    for (const [file, content] of Object.entries(files)) {
      const optional = kind === "byte-values" ? ["values", "skipped"] : [];
      const fields = new Set([...Object.keys(content), ...optional]);
      for (const [field, value] of [...fields].flatMap((key) => odd.map((each) => [key, each]))) {
        const other = { ...files, [file]: { ...content, [String(field)]: value } };
        const bytes = (/** @type {any} */ data) => new TextEncoder().encode(JSON.stringify(data));
        if (file !== "vocab.json")
          other["vocab.json"] = { ...files["vocab.json"], sha256: ownSha256(bytes(other[file])) };
        try {
          const read = async (/** @type {string} */ name) => bytes(other[name]);
          const vocabulary = await readVocabulary(read, (name) => loadLibrary(name, undefined));
          decode(vocabulary, vocabulary.encode("the cat"));
        } catch (error) {
          const told = `${kind}: ${field} ${JSON.stringify(value)}: ${/** @type {any} */ (error)?.stack}`;
          assert.ok(error instanceof XLExportError && !error.message.includes("\n"), told);
        }
      }
    }
  }
});

/** @type {(name: string) => Promise<never>} */
const loadLibraryNever = async () => assert.fail("no library is needed");
