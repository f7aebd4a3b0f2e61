"""A stream that the page saves goes on in C++, and one of C++ in the page's module, with the same answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cpp.program import Driver
from tests.web.npm import copied_module, run_node

BEGINNING, AFTER = "A stream that goes on elsewhere", [5, 9, 2, 31, 7, 7, 12, 40]
TOKENS, NATS = 40, 1e-4
# Saves as the page does, with the page's note in the file. Then it continues what each side has saved.
PROGRAM = """
import { readFileSync, writeFileSync } from "node:fs";
import { open } from "./src/index.js";
import { noteOf, withNote } from "./page/saved.js";
import { Stream } from "./page/stream.js";

const { folders, beginning, after, tokens } = JSON.parse(process.argv[2]);
const found = {};
for (const [name, { artefact, saved, other }] of Object.entries(folders)) {
  const model = await open(artefact, { device: "wasm" });
  const stream = new Stream(model, await model.start());
  await stream.edit(beginning);
  for await (const _ of stream.generate({ maxTokens: tokens, temperature: 0 }));
  const file = withNote(await model.saveMemory(stream.memory), stream.note());
  if (noteOf(file).text !== stream.text) throw new Error("the file has no note");
  writeFileSync(saved, file);
  const next = async (path) => {
    const memory = await model.loadMemory(readFileSync(path));
    const ids = [];
    const options = { maxTokens: tokens, temperature: 0 };
    for await (const piece of model.generate(after, { ...options, memory: await memory.copy() }))
      ids.push(piece.token);
    const { surprisals } = await model.score(after, { memory, unit: "nats" });
    return { ids, scores: Array.from(surprisals.slice(1), (nats) => -nats) };
  };
  found[name] = { ids: stream.ids, mine: await next(saved), theirs: await next(other) };
  await model.close();
}
console.log(JSON.stringify(found));
"""


@pytest.mark.slow
def test_a_stream_changes_sides_between_the_page_and_cpp(
    driver: Driver, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    module = copied_module(tmp_path / "web")
    (module / "sides.mjs").write_text(PROGRAM)
    folders = {
        form: {
            "artefact": str(folder),
            "saved": str(tmp_path / f"{form}-page.stream"),
            "other": str(tmp_path / f"{form}-cpp.stream"),
        }
        for form, folder in artefacts.items()
    }
    greedy = {"tokens": TOKENS, "temperature": 0.0}
    written = {
        form: driver.ask(
            "generate", artefacts[form], prompt=BEGINNING, save=folders[form]["other"], **greedy
        )["ids"]
        for form in artefacts
    }
    asked = {"folders": folders, "beginning": BEGINNING, "after": AFTER, "tokens": TOKENS}
    found = json.loads(run_node("sides.mjs", json.dumps(asked), cwd=module))
    for form, folder in artefacts.items():
        page = found[form]
        assert page["ids"][len(BEGINNING) :] == written[form]
        question = {"ids": AFTER, "lengths": [len(AFTER) - 1]}
        alone = np.array(driver.ask("steps", folder, **question)["scores"])
        for read, file in (("mine", "saved"), ("theirs", "other")):
            path = folders[form][file]
            expected = driver.ask("generate", folder, ids=AFTER, load=path, **greedy)["ids"]
            assert len(expected) == TOKENS
            assert page[read]["ids"] == expected, (form, file)
            # With random weights the likeliest token hardly depends on the memory; its log-probability does.
            scores = np.array(driver.ask("steps", folder, load=path, **question)["scores"])
            assert np.abs(page[read]["scores"] - scores).max() < NATS, (form, file)
            assert np.abs(alone - scores).max() > 20 * NATS, "what comes next follows from the memory"
