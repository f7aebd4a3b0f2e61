"""The oracles of `tests/data/` and its variants: where they are, how they are evaluated, what must come out.

Three more oracles are too large for the repository. Their folder is named by the environment variable
XL_EXPORT_ORACLES, or is `../shared/oracles` beside the checkout; tests over them are skipped where it is
absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtimes.contract.session import Session
from tests.commands import xl
from xl_export.importers import FORMATS
from xl_export.importers.formats import open_source, recognise
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source
from xl_export.importers.shared.settings import Settings

DATA = Path(__file__).parents[2] / "data"
SHARED = Path(os.environ.get("XL_EXPORT_ORACLES", Path(__file__).parents[4] / "shared" / "oracles"))
ROUNDING = 2e-5  # nats, in float32: tests/data/README.md
NAMES = (
    "kimiyoung-enwik8",
    "adaptive-span-enwik8",
    "adaptive-span-persistent",
    "kimiyoung-wt103-large",
    "hf-wt103",
    "nvidia-wt103-base",
    "kimiyoung-ptb-full-mask",
)
# Outside the repository, and the checkpoint in each.
SHARED_NAMES = {
    "kimiyoung-lm1b": "model_legacy.pt",
    "nvidia-large": "checkpoint_last.pt",
    "adaptive-span-adaptio-persistent": "checkpoint.pt",
}
FOLDERS = {"hf-wt103": DATA / "hf-wt103" / "pretrained"}


@dataclass(frozen=True)
class Case:
    """One checkpoint under one evaluation: its options for `xl-export import`, and the file with the
    answers."""

    name: str
    evaluation: str
    source: Path
    options: tuple[Any, ...]
    answers: Path

    def __str__(self) -> str:
        return f"{self.name}-{self.evaluation}"

    def expected(self) -> dict[str, np.ndarray]:
        with np.load(self.answers) as arrays:
            return {name: arrays[name] for name in arrays.files}

    def imported(self, out: Path) -> Path:
        """The run that the command writes to `out`."""
        result = xl("import", self.source, "--out", out, *self.options)
        assert result.exit_code == 0, result.output
        return out


def read(source: Path | Source, vocab: Path | None = None, **settings: Any) -> Checkpoint:
    """What the importer of its format makes of a checkpoint, without a run."""
    opened = open_source(source) if isinstance(source, Path) else source
    options = ImportOptions(settings=Settings(**settings).chosen("option"), vocab=vocab)
    checkpoint: Checkpoint = FORMATS[recognise(opened)].project.read(opened, options)
    return checkpoint


def assert_same_tensors(first: Checkpoint, second: Checkpoint, *, without: Collection[str] = ()) -> None:
    """without: the names that only the first has."""
    assert first.tensors.keys() - second.tensors.keys() == set(without)
    for name, tensor in second.tensors.items():
        assert torch.equal(first.tensors[name], tensor), name


def oracle_cases() -> list[Case]:
    """Every oracle of the repository under every evaluation."""
    return [case for name in NAMES for case in _cases(DATA / name, FOLDERS.get(name, DATA / name))]


def shared_cases() -> list[Case]:
    """Every oracle outside the repository under every evaluation; none where their folder is absent."""
    names = {name: file for name, file in SHARED_NAMES.items() if (SHARED / name).is_dir()}
    return [case for name, file in names.items() for case in _cases(SHARED / name, SHARED / name / file)]


def _cases(folder: Path, source: Path) -> list[Case]:
    """One checkpoint under the evaluations that its `config.json` lists."""
    cases, facts = [], json.loads((folder / "config.json").read_text())
    for evaluation, chosen in {"eval": facts["eval"], **facts.get("extra_evals", {})}.items():
        options: tuple[Any, ...] = ("--segment", chosen["tgt_len"])
        if facts["family"] == "adaptive-span":
            options += ("--ramp", facts["adapt_span_params"]["adapt_span_ramp"])
        else:
            mask = "same-length" if chosen["same_length"] else "full"
            options += ("--mem-len", chosen["mem_len"], "--mask", mask, "--clamp-len", chosen["clamp_len"])
        answers = "expected.npz" if evaluation == "eval" else f"expected_{evaluation}.npz"
        cases.append(Case(folder.name, evaluation, source, options, folder / answers))
    return cases


def variant_cases() -> list[Case]:
    cases = []
    for folder in sorted((DATA / "variants").iterdir()):
        options = ("--settings", folder / "settings.json", "--vocab", folder / "vocab.txt")
        cases.append(Case(folder.name, "eval", folder, options, folder / "expected.npz"))
    return cases


def nll(session: Session, expected: dict[str, np.ndarray], segments: str = "segments") -> np.ndarray:
    """Negative log-likelihoods [B, N] of the oracle's tokens, fed as the oracle was."""
    tokens, targets, memory = expected["tokens"], expected["targets"], session.start(len(expected["tokens"]))
    pieces, at = [], 0
    for length in expected[segments].tolist():
        log_probs, memory = session.score(tokens[:, at : at + length], targets[:, at : at + length], memory)
        pieces.append(-log_probs)
        at += length
    return np.concatenate(pieces, axis=1)
