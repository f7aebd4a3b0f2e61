"""The text of a run as tokens: the one place that knows where training text comes from."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import numpy as np

from runtimes.errors import ConfigError
from runtimes.vocab import Vocab
from trainer.config import TrainConfig
from trainer.text import Splits, build_vocab, lanes, load_splits


@dataclass(frozen=True)
class Source:
    """Vocabulary, training tokens in lanes [B, N], and the texts that are held out."""

    vocab: Vocab
    tokens: np.ndarray
    splits: Splits

    @property
    def digest(self) -> str:
        """Identity of the training text, as tokens in lanes."""
        return hashlib.sha256(self.tokens.tobytes()).hexdigest()


def load_source(config: TrainConfig, *, vocab: Vocab | None = None) -> Source:
    """The text that a configuration names, in the tokens of `vocab`, or of one built from it for a new run."""
    splits = load_splits(config.text)
    vocab = vocab or build_vocab(config.vocab, splits, min_count=config.min_count)
    return Source(vocab, lanes(vocab.encode(splits.train), config.batch, config.longest.segment), splits)


def with_vocab_size(config: TrainConfig, vocab: Vocab) -> TrainConfig:
    """The configuration with the size of the text's vocabulary; raises ConfigError where it asks for another."""
    if config.model.vocab_size not in (0, vocab.size):
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} and the text has {vocab.size} symbols; "
            "leave the key out, the text decides it."
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab.size))
