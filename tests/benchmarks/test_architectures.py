"""Six small models for the same CPU time: nearly equal sizes, all scores, no result where one is wrong."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from benchmarks.cases.learning import architectures
from benchmarks.cases.learning.architectures import MODELS, SIZE, check, recipe
from benchmarks.measure import Limits
from benchmarks.references import ReferenceModel, ReferenceTraining
from benchmarks.runs import History, Run
from runtimes.contract.rule import MemoryRule
from runtimes.tasks.evaluate import evaluate
from tests.benchmarks.shown import call, in_documents, rows_of
from tests.nightly import every
from trainer.data.source import load_source
from trainer.model.config import ModelConfig
from trainer.model.model import count_parameters
from trainer.run.config import TrainConfig
from trainer.run.session import TorchSession
from trainer.training.state import Training


def test_the_models_have_nearly_equal_numbers_of_parameters() -> None:
    counts = [
        count_parameters(dataclasses.replace(ModelConfig(**sizes), vocab_size=256))
        for sizes, _, _ in MODELS.values()
    ]
    assert max(counts) / min(counts) < 1.02


@pytest.mark.parametrize("name", every(3, MODELS))
def test_every_model_passes_its_check(name: str) -> None:
    check(recipe(name, threads=1))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps for each model, few positions, and no measurement of the machine."""
    measured = Limits(read_bytes=1e9, multiply_adds=1e9)
    monkeypatch.setattr(architectures, "affordable", lambda config, seconds: 2)
    monkeypatch.setattr(architectures, "POSITIONS", 20)
    monkeypatch.setattr("benchmarks.history.measure_limits", lambda threads: measured)


def public_code(folder: Path) -> Path:
    """A stand-in for a checkout of adaptive-span, with what the adapter asks of it: it sees the last byte."""
    folder.mkdir()
    (folder / "adaptive_span.py").touch()
    (folder / "models.py").write_text(
        """
import torch
from torch import nn

class Attention(nn.Module):
    def get_cache_size(self):
        return 3

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.Module()
        self.attn.attn = Attention()

class TransformerSeq(nn.Module):
    def __init__(self, vocab_size, hidden_size, attn_span, pers_mem_params, **options):
        super().__init__()
        assert (attn_span, pers_mem_params) == (64, {"pers_mem_size": 532})
        self.layers = nn.ModuleList([Layer()])
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens, memory, target):
        (cache,) = memory
        assert cache.shape == (len(tokens), 3, 128) and (cache == cache.flatten()[0]).all()
        return self.table(tokens).log_softmax(-1), [cache + 1], None
"""
    )
    return folder


