"""Loads the tokens that a run reads, from a text or a dataset, for a new run and for a resumed one."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from runtimes.base.errors import ConfigError
from runtimes.base.ranges import counted
from runtimes.contract.tokens import side_bytes, side_file
from runtimes.contract.vocabulary import ByteVocab, Vocab
from runtimes.contract.vocabulary.subword import pieces
from trainer.data.dataset import open_dataset
from trainer.data.own import OWN_IDS, OWN_TEXT
from trainer.data.text import build_vocab, lanes, load_splits, takes_bytes
from trainer.run.checkpoint import TEST, TEST_IDS, VALID
from trainer.run.config import TrainConfig

OWN = (OWN_IDS, OWN_TEXT)  # datasets that fit the recipe for any corpus, as a text file does


@dataclass(frozen=True)
class Source:
    """Everything that a run reads."""

    name: str  # the text or corpus, as people call it
    vocab: Vocab
    tokens: np.ndarray  # ids for training, in lanes [B, N]
    valid: np.ndarray  # held-out ids [N] for validation
    files: dict[str, bytes | np.ndarray]
    """The held-out files that the run keeps, by name: their bytes, or a memory-mapped array for a `.npy`
    file.
    """
    held_out: str | None
    """The SHA-256 of the held-out text, which does not depend on the vocabulary; None if a dataset does not
    know its sources.
    """
    note: str | None = None
    """What the user should know about the text, such as how it was decoded; None for nothing."""

    @cached_property
    def digest(self) -> str:
        """Two hashes with a hyphen between: of the training tokens in lanes, and of the held-out tokens."""
        return "-".join(
            hashlib.sha256(np.ascontiguousarray(ids)).hexdigest() for ids in (self.tokens, self.valid)
        )


def load_source(config: TrainConfig, vocab: Vocab | None = None) -> Source:
    """The text or dataset of a run. vocab: of a run that is resumed; None reads or builds one."""
    if config.data is not None:
        dataset = open_dataset(config.data)
        if config.corpus not in (None, dataset.facts.corpus) and dataset.facts.corpus not in OWN:
            raise ConfigError(
                f"{config.data} is {dataset.facts.corpus} and the configuration is for {config.corpus}; "
                "give a dataset of that, or another configuration."
            )
        kept = {TEST_IDS: dataset.test, side_file(TEST_IDS): side_bytes(dataset.vocab)}
        tokens = _lanes(config, dataset.train)
        facts = dataset.facts
        return Source(facts.corpus, dataset.vocab, tokens, dataset.valid, kept, facts.held_out)
    if config.corpus is not None and config.text is None:
        raise ConfigError(
            f"the configuration is for {config.corpus}; prepare it with "
            f"`xl-export prepare {config.corpus} --from PATH --out DATASET` and give --data DATASET, or "
            "train on your own text with --text FILE."
        )
    as_bytes = takes_bytes(config.vocab) if vocab is None else isinstance(vocab, ByteVocab)
    splits = load_splits(config.text, as_bytes=as_bytes)
    if vocab is None:
        vocab = build_vocab(
            config.vocab,
            lambda: pieces(splits.train.decode()),
            lambda: [(splits.train + splits.valid + splits.test).decode()],
            min_count=config.min_count,
            max_size=config.max_size,
        )
    training = vocab.encode(splits.train)
    if (end := vocab.special.end_of_document) is not None:  # the training part is one document
        training = np.append(training, end)
    files = {VALID: splits.valid, TEST: splits.test}
    held_out = hashlib.sha256(splits.valid).hexdigest()
    valid = vocab.encode(splits.valid)
    name = config.text or "the built-in text"
    return Source(name, vocab, _lanes(config, training), valid, files, held_out, splits.note)


def with_vocab_size(config: TrainConfig, vocab: Vocab) -> TrainConfig:
    """The configuration with the size of the text's vocabulary; raises ConfigError if it has another."""
    if config.model.vocab_size not in (0, vocab.size):
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} and the text has "
            f"{counted(vocab.size, 'symbol')}; leave the key out, the text decides it."
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab.size))


def _lanes(config: TrainConfig, tokens: np.ndarray) -> np.ndarray:
    return lanes(tokens, config.batch, config.longest.segment)
