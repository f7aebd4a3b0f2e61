"""lm-eval's own client for completions gets the log-probabilities of `xl-export eval`."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest

from runtimes.tasks.evaluate import evaluate
from tests.serve.http.conftest import running, sources

pytestmark = pytest.mark.slow
# What its client needs; all that the package itself asks for is some gigabytes.
NEEDS = ("requests", "aiohttp", "tenacity", "tqdm", "jinja2", "pyyaml", "numpy", "typing_extensions")
PROGRAM = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, file = sys.argv[1:]
model = LocalCompletionsAPI(
    base_url=url, model="tiny", tokenizer_backend="auto", tokenized_requests=True,
    max_length=1 << 20, batch_size=4, num_concurrent=1,
)
pairs = json.load(open(file))
asked = [
    Instance(request_type="loglikelihood", doc={}, arguments=tuple(pair), idx=index)
    for index, pair in enumerate(pairs)
]
likelihoods = model.loglikelihood(asked)
asked = [
    Instance(request_type="generate_until", doc={}, arguments=(pair[0] + pair[1][:20], {"until": ["\\n"],
    "max_gen_toks": 12, "temperature": 0}), idx=index)
    for index, pair in enumerate(pairs)
]
print(json.dumps({"likelihoods": likelihoods, "texts": model.generate_until(asked)}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has lm-eval; that of XL_EXPORT_LM_EVAL where it is set."""
    if given := os.environ.get("XL_EXPORT_LM_EVAL"):
        return given
    folder = tmp_path_factory.mktemp("lm-eval")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    for packages in (("--no-deps", "lm_eval==0.4.13"), NEEDS):
        done = subprocess.run([*pip, *packages], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"lm-eval cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return str(folder / "bin" / "python")


def test_it_gets_what_eval_measures(
    python: str, session, artefacts: dict[str, Path], text: str, tmp_path: Path
) -> None:
    pairs = [(text[at], text[at + 1 : at + 1 + length]) for at, length in ((0, 700), (900, 80), (2000, 33))]
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    with running(sources(("tiny", artefacts["ring"]))) as server:
        command = [python, tmp_path / "program.py", f"{server.at}/v1/completions", tmp_path / "pairs.json"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    for (first, rest), (found, _) in zip(pairs, answer["likelihoods"], strict=True):
        tokens = session.vocab.encode(first + rest)
        measured = evaluate(session, tokens)
        expected = -measured.bits_per_token * np.log(2) * (len(tokens) - 1)
        assert found == pytest.approx(expected, abs=1e-3 * len(rest))
    assert [len(each) <= 12 for each in answer["texts"]] == [True] * 3
    assert all(answer["texts"])
