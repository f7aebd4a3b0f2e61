"""A stream that the page saves goes on in C++, and one of C++ in the page's module, with the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cpp.program import Driver
from tests.web.npm import copied_module, run_node

BEGINNING, AFTER = "A stream that goes on elsewhere", [5, 9, 2]
TOKENS = 40
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
    const options = { memory, maxTokens: tokens, temperature: 0 };
    for await (const piece of model.generate(after, options)) ids.push(piece.token);
    return ids;
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
        of_page, of_cpp = (
            driver.ask("generate", folder, ids=AFTER, load=folders[form][file], **greedy)["ids"]
            for file in ("saved", "other")
        )
        assert len(of_page) == TOKENS
        alone = driver.ask("generate", folder, ids=AFTER, **greedy)["ids"]
        assert alone not in (of_page, of_cpp), "what comes next follows from the memory"
        assert page["mine"] == of_page, f"{form}: C++ goes on from the page's file as the page does"
        assert page["theirs"] == of_cpp, f"{form}: the module goes on from the file of C++ as C++ does"
