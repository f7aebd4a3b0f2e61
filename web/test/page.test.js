/** The text of the page and the memory of the model: they hold the same tokens after every change. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { WorkerBackEnd, WorkerHandle } from "../page/backend-worker.js";
import { Speed, typical } from "../page/plots.js";
import { Refusal, Stream } from "../page/stream.js";
import { openingEnds } from "../page/text-work.js";
import { StoppedError, XLExportError } from "../src/errors.js";
import { Random } from "../src/text/random.js";
import { wholeTokens } from "../src/vocabulary/base.js";
import { given, vocabularyIn } from "./setup.js";

const SEGMENT = 8;
const LETTERS = "abcdefghijklmnopqrstuvwxyz XY";

/** A vocabulary of the letters. */
const letters = {
  kind: "char",
  size: LETTERS.length,
  special: {},
  encode: (/** @type {string} */ text) => Array.from(text, (letter) => LETTERS.indexOf(letter)),
  decoder: () => wholeTokens((id) => LETTERS[id]),
};

/** A model whose memory is the list of the tokens that it has seen. */
class FakeModel {
  /** @param {any} vocabulary */
  constructor(vocabulary = letters) {
    this.facts = {};
    this.spec = { model: {} };
    this.vocabulary = vocabulary;
    this.failsAfter = Infinity; // tokens that are fed before the work fails
    this.ring = true;
  }

  memory(tokens = /** @type {number[]} */ ([])) {
    return {
      tokens,
      furthest: tokens.length,
      predicts: false, // whether it was fed since it was loaded or taken back
      get position() {
        return this.tokens.length;
      },
      async restart() {
        [this.tokens, this.furthest, this.predicts] = [[], 0, false];
      },
      async dispose() {},
    };
  }

  /** @param {number[]} ids @param {any} memory @param {{signal?: AbortSignal}} [options] */
  async feed(ids, memory, { signal } = {}) {
    for (const id of ids) {
      await null;
      if (signal?.aborted) throw new StoppedError();
      if (this.failsAfter-- <= 0) throw new XLExportError("it failed.");
      memory.tokens = memory.tokens.concat(id);
      memory.predicts = true;
      memory.furthest = Math.max(memory.furthest, memory.tokens.length);
    }
  }

  /** @param {number[]} ids @param {any} options */
  async score(ids, { memory, signal }) {
    if (ids.length > 1000) memory.tokens = memory.tokens.concat(ids);
    else await this.feed(ids, memory, { signal });
    return { surprisals: new Float64Array(ids.length) };
  }

  /** @param {any} memory @param {number} count */
  async rewind(memory, count) {
    const most = SEGMENT - (memory.furthest - memory.tokens.length);
    if (!this.ring || count > most) throw new XLExportError("cannot take back that many tokens.");
    memory.tokens = memory.tokens.slice(0, memory.tokens.length - count);
    memory.predicts = false;
  }

  /** @param {number[]} prompt @param {any} options */
  async *generate(prompt, { memory, ids, signal }) {
    if (!prompt.length && !memory.predicts) throw new XLExportError("no token is predicted.");
    await this.feed(prompt, memory, { signal });
    const decoder = this.vocabulary.decoder();
    decoder.prime(memory.tokens);
    for (const id of ids) {
      await this.feed([id], memory);
      yield { token: id, text: decoder(id), nats: 1 };
    }
  }

  /** @param {any} memory */
  async saveMemory(memory) {
    return new TextEncoder().encode(JSON.stringify(memory.tokens));
  }

  /** @param {Uint8Array} file */
  async loadMemory(file) {
    return this.memory(JSON.parse(new TextDecoder().decode(file)));
  }
}

/** @param {any} model @returns {any} */
const streamOf = (model) => new Stream(new WorkerBackEnd(model), new WorkerHandle(model, model.memory()));

/**
 * The memory holds the tokens of the text.
 * @param {any} stream @param {string} text @param {string} [where]
 */
function agree(stream, text, where) {
  const tokens = stream.handle.memory.tokens.slice(stream.base);
  assert.deepEqual(tokens, [...stream.earlier, ...stream.ids], where);
  assert.equal(stream.text, text, where);
  assert.equal(stream.bits.length, stream.ids.length, where);
  assert.equal(stream.ends.length, stream.ids.length, where);
}

