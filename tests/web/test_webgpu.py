"""A graph of `--target web` in Chromium, on WebGPU in software (SwiftShader) and without an adapter.

Its speed there says nothing of a graphics processor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import generate, open_session
from runtimes.contract.sampling import Sampler
from runtimes.contract.saved_streams import load_memory
from tests.browsers import SWIFTSHADER
from xl_export.artefact.export import export

pytestmark = pytest.mark.slow
WORK = """async ([prompt, next, count]) => {
  const {model} = page;
  const greedy = [];
  const options = {temperature: 0, maxTokens: count};
  for await (const piece of model.generate(prompt, options)) greedy.push(piece.token);
  const memory = await model.start();
  await model.feed(prompt, memory);
  const fork = await memory.copy();
  await model.feed(next, fork);
  const saved = await model.saveMemory(memory);
  const loaded = await model.loadMemory(saved);
  const answers = [];
  for (const each of [memory, loaded]) answers.push(Array.from((await model.predict(next, each)).data));
  return {greedy, saved: Array.from(saved), answers, facts: model.facts, report: await model.check()};
}"""


@pytest.fixture(scope="module")
def artefact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(run, tmp_path_factory.mktemp("web") / "ring", memory="ring", target="web")


@pytest.mark.parametrize("adapter", [True, False])
def test_memory_stays_on_the_gpu_with_python_s_answers(
    adapter: bool,
    artefact: Path,
    make_site: Callable[..., Path],
    open_page: Callable[..., Any],
    tokens: np.ndarray,
    tmp_path: Path,
) -> None:
    page = open_page(make_site(artefact), flags=SWIFTSHADER if adapter else ())
    prompt, following = tokens[:21], tokens[21:24]
    answer = page.do(WORK, [prompt.tolist(), following.tolist(), 50])
    facts = answer["facts"]
    if adapter:
        assert (facts["device"], facts["deviceReason"], facts["memory"]) == ("webgpu", None, "GPU buffers")
    else:
        assert (facts["device"], facts["memory"]) == ("wasm", "in place")
        assert facts["deviceReason"] == "WebGPU found no adapter"
    assert answer["report"]["passed"]
    assert answer["report"]["maxDifference"] <= 1e-4
    session = open_session(artefact, threads=1)
    pieces = generate(session, prompt, max_tokens=50, sampler=Sampler(temperature=0))
    assert answer["greedy"] == [piece.token for piece in pieces]
    stream = tmp_path / "stream"
    stream.write_bytes(bytes(answer["saved"]))
    logits, _ = session.predict(following[None], load_memory(stream, session))
    for found in answer["answers"]:
        assert np.abs(np.array(found) - logits[0]).max() < 1e-3
