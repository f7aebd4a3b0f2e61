"""Every published configuration has a corpus, and as many parameters as its paper says."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from trainer.data.corpora import CORPORA
from trainer.model.model import parameter_shapes
from trainer.run.choices import CorpusName
from trainer.run.config import BUILT_IN, TrainConfig, built_in

VOCABULARY = {
    "enwik8": 256,
    "text8": 27,
    "wikitext-103": 267_735,
    "one-billion-word": 793_471,
    "penn-treebank": 10_000,
}
OURS = {"all-attention-demo", "chorales", "demo", "quality", "stories", "tiny"}

# millions of parameters that the papers print, with the classifiers that Al-Rfou et al. use in training
PUBLISHED = {
    "enwik8-base": 41,
    "enwik8-18l": 88,
    "enwik8-large": 277,
    "text8-large": 277,
    "wt103-base": 151,
    "lm1b-base": 460,
    "lm1b-large": 800,
    "table6-xl": 128,
    "table6-xl-151m": 151,
    "table10-xl": 128,
    "table7-xl": 300,
    "all-attention-enwik8": 39,
    "all-attention-text8": 38,
    "all-attention-enwik8-large": 114,
    "all-attention-text8-large": 114,
    "all-attention-wt103": 133,
    "adaptive-span-enwik8": 39,
    "adaptive-span-enwik8-large": 209,
    "adaptive-span-text8": 38,
    "adaptive-span-text8-large": 209,
    "al-rfou-enwik8-12l": 44,
    "al-rfou-text8-12l": 44,
    "al-rfou-enwik8-64l": 235,
    "al-rfou-text8-64l": 235,
}
# configurations whose count differs, as docs/results/papers.md explains: millions here, millions in the paper
DEVIATIONS = {
    "wt103-large": (285.2, 257),
    "ptb": (26.4, 24),
    "lm1b-large": (841.4, 800),
    "lm1b-base": (469.1, 460),
}
NAMES = sorted(set(built_in()) - OURS)


def millions(name: str) -> float:
    """Trained values of the model with the vocabulary of its corpus, without allocating any."""
    config = TrainConfig.load(name)
    assert config.corpus is not None
    # The one of Al-Rfou et al. has all bytes, whatever the corpus.
    size = 256 if name.startswith("al-rfou") else VOCABULARY[config.corpus]
    shapes = parameter_shapes(dataclasses.replace(config.model, vocab_size=size))
    return sum(shape.numel() for shape in shapes.values()) / 1e6


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_those_of_the_paper(name: str) -> None:
    tolerance = 0.06 if name in DEVIATIONS else 0.015
    assert millions(name) == pytest.approx(PUBLISHED[name], rel=tolerance, abs=0.5)


@pytest.mark.parametrize("name", sorted(DEVIATIONS))
def test_every_deviation_is_the_one_that_is_written_down(name: str) -> None:
    here, paper = DEVIATIONS[name]
    assert millions(name) == pytest.approx(here, abs=0.06)
    assert abs(here - paper) / paper > 0.015
    text = (BUILT_IN.parents[1] / "docs" / "results" / "papers.md").read_text(encoding="utf-8")
    assert any(name in line and f"{here:.1f}M" in line for line in text.splitlines())


def test_the_rows_of_the_ablations_are_all_there() -> None:
    rows = {"table6": 10, "table7": 3, "table10": 4, "figure2": 4}
    for table, count in rows.items():
        assert sum(name.startswith(f"{table}-") for name in NAMES) == count, table


def test_each_names_its_corpus() -> None:
    assert list(get_args(CorpusName)) == list(CORPORA)
    assert all(TrainConfig.load(name).corpus in CORPORA for name in NAMES)