/** A stream that was loaded from the file of another one. @param {string} text */
async function loaded(text) {
  const model = new FakeModel();
  const first = streamOf(model);
  await first.edit(text);
  const file = await model.saveMemory(first.handle.memory);
  const handle = new WorkerHandle(model, await model.loadMemory(file), false);
  const stream = await Stream.of(first.backEnd, { handle, note: first.note(), file }, "loaded");
  agree(stream, text);
  return stream;
}

test("an edit inside a loaded text and one behind it leave the memory with the text", async () => {
  const stream = await loaded("abcdefghijklmnopqrst");
  let text = "abcdefghijklmnopqXX";
  await stream.edit(text);
  agree(stream, text);
  text += "X".repeat(17);
  await stream.edit(text);
  text = "abcdefghijklmnopqXXXXYY";
  await stream.edit(text);
  agree(stream, text);
  assert.ok(stream.handle.predicts);
});

test("where the memory of a file cannot go back, the edit is refused and nothing changes", async () => {
  const stream = await loaded("abcdefghijklmnopqrst");
  await assert.rejects(stream.edit("aX"), Refusal);
  agree(stream, "abcdefghijklmnopqrst");
  await stream.edit("abcdefghijklmnopqrstX");
  agree(stream, "abcdefghijklmnopqrstX");
});

test("after deleting back to the end of a loaded text the next token is predicted", async () => {
  const stream = await loaded("abcdefghijklmnopqrst");
  await stream.edit("abcdefghijklmnopqrst" + "X".repeat(20));
  await stream.edit("abcdefghijklmnopqrst");
  agree(stream, "abcdefghijklmnopqrst");
  assert.ok(stream.handle.predicts);
  for await (const _ of stream.generate({ ids: [0] })) continue;
  agree(stream, "abcdefghijklmnopqrsta");
});

test("work that failed or was stopped in the middle is mended by the next change", async () => {
  for (const ring of [true, false]) {
    for (const failsAfter of [0, 1, 3, 6]) {
      const model = new FakeModel();
      model.ring = ring;
      const stream = streamOf(model);
      await stream.edit("abc");
      model.failsAfter = failsAfter;
      await assert.rejects(stream.edit("abcdefghij"), /it failed/);
      model.failsAfter = Infinity;
      assert.equal(stream.text, "abc");
      await stream.repair();
      agree(stream, "abc", `${ring} ${failsAfter}`);
      model.failsAfter = failsAfter;
      await assert.rejects(stream.edit("abXXXXXX"), /it failed/);
      model.failsAfter = Infinity;
      await stream.edit("abYY");
      agree(stream, "abYY", `${ring} ${failsAfter}`);
      const control = new AbortController();
      const stopped = stream.edit(`abYY${"X".repeat(500)}`, { signal: control.signal });
      setTimeout(() => control.abort());
      await new Promise((resolve) => setTimeout(resolve));
      await stopped.catch(() => {});
      for await (const _ of stream.generate({ ids: [1, 2] })) continue;
      agree(stream, `${stream.text.slice(0, -2)}bc`, `${ring} ${failsAfter}`);
    }
  }
});

test("a pasted text may have more tokens than a call has arguments", async () => {
  const stream = streamOf(new FakeModel());
  const text = "abcdefgh".repeat(40_000);
  await stream.edit(text);
  agree(stream, text);
  const { cut } = stream.shorten(300_000);
  await stream.edit(`${text.slice(cut)}X`);
  agree(stream, `${text.slice(cut)}X`);
});

test("a text that the model begins does not show the space before its first word", async () => {
  const stream = streamOf(new FakeModel());
  const space = LETTERS.indexOf(" ");
  for await (const _ of stream.generate({ ids: [space, 0, space, 1] })) continue;
  agree(stream, "a b");
});

