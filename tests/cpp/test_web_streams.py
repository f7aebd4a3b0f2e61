"""A stream that the page saves goes on in C++, and one of C++ in the page's module, with the same answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.operations import Program
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
    cpp: Program, artefacts: dict[str, Path], tmp_path: Path
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

    def generated(form: str, **given: Any) -> list[int]:
        question = {"stream": "a", "max_tokens": TOKENS, "temperature": 0}
        return list(cpp.ask("generate", **question, **given)["tokens"])

    def opened(form: str, file: str | None = None) -> None:
        cpp.ask("open", model=str(artefacts[form]))
        cpp.ask("start", stream="a") if file is None else cpp.ask("load", stream="a", file=file)

    written = {}
    for form in artefacts:
        opened(form)
        written[form] = generated(form, text=BEGINNING)
        cpp.ask("save", stream="a", file=folders[form]["other"])
    asked = {"folders": folders, "beginning": BEGINNING, "after": AFTER, "tokens": TOKENS}
    found = json.loads(run_node("sides.mjs", json.dumps(asked), cwd=module))
    for form in artefacts:
        page = found[form]
        assert page["ids"][len(BEGINNING) :] == written[form]
        opened(form)
        alone = np.array(cpp.ask("score", stream="a", tokens=[AFTER])["log_probs"][1:])
        for read, file in (("mine", "saved"), ("theirs", "other")):
            path = folders[form][file]
            opened(form, path)
            expected = generated(form, tokens=AFTER)
            assert len(expected) == TOKENS
            assert page[read]["ids"] == expected, (form, file)
            # With random weights the likeliest token hardly depends on the memory; its log-probability does.
            opened(form, path)
            scores = np.array(cpp.ask("score", stream="a", tokens=[AFTER])["log_probs"][1:])
            assert np.abs(page[read]["scores"] - scores).max() < NATS, (form, file)
            assert np.abs(alone - scores).max() > 20 * NATS, "what comes next follows from the memory"
