"""Datasets: mapped, not loaded; what was altered is refused; one door to every kind of text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.base.errors import ArtefactError
from runtimes.base.files import write_json
from runtimes.base.sealed import write_sealed
from tests.trainer.data.corpus_files import PTB
from trainer.data.dataset import SPLITS, open_dataset
from trainer.data.own import OwnFiles
from trainer.data.own_ids import ids_vocab, prepare_ids
from trainer.data.text import lanes


@pytest.mark.parametrize("split", SPLITS)
def test_the_parts_are_read_only_maps_of_files(split: str, dataset: Path) -> None:
    opened = open_dataset(dataset)
    tokens = getattr(opened, split)
    assert isinstance(tokens, np.memmap)
    assert Path(str(tokens.filename)) == (dataset / f"{split}.bin").resolve()
    assert not tokens.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    assert tokens.dtype == np.uint8
    assert np.array_equal(tokens, opened.vocab.encode(PTB[split]))


@pytest.mark.parametrize(
    ("size", "dtype"), [(256, "uint8"), (257, "uint16"), (1 << 16, "uint16"), ((1 << 16) + 1, "int32")]
)
def test_ids_have_the_smallest_type(size: int, dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(size))
    vocab = ids_vocab(size, names=None, end_of_document=None)
    prepare_ids(OwnFiles(train=[tmp_path / "ids.npy"]), tmp_path / "out", vocab=vocab)
    opened = open_dataset(tmp_path / "out")
    assert opened.train.dtype == dtype
    assert np.array_equal(np.concatenate([opened.train, opened.valid, opened.test]), np.arange(size))
    if size in (256, 1 << 16):  # every value of the type is an id
        return
    data = (tmp_path / "out/test.bin").read_bytes()
    (tmp_path / "out/test.bin").write_bytes(b"\xff" * 4 + data[4:])  # -1 in int32
    with pytest.raises(ArtefactError, match=r"test\.bin has ids that are not among"):
        open_dataset(tmp_path / "out")


def test_lanes_of_a_map_stay_a_map(dataset: Path) -> None:
    train = open_dataset(dataset).train
    tokens_BN = lanes(train, 2, 3)
    assert isinstance(tokens_BN, np.memmap)
    assert np.shares_memory(tokens_BN, train)
    assert tokens_BN.dtype == np.uint8
    assert np.array_equal(tokens_BN.ravel(), train[: tokens_BN.size])


@pytest.mark.parametrize("name", ["train.bin", "vocab.json"])
def test_a_missing_or_cut_file_is_refused(name: str, dataset: Path) -> None:
    whole = (dataset / name).read_bytes()
    (dataset / name).write_bytes(whole[:-1])
    with pytest.raises(
        ArtefactError, match=rf"{name} has {len(whole) - 1} bytes, expected {len(whole)}; copy"
    ):
        open_dataset(dataset)
    (dataset / name).unlink()
    with pytest.raises(ArtefactError, match=f"{name} is missing; copy"):
        open_dataset(dataset)


def test_an_altered_vocabulary_is_refused(dataset: Path) -> None:
    path = dataset / "vocab.json"
    path.write_text(path.read_text().replace("banknote", "BANKNOTE"))
    with pytest.raises(ArtefactError, match=r"vocab\.json was altered"):
        open_dataset(dataset)


@pytest.mark.parametrize("at", [0, -1])
def test_an_id_outside_the_vocabulary_is_refused(
    at: int, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.dataset.IDS_PER_CHECK", 4)
    ids = bytearray((dataset / "train.bin").read_bytes())
    ids[at] = open_dataset(dataset).vocab.size
    (dataset / "train.bin").write_bytes(ids)
    with pytest.raises(ArtefactError, match=r"train\.bin has ids that are not among the \d+ symbols"):
        open_dataset(dataset)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"corpus": "other"}, "was altered: its digest"),
        ({"files": {"../escape": {"sha256": "", "num_bytes": 1}}}, "was altered"),
    ],
)
def test_a_changed_record_is_refused(change: dict[str, Any], match: str, dataset: Path) -> None:
    write_json(dataset / "data.json", json.loads((dataset / "data.json").read_text()) | change)
    with pytest.raises(ArtefactError, match=match) as caught:
        open_dataset(dataset)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": {"train": 10**15}},
        {"vocab_size": 1 << 40},
        {"files": {}},
        {"dtype": "int32"},
        {"tokens": {"train": -5, "valid": 2, "test": 2}},
    ],
)
def test_a_contradictory_record_with_its_digest_is_refused(change: dict[str, Any], dataset: Path) -> None:
    write_sealed(dataset / "data.json", dataclasses.replace(open_dataset(dataset).facts, **change))
    with pytest.raises(ArtefactError, match="contradicts itself or has another schema"):
        open_dataset(dataset)