test("the time of a token is that of a quiet device, whatever delays some of it", () => {
  assert.equal(typical([3]), 3);
  assert.equal(typical([9, 2]), 9, "a first measurement may be too short");
  assert.equal(typical([30, 2, 2.1, 19, 0.1, 2, 8, 2.2]), 2);
  const random = new Random(1, 0);
  const speed = new Speed();
  /** @param {number} tokens @param {(at: number) => number} ms for a token */
  const read = (tokens, ms) => {
    let now = 0;
    speed.begin(0, now);
    for (let at = 1; at <= tokens; at++) speed.reach(at, (now += ms(at)));
  };
  read(2000, (at) => (random.next() < 0.02 || at % 300 < 60 ? 12 : 2));
  for (const { ms } of speed.readings) assert.ok(ms < 5, `${ms}`);
  assert.ok(speed.best >= 2, `${speed.best}`);
  assert.equal(speed.busy, false);
  read(300, () => 12);
  assert.equal(speed.readings[0].from, 0);
  assert.equal(speed.readings.at(-1)?.to, 299, "of the text before nothing is shown");
  assert.equal(speed.readings.at(-1)?.ms, 12);
  assert.equal(speed.busy, true);
  speed.readFar(100, [2, 2.5, 30, 2, 40]);
  speed.readFar(10_000, [2.5, 3, 2.4, 2, 2.2]);
  assert.deepEqual(
    speed.readings.map(({ ms }) => ms),
    [2, 2.2],
  );
  assert.equal(speed.busy, false);
});

test("an opening ends with a paragraph, not where its lines are wrapped", () => {
  const wrapped = `${"She went into the wood\nand saw nobody there. ".repeat(6)}She`;
  assert.equal(openingEnds(`${wrapped} went\n`), null);
  assert.equal(openingEnds(`${wrapped} went. `), null);
  for (const end of ["\n\n", ".\n", "!” \n", " . \n", ".\n\n"])
    assert.equal(openingEnds(`${wrapped} went${end}`), "paragraph", JSON.stringify(end));
  assert.equal(openingEnds("A title\n\n"), null, "it is too short");
  assert.equal(openingEnds(`${wrapped.repeat(3)} went. `), "long");
  assert.equal(openingEnds(`${wrapped.repeat(3)} went`), null);
  assert.equal(openingEnds(`${wrapped.repeat(4)} went`), "long");
});

for (const { name, folder, texts } of given.vocabularies.filter((each) => !each.name.startsWith("ids"))) {
  test(`${name}: a text that is typed and edited in pieces has the tokens of the whole`, async () => {
    const vocabulary = await vocabularyIn(folder);
    const random = new Random(2, 0);
    const below = (/** @type {number} */ n) => Math.floor(random.next() * n);
    const model = new FakeModel(vocabulary);
    for (const text of [...texts.slice(-8), "the cat\nsat on the\n\n mat\n"]) {
      const stream = streamOf(model);
      const characters = Array.from(text);
      const edits = [];
      for (let at = 0; at < characters.length; at += 1 + below(4))
        edits.push(characters.slice(0, at).join(""));
      edits.push(text);
      for (let n = 0; n < 4; n++) {
        const at = below(characters.length + 1);
        const other = [
          ...characters.slice(0, at),
          ...["", "the", " ", "\n"][below(4)],
          ...characters.slice(at + below(5)),
        ];
        edits.push(other.join(""));
      }
      for (const shown of edits) {
        try {
          await stream.edit(shown);
        } catch (error) {
          assert.ok(error instanceof XLExportError);
          assert.throws(() => vocabulary.encode(shown), XLExportError);
          continue;
        }
        agree(stream, shown, JSON.stringify([name, shown]));
        assert.deepEqual(stream.ids, vocabulary.encode(shown), JSON.stringify([name, shown]));
        if (stream.ids.length) assert.equal(stream.ends.at(-1), shown.length, JSON.stringify([name, shown]));
      }
    }
  });

  test(`${name}: generated tokens stay, and the text around them is what is shown`, async () => {
    const vocabulary = await vocabularyIn(folder);
    const model = new FakeModel(vocabulary);
    const stream = streamOf(model);
    const typed = ["byte-values", "char"].includes(name) ? "the cat" : "the cat\n";
    await stream.edit(typed);
    const spelled = name.startsWith("word") ? ["the cat the"] : Array.from("the cat the");
    // not as the vocabulary would cut the text
    const ids = spelled.flatMap((part) => vocabulary.encode(part));
    for await (const _ of stream.generate({ ids })) continue;
    const before = [...stream.ids];
    const { text } = stream;
    await stream.edit(`${text} the cat`);
    agree(stream, `${text} the cat`);
    const same = stream.ids.findIndex(
      (/** @type {number} */ id, /** @type {number} */ at) => id !== before[at],
    );
    assert.ok(same >= before.length - 2, `${same} of ${before.length} tokens stay`);
    const { cut } = stream.shorten(9);
    await stream.edit(`${text.slice(cut)} the`);
    agree(stream, `${text.slice(cut)} the`);
    assert.equal(stream.ends.at(-1), stream.text.length);
  });
}
