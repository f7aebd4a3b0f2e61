"""The loss of each token of a text as a file: `.npz` for programs, `.csv` for people."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np

from runtimes.base.files import atomic_file
from runtimes.contract.vocabulary import Vocab, token_texts
from runtimes.tasks.evaluate import Score

SUFFIXES = (".npz", ".csv")


def write_losses(path: Path, score: Score, tokens: np.ndarray, vocab: Vocab) -> None:
    """Writes the loss of every token of `tokens` [N] after the first, with the settings, atomically.

    `.npz` holds nats float32 [N - 1], tokens int64 [N - 1] and settings, a JSON text. `.csv` has a first line
    of `# ` and the settings as JSON. Its columns are position (of the token in the text), token (its id),
    text (what the token adds to the decoded text) and nats. The text is a JSON string, so that no symbol can
    break a line, a cell or a spreadsheet.
    """
    with atomic_file(path) as temporary:
        if path.suffix == ".npz":
            _write_npz(temporary, score, tokens)
        else:
            _write_csv(temporary, score, tokens, vocab)


def _write_npz(path: Path, score: Score, tokens: np.ndarray) -> None:
    with open(path, "wb") as stream:
        nats = score.token_nats.astype(np.float32)
        targets = np.asarray(tokens[1:], np.int64)
        np.savez(stream, nats=nats, tokens=targets, settings=np.array(json.dumps(score.to_json())))


def _write_csv(path: Path, score: Score, tokens: np.ndarray, vocab: Vocab) -> None:
    texts = token_texts(vocab, tokens)
    # UTF-8 cannot hold half a surrogate pair; it becomes the escape that JSON has for it.
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as stream:
        stream.write(f"# {json.dumps(score.to_json())}\n")
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(("position", "token", "text", "nats"))
        for position, nats in enumerate(score.token_nats, start=1):
            text = json.dumps(texts[position], ensure_ascii=False)
            rows.writerow((position, int(tokens[position]), text, f"{nats:.6f}"))
