"""The case that compares an artefact with n-grams and compressors."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cases.learning import text_quality
from runtimes.base.files import write_json
from runtimes.sessions.open import open_session
from tests.benchmarks.shown import in_documents, rows_of
from trainer.data.subwords import learn_subwords
from trainer.run.config import TrainConfig

TEXTS = ("train.txt", "test.txt")
STORIES = [
    "The Fox\nOnce there was a fox.\nIt ran.",
    "The Well\nOnce there was a well, and a fox came to it.",
] * 30


def measure(**options):
    return rows_of("text-quality", text_quality.CASE.size({}), **options)


@pytest.fixture(scope="module")
def teller(make_run: Callable[..., Path], text: str) -> Path:
    """A run with random weights whose tokens are bytes and frequent pairs of them."""
    vocab = learn_subwords("byte-bpe", 280, lambda: iter([text[:20_000]]))
    run = make_run(vocab_size=vocab.size)
    write_json(run / "vocab.json", vocab.to_json())
    (run / "tokenizer.json").write_bytes(vocab.content)
    return run


def test_all_predictors_are_scored_on_the_same_bytes(teller, tmp_path):
    for part, stories in (("train", STORIES), ("test", STORIES[:5])):
        (tmp_path / f"{part}.txt").write_text("".join(story + "\n\n" for story in stories))
        (tmp_path / f"{part}.jsonl").write_text(
            "".join(json.dumps({"text": story}) + "\n" for story in stories)
        )
    rows = {row.name: row for row in measure(parts=tmp_path, artefact=teller)}
    test, session = (tmp_path / "test.txt").read_bytes(), open_session(teller)
    assert rows["gzip -9, alone"].bits_per_byte == 8 * len(gzip.compress(test, 9)) / len(test)
    # The training text holds the test text, so those that have read it hardly need a bit.
    assert rows["xz -9e, after the training text"].bits_per_byte < 0.5 < rows["xz -9e, alone"].bits_per_byte
    assert rows["5-grams, Kneser-Ney"].bits_per_byte < 0.5
    # Every token of the stories and the end of each is predicted, and nothing else.
    ids = [
        np.append(session.vocab.encode(story), session.vocab.special.end_of_document) for story in STORIES[:5]
    ]
    for row in (rows["artefact"], rows["5-grams, Kneser-Ney"]):
        bits = row.bits_per_byte * len(test)
        assert math.isclose(bits / row.bits_per_token, sum(map(len, ids)), rel_tol=1e-9)
    # What a figure depends on stands in its row: the text, the model, and the rule that it was opened with.
    hashes = {part: hashlib.sha256((tmp_path / part).read_bytes()).hexdigest() for part in TEXTS}
    assert all(row.texts == hashes for row in rows.values())
    assert (rows["artefact"].identity, rows["artefact"].rule) == (session.identity, session.rule)
    assert session.rule != TrainConfig.load("stories").evaluation
    assert rows["gzip -9, alone"].identity is None
    assert rows["artefact"].bits_per_byte != rows["artefact, memory cut to zero"].bits_per_byte
    note = in_documents("text-quality", list(rows.values()))[-3]
    assert f"Artefact {session.identity[:12]}…, memory of {session.rule.mem_len} tokens" in note
    assert f"test.txt {hashes['test.txt'][:12]}…" in note
