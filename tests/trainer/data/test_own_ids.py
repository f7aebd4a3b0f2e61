"""Files of token ids as users have them: numbers in a text file, and what is given in place of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import json_of, xl
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
