"""What the tests of the exporter share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.architectures import ARCHITECTURES
from tests.commands import xl

# 48: the last block of a quantised row is half full
SIZES: dict[str, Any] = {"d_model": 48, "heads": 2, "head_dim": 20, "d_ff": 64}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What the commands made, from prepared data to an artefact, and what they said."""

    dataset: Path
    run: Path
    artefact: Path
    trained: Result
    exported: Result


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, text: str) -> Callable[[str], Chain]:
    """`chain(kind)`: a tiny model of `ids` or of `subword`s, prepared, trained and exported by the commands.

    The ids are those of documents of a scale; the subwords are byte-level BPE. Tests must not change it.
    """

    @functools.cache
    def make(kind: str) -> Chain:
        folder = tmp_path_factory.mktemp(kind)
        dataset, run, artefact = (folder / name for name in ("dataset", "run", "artefact"))
        if kind == "ids":
            lines = [[1 + (start + i) % 11 for i in range(40 + start)] for start in range(40)]
            (folder / "scales.jsonl").write_text("\n".join(map(str, lines)))
            options = ["--vocab-size", "12", "--end-of-document", "0"]
            prepared = xl("prepare", "tokens", "--train", folder / "scales.jsonl", *options, "--out", dataset)
        else:
            (folder / "a.txt").write_text(text[:20_000], encoding="utf-8")
            vocab = ["--vocab", folder / "tokenizer.json"]
            learnt = ["--kind", "byte-bpe", "--size", "300", "--text", folder / "a.txt"]
            assert xl("prepare", "vocab", *learnt, "--out", folder / "tokenizer.json").exit_code == 0
            lines = ["--train", folder / "a.txt", "--documents", "line"]
            prepared = xl("prepare", "text", *lines, *vocab, "--out", dataset)
        assert prepared.exit_code == 0, prepared.output
        trained = xl("train", "tiny", "--data", dataset, "--steps", "4", "--out", run)
        assert trained.exit_code == 0, trained.output
        exported = xl("export", run, "--out", artefact)
        assert exported.exit_code == 0, exported.output
        return Chain(dataset=dataset, run=run, artefact=artefact, trained=trained, exported=exported)

    return make


@pytest.fixture(scope="module")
def calm_run(make_run: Callable[..., Path], text: str) -> Callable[..., Path]:
    """`calm_run(kind)`: a run of an architecture with weights as small as trained ones, and its text."""
    from safetensors.torch import load_file, save_file

    def make(kind: str) -> Path:
        sizes = SIZES | {
            name: size for name, size in ARCHITECTURES[kind].items() if name != "d_ff" or not size
        }
        folder = make_run(**sizes)
        file = folder / "model.safetensors"
        save_file({name: 0.4 * tensor for name, tensor in load_file(file).items()}, file)
        (folder / "test.txt").write_text(text[:300], encoding="utf-8")
        return folder

    return make
