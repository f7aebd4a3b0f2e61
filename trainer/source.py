"""What a run reads: the one place that knows where tokens come from, for a new run and for one that is resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from runtimes.errors import ConfigError
from runtimes.files import read_bytes
from runtimes.vocab import Vocab
from trainer.checkpoint import TEST, VALID, matching_vocab
from trainer.config import TrainConfig
from trainer.data.dataset import open_dataset
from trainer.text import build_vocab, lanes, load_splits

TEST_IDS = "test.npy"  # the test part of a dataset, as token ids that `xl-export eval --text` takes


@dataclass(frozen=True)
class Source:
    """tokens: for training, in lanes [B, N]; valid: held out [N]. files: of held-out text that the run keeps, by name."""

    vocab: Vocab
    tokens: np.ndarray
    valid: np.ndarray
    files: dict[str, bytes]

    @cached_property
    def digest(self) -> str:
        """Identity of the training text, as tokens in lanes, and of the held-out one: two hashes, with a hyphen between."""
        return "-".join(hashlib.sha256(np.ascontiguousarray(ids)).hexdigest() for ids in (self.tokens, self.valid))


def load_source(config: TrainConfig) -> Source:
    """The text or dataset that the configuration of a new run names, with the vocabulary built from it or found there."""
    if config.data is not None:
        dataset = open_dataset(config.data)
        return Source(dataset.vocab, _lanes(config, dataset.train), dataset.valid, {TEST_IDS: _npy(dataset.test)})
    splits = load_splits(config.text)
    vocab = build_vocab(config.vocab, splits, min_count=config.min_count)
    files = {VALID: splits.valid, TEST: splits.test}
    return Source(vocab, _lanes(config, vocab.encode(splits.train)), vocab.encode(splits.valid), files)


def reload_source(config: TrainConfig, run: Path) -> Source:
    """The text of a run again, in the tokens of the run's own vocabulary; what was held out is what the run kept."""
    vocab = matching_vocab(run, config)
    if config.data is not None:
        dataset = open_dataset(config.data)
        if dataset.vocab.to_json() != vocab.to_json():
            raise ConfigError(
                f"{config.data} has another vocabulary than {run}; give the run its dataset back, or start a new run."
            )
        return Source(vocab, _lanes(config, dataset.train), dataset.valid, {})
    valid = vocab.encode(read_bytes(run / VALID))
    return Source(vocab, _lanes(config, vocab.encode(load_splits(config.text).train)), valid, {})


def with_vocab_size(config: TrainConfig, vocab: Vocab) -> TrainConfig:
    """The configuration with the size of the text's vocabulary; raises ConfigError where it asks for another."""
    if config.model.vocab_size not in (0, vocab.size):
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} and the text has {vocab.size} symbols; "
            "leave the key out, the text decides it."
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab.size))


def _lanes(config: TrainConfig, tokens: np.ndarray) -> np.ndarray:
    return lanes(tokens, config.batch, config.longest.segment)


def _npy(tokens: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, tokens)
    return stream.getvalue()
