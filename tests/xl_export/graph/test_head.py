"""The output layer of large vocabularies: only what is asked for is computed, and it is what the whole layer
says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes import Session, generate, open_session
from runtimes.base.logits import log_sum_exp
from runtimes.contract.sampling import Sampler
from runtimes.contract.spec import GRAPH
from runtimes.sessions.onnx_runtime import OrtSession
from runtimes.tasks.evaluate import evaluate
from tests.architectures import ARCHITECTURES
from tests.streams import rows
from xl_export.artefact.export import export

KINDS = ("adaptive-softmax", "adaptive-softmax-untied")


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, make_run: Callable[..., Path]) -> Path:
    return make_run(**ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def artefact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(run, tmp_path_factory.mktemp("head") / "artefact")


@pytest.fixture(scope="module")
def session(artefact: Path) -> Session:
    return open_session(artefact)


@pytest.mark.parametrize("pattern", ["none", "one", "all of one cluster", "all"])
def test_scores_equal_the_whole_distribution_whichever_targets_are_wanted(
    session: Session, tokens: np.ndarray, pattern: str
) -> None:
    batch = rows(tokens, 2, 8)
    targets = np.full((2, 8), -1)
    if pattern == "one":
        targets[1, 3] = 60
    elif pattern == "all of one cluster":
        targets[:] = 0
    elif pattern == "all":
        targets[:] = np.arange(16).reshape(2, 8) * 4
    logits, _ = session.step(batch, session.start(2))
    log_probs, _ = session.score(batch, targets, session.start(2))
    truth = np.take_along_axis(
        logits - log_sum_exp(logits)[..., None], np.maximum(targets, 0)[..., None], axis=-1
    )[..., 0]
    assert np.abs(log_probs - np.where(targets < 0, 0, truth)).max() < 1e-5


def test_scoring_and_generating_ask_for_no_more_than_they_need(
    session: OrtSession, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []  # rows of logits, and targets, of each step
    run = OrtSession._advance

    def spy(self: OrtSession, given: Any, *others: Any, **wanted: Any) -> Any:
        answers = run(self, given, *others, **wanted)
        asked.append((len(answers["logits"]), int((given.get("targets", np.array(-1)) >= 0).sum())))
        return answers

    monkeypatch.setattr(OrtSession, "_advance", spy)
    evaluate(session, tokens[:17], lanes=1)
    list(generate(session, "The function", max_tokens=2, sampler=Sampler(temperature=0)))
    assert asked == [(0, 8), (0, 8), (0, 0), (1, 0), (1, 0)]  # of a prompt only the last piece


def test_the_embedding_is_stored_once(artefact: Path) -> None:
    graph = onnx.load(artefact / GRAPH, load_external_data=False).graph
    tables = {i.name for i in graph.initializer if i.name.startswith("vocabulary.") and "table" in i.name}
    readers = {name: {node.op_type for node in graph.node if name in node.input} for name in tables}
    for name, operators in readers.items():
        assert operators <= {"Gather", "Gemm"}, (name, operators)
        if name.startswith("vocabulary.table") and "output_table" not in str(tables):
            assert operators == {"Gather", "Gemm"}, name