@pytest.mark.slow
def test_each_row_is_measured_once(tmp_path: Path, text: str, quick: None) -> None:
    """The second call trains only the seed that is missing, with as many steps as the first seed."""
    content = text[:20_000].encode()
    with gzip.open(tmp_path / "text.gz", "wb") as stream:
        stream.write(content)
    reference = public_code(tmp_path / "adaptive-span")
    arguments = ["run", "architectures", "--text", tmp_path / "text.gz", "--reference", reference]
    arguments += ["--only", "all-attention", "--history", tmp_path / "h.jsonl", "--threads", "1", "--json"]

    def train(seeds: int) -> tuple[list[dict[str, Any]], Result]:
        done = call(*arguments, "--seeds", seeds)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()], done

    first, _ = train(1)
    both, done = train(2)
    assert both[:2] == first
    rows = [row for document in both for row in document["rows"]]
    assert [(row["side"], row["seed"]) for row in rows] == [
        (side, seed) for seed in (0, 1) for side in ("xl-export", "adaptive-span")
    ]
    assert json.loads(done.stdout)["rows"] == rows
    facts = {"name": "text", "num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for row in rows:
        assert row["text"] == facts
        assert row["steps"] == 2
        assert row["tokens"] == 2 * 16 * 64
        assert TrainConfig.from_json(row["recipe"], where="history").seed == row["seed"]
        assert row["recipe"]["text"] is None
        assert 1 < row["own"] < 12
        assert set(row["stream"]) == ({"64", "256"} if row["side"] == "xl-export" else set())
    assert rows[1]["parameters"] == 256 * 256


def test_a_row_is_scored_without_and_with_memory(
    tmp_path: Path, text: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that training did not have changes the score, and both figures are those of `evaluate`."""
    (tmp_path / "text").write_text(text[:60_000], encoding="utf-8")
    names = ["without recurrence"]
    sizes, rule, public = MODELS[names[0]]
    small = sizes | {"layers": 1, "d_model": 16, "head_dim": 4, "d_ff": 16}
    monkeypatch.setitem(MODELS, names[0], (small, rule, public))
    (row,) = rows_of("architectures", SIZE, minutes=1, text=tmp_path / "text", seeds=1, names=names)
    config = TrainConfig.from_json(row.recipe, where="row")
    assert config.training.mem_len == 0
    source = load_source(dataclasses.replace(config, text=str(tmp_path / "text")))
    training = Training.start(config)
    for _ in range(row.steps):
        training.advance(source.tokens)
    tokens = source.vocab.encode(source.files["test.txt"])
    for rule, bits in (
        (config.training, row.own),
        (MemoryRule(mem_len=64, segment=64), row.stream["64"]),
        (MemoryRule(mem_len=256, segment=64), row.stream["256"]),
    ):
        session = TorchSession(training.model.eval(), source.vocab, rule, weights="test")
        assert evaluate(session, tokens, lanes=16).bits_per_token == pytest.approx(bits, abs=1e-6)
    assert len({row.own, *row.stream.values()}) == 3


def test_the_public_code_reads_the_same_tokens() -> None:
    """Both adapters are compared with `Training`, over three passes of lanes of three segments and a half."""
    config = recipe("without recurrence", threads=1)
    small = dataclasses.replace(config.model, layers=1, vocab_size=256)
    config = dataclasses.replace(config, model=small, batch=2).with_steps(8)
    tokens = np.arange(2 * 225).reshape(2, 225) % 256
    training, firsts = Training.start(config), []
    for _ in range(config.steps):
        training.advance(tokens)
        firsts.append(tokens[0, training.at - 64])
    assert firsts[0] == 0
    assert 0 not in firsts[1:]  # later passes begin elsewhere

    class Reader(ReferenceModel):
        def __init__(self) -> None:
            super().__init__(Path(), config.model, config.training)
            self.weight, self.read = torch.nn.Parameter(torch.zeros(())), []

        def empty(self, lanes: int) -> list[torch.Tensor]:
            return []

        def losses(self, tokens, targets, memory):
            self.read.append(int(tokens[0, 0]))
            return self.weight * tokens, memory

    reader = Reader()
    public = ReferenceTraining(reader, config, tokens)
    for _ in range(config.steps):
        public.step()
    assert reader.read == firsts


def test_the_table_has_means_and_half_the_range() -> None:
    row: dict[str, Any] = {"name": "a", "parameters": 7, "steps": 3, "tokens": 9, "cpu_seconds": 1.0}
    row |= {"budget_seconds": 60.0, "text": {"name": "t", "num_bytes": None}}
    row |= {"exact": {"64": 2.0, "256": 1.5}, "stream": {"256": 3.0, "64": 4.0}, "mean_span": None}
    here = [row | {"side": "xl-export", "seed": seed, "own": own} for seed, own in ((0, 1.0), (1, 1.5))]
    public = row | {"side": "adaptive-span", "seed": 0, "own": 1.25, "exact": {}, "stream": {}}
    line = in_documents("architectures", [here[0], public, here[1]])[2]
    assert line == (
        "| a | 0.00 | 2 | 1.2500 ± 0.2500 | 1.2500 | 4.0000 ± 0.0000 | 3.0000 ± 0.0000 "
        "| 2.0000 ± 0.0000 | 1.5000 ± 0.0000 |"
    )


def test_the_table_mixes_no_rows_of_different_steps() -> None:
    def run(day: int, **row: Any) -> Run:
        facts = {"protocol": 2, "budget_seconds": 60.0, "text": {"sha256": "a"}, "name": "a", "seed": 0}
        time = f"2026-11-{day:02}T10:00:00+00:00"
        return Run({"case": "architectures", "time": time, "rows": [{**facts, "side": "xl-export", **row}]})

    public = {"side": "adaptive-span"}
    old = [run(1, steps=3), run(2, steps=3, seed=1), run(3, steps=3, **public)]
    assert architectures.published(History(tuple(old))) == old
    new = [run(4, steps=5), run(5, steps=5, **public)]
    assert architectures.published(History((*new, *old))) == new
    assert architectures.published(History((*old, new[0]))) == new[:1], (
        "the public code took another number of steps"
    )


def test_a_folder_without_public_code_is_refused(tmp_path: Path) -> None:
    history = tmp_path / "h.jsonl"
    done = call("run", "architectures", "--reference", ".", "--history", history)
    assert done.exit_code == 2
    assert "adaptive_span.py; give the folder of a checkout" in done.stderr
    assert not history.exists()
