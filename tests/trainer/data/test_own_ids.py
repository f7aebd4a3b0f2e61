"""Files of token ids as users have them: numbers in a text file, and what is given in place of a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.commands import json_of, refused, xl
from trainer.data.dataset import open_dataset


def prepare(folder: Path, *train: object, size: int = 60) -> list[object]:
    files = [word for path in train for word in ("--train", path)]
    return ["prepare", "tokens", *files, "--vocab-size", size, "--out", folder / "out"]


@pytest.mark.parametrize("end", [None, 0])
def test_a_text_file_of_numbers_is_one_stream(
    end: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtimes.contract.id_files.TEXT_BLOCK", 5)  # several blocks
    stream = [1 + i % 59 for i in range(100)]
    lines = [" ".join(map(str, stream[at : at + 7])) for at in range(0, 100, 7)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    ends = [] if end is None else ["--end-of-document", end]
    made = json_of(xl(*prepare(tmp_path, tmp_path / "lines.txt"), *ends, "--json"))
    assert sum(made["tokens"].values()) == 100 + len(ends[1:])
    dataset = open_dataset(tmp_path / "out")
    parts = [part.tolist() for part in (dataset.train, dataset.valid, dataset.test)]
    assert [*parts[0], *parts[1], *parts[2]] == stream + ends[1:]


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", "1 2 0\n3 4\n" * 20), ("a.jsonl", "[1, 0, 2]\n" * 20)]
)
def test_an_end_of_document_that_is_also_data_is_noted(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    made = json_of(xl(*prepare(tmp_path, tmp_path / name), "--end-of-document", 0, "--json"))
    notes = " ".join(made["notes"])
    assert f"{name} has 0, the end of a document, 20 times before the end of its documents" in notes
    assert (f"{name} has 40 lines, read as one document" in notes) == (name == "a.txt")


def test_too_few_ids_are_told_with_their_files(tmp_path: Path) -> None:
    for name, count in (("empty", 0), ("one", 1), ("few", 30), ("enough", 31)):
        np.save(tmp_path / f"{name}.npy", np.arange(count))
    empty, one, few, enough = (tmp_path / f"{name}.npy" for name in ("empty", "one", "few", "enough"))
    cut = "from the end; give more, or give"
    both = f"{few} has 30 tokens, too few to cut the valid and test parts {cut} --valid and --test."
    refused(xl(*prepare(tmp_path, few)), both)
    np.save(tmp_path / "fewer.npy", np.arange(9))
    fewer = xl(*prepare(tmp_path, one, tmp_path / "fewer.npy"), "--valid", few)
    refused(
        fewer, f"{one}, {tmp_path / 'fewer.npy'} have 10 tokens, too few to cut the test part {cut} --test."
    )
    held = ["--valid", few, "--test", few]
    refused(xl(*prepare(tmp_path, empty), *held), f"{empty} has no tokens, too few to predict one; give more")
    refused(xl(*prepare(tmp_path, one, empty), *held), f"{empty} has no tokens and the train part has 1, too")
    refused(xl(*prepare(tmp_path, few), "--valid", one, "--test", few), f"{one} has 1 token, too few")
    assert not (tmp_path / "out").exists()
    made = json_of(xl(*prepare(tmp_path, enough, empty), "--json"))
    assert made["tokens"] == {"train": 27, "valid": 2, "test": 2}
    assert f"{empty} has no tokens" in made["notes"]
