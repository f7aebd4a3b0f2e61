"""The tokens to measure a model on: a text, or a file of token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runtimes.errors import TextError, first_line
from runtimes.files import NPZ_ERRORS, read_bytes
from runtimes.vocab import Vocab, WordVocab


def read_tokens(path: Path, vocab: Vocab) -> np.ndarray:
    """Token ids [N] of the text at `path`, or those that a `.npy` file holds, memory-mapped.

    Raises UserError for a file that cannot be read, TextError for one that is not text of this vocabulary,
    not a one-dimensional array of integers, or has ids that the vocabulary lacks.
    """
    return _mapped_ids(path, vocab) if path.suffix == ".npy" else vocab.encode(read_bytes(path))


def unknown_share(vocab: Vocab, tokens: np.ndarray) -> float | None:
    """The share of `tokens` that stand for a word outside the vocabulary; None where there is no such token."""
    if not isinstance(vocab, WordVocab) or vocab.unknown not in vocab.symbols:
        return None
    return float(np.mean(tokens == vocab.symbols.index(vocab.unknown)))


def _mapped_ids(path: Path, vocab: Vocab) -> np.ndarray:
    if path.exists() and not path.is_file():  # a pipe would keep us waiting
        raise TextError(f"{path} is not a file; expected a .npy file of token ids.")
    try:
        ids: np.ndarray = np.lib.format.open_memmap(path, mode="r")
    except (*NPZ_ERRORS, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise TextError(f"{path} could not be read as a .npy file of token ids: {reason}.") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TextError(f"{path} holds {ids.dtype} {list(ids.shape)}; expected token ids, integers [N].")
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab.size):
        outside = ids.max() if ids.max() >= vocab.size else ids.min()
        raise TextError(
            f"{path} has the token id {outside}, outside the vocabulary of this model (0 to {vocab.size - 1}); "
            "prepare it with the vocab.json of this run or artefact."
        )
    return ids
