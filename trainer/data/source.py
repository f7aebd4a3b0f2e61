"""Loads the tokens that a run reads, from a text or a dataset, for a new run and for a resumed one."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from runtimes.base.errors import ConfigError
from runtimes.base.files import read_bytes
from runtimes.contract.tokens import side_bytes, side_file
from runtimes.contract.vocabulary import ByteVocab, Vocab
from trainer.data.dataset import open_dataset
from trainer.data.own import OWN_IDS, OWN_TEXT
from trainer.data.text import Splits, build_vocab, lanes, load_splits, refuse_word_options, takes_bytes
from trainer.run.checkpoint import TEST, TEST_IDS, VALID, matching_vocab
from trainer.run.config import TrainConfig
from trainer.run.record import held_out_of_dataset

OWN = (OWN_IDS, OWN_TEXT)  # datasets that fit the recipe for any corpus, as a text file does


@dataclass(frozen=True)
class Source:
    """Everything that a run reads."""

    name: str  # the text or corpus, as people call it
    vocab: Vocab
    tokens: np.ndarray  # ids for training, in lanes [B, N]
    valid: np.ndarray  # held-out ids [N] for validation
    # The held-out files that the run keeps, by name: their bytes, or a memory-mapped array for a `.npy` file.
    files: dict[str, bytes | np.ndarray]
    # The SHA-256 of the held-out text, which does not depend on the vocabulary; None where a dataset does not
    # know its sources.
    held_out: str | None
    # What the user should know about the text, such as how it was decoded; None for nothing.
    note: str | None = None

    @cached_property
    def digest(self) -> str:
        """Two hashes with a hyphen between: of the training tokens in lanes, and of the held-out tokens."""
        return "-".join(
            hashlib.sha256(np.ascontiguousarray(ids)).hexdigest() for ids in (self.tokens, self.valid)
        )


def load_source(config: TrainConfig) -> Source:
    """The text or dataset of a new run, with the vocabulary that is built from the text or stored there."""
    if config.data is not None:
        dataset = open_dataset(config.data)
        if config.corpus not in (None, dataset.facts.corpus) and dataset.facts.corpus not in OWN:
            raise ConfigError(
                f"{config.data} is {dataset.facts.corpus} and the configuration is for {config.corpus}; "
                "give a dataset of that, or another configuration."
            )
        kept = {TEST_IDS: dataset.test, side_file(TEST_IDS): side_bytes(dataset.vocab)}
        tokens = _lanes(config, dataset.train)
        known = held_out_of_dataset(Path(config.data))
        return Source(dataset.facts.corpus, dataset.vocab, tokens, dataset.valid, kept, known)
    if config.corpus is not None and config.text is None:
        raise ConfigError(
            f"the configuration is for {config.corpus}; prepare it with "
            f"`xl-export prepare {config.corpus} --from PATH --out DATASET` and give --data DATASET, or "
            "train on your own text with --text FILE."
        )
    splits = load_splits(config.text, as_bytes=takes_bytes(config.vocab))
    refuse_word_options(config.vocab, min_count=config.min_count, max_size=config.max_size)
    vocab = build_vocab(config.vocab, splits, min_count=config.min_count, max_size=config.max_size)
    files = {VALID: splits.valid, TEST: splits.test}
    tokens = _training(config, vocab, splits)
    valid = vocab.encode(splits.valid)
    held_out = hashlib.sha256(splits.valid).hexdigest()
    return Source(_name(config), vocab, tokens, valid, files, held_out, splits.note)


def reload_source(config: TrainConfig, run: Path) -> Source:
    """The text of a resumed run, with the vocabulary and the held-out text that the run keeps."""
    vocab = matching_vocab(run, config)
    if config.data is not None:
        dataset = open_dataset(config.data)
        if dataset.vocab.to_json() != vocab.to_json():
            raise ConfigError(
                f"{config.data} has another vocabulary than {run}; give the run its dataset back, or start "
                "a new run."
            )
        tokens = _lanes(config, dataset.train)
        known = held_out_of_dataset(Path(config.data))
        return Source(dataset.facts.corpus, vocab, tokens, dataset.valid, {}, known)
    text = read_bytes(run / VALID)
    splits = load_splits(config.text, as_bytes=isinstance(vocab, ByteVocab))
    tokens = _training(config, vocab, splits)
    valid = vocab.encode(text)
    return Source(_name(config), vocab, tokens, valid, {}, hashlib.sha256(text).hexdigest(), splits.note)


def with_vocab_size(config: TrainConfig, vocab: Vocab) -> TrainConfig:
    """The configuration with the size of the text's vocabulary; raises ConfigError if it has another."""
    if config.model.vocab_size not in (0, vocab.size):
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} and the text has {vocab.size} "
            f"symbol{'s' * (vocab.size != 1)}; leave the key out, the text decides it."
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab.size))


def _name(config: TrainConfig) -> str:
    return config.text or "the built-in text"


def _training(config: TrainConfig, vocab: Vocab, splits: Splits) -> np.ndarray:
    """The training part of a text in lanes. It is one document, so its end stands after it."""
    ids = vocab.encode(splits.train)
    end = vocab.special.end_of_document
    return _lanes(config, ids if end is None else np.append(ids, end))


def _lanes(config: TrainConfig, tokens: np.ndarray) -> np.ndarray:
    return lanes(tokens, config.batch, config.longest.segment)
