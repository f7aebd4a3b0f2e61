"""Files of token losses hold every token, whatever its symbol."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from runtimes.base.files import read_npz
from runtimes.cli.eval import write_losses
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import ByteVocab, CharVocab, Vocab, WordVocab
from runtimes.tasks.evaluate import Score

NASTY = ['"', ",", "\n", "\r", "=", "\x00", "é", "\u2028", "#", "\ud800", "a"]


def score(nats: np.ndarray) -> Score:
    return Score(
        tokens=len(nats),
        nats=float(nats.sum()),
        seconds=1.0,
        segment=8,
        lanes=1,
        memory_carried=True,
        rule=MemoryRule(mem_len=4, segment=8),
        token_nats=nats,
    )


def read_csv(path: Path) -> tuple[dict, list[dict[str, str]]]:
    first, *lines = path.read_text(encoding="utf-8").split("\n")
    assert first.startswith("# ")
    return json.loads(first[2:]), list(csv.DictReader(lines[:-1]))


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
@pytest.mark.parametrize(
    "vocab", [CharVocab(NASTY), WordVocab(["<unk>", "<eos>", *NASTY[:2], *NASTY[4:]]), ByteVocab()]
)
def test_losses_come_back(vocab: Vocab, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"losses{suffix}"
    tokens = np.random.default_rng(0).permutation(vocab.size)
    nats = np.linspace(0, 3, len(tokens) - 1)
    write_losses(path, score(nats), tokens, vocab)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if suffix == ".npz":
        arrays = read_npz(path)
        assert arrays["nats"].dtype == np.float32
        assert np.allclose(arrays["nats"], nats)
        assert arrays["tokens"].tolist() == tokens[1:].tolist()
        assert json.loads(str(arrays["settings"]))["mem_len"] == 4
        return
    settings, rows = read_csv(path)
    assert settings == score(nats).to_json()
    assert [int(row["position"]) for row in rows] == list(range(1, len(tokens)))
    assert [int(row["token"]) for row in rows] == tokens[1:].tolist()
    assert np.allclose([float(row["nats"]) for row in rows], nats, atol=1e-6)
    decode = vocab.decoder()
    assert [json.loads(row["text"]) for row in rows] == [decode(int(token)) for token in tokens][1:]
    assert all(row["text"].startswith('"') for row in rows)  # no spreadsheet takes it for a formula
