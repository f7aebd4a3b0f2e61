"""The oracles of `tests/data/` and its variants: where they are, how they are evaluated, what must come out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.contract.session import Session
from tests.commands import xl

DATA = Path(__file__).parents[2] / "data"
ROUNDING = 2e-5  # nats, in float32: tests/data/README.md
NAMES = (
    "kimiyoung-enwik8", "adaptive-span-enwik8", "adaptive-span-persistent", "kimiyoung-wt103-large", "hf-wt103",
    "nvidia-wt103-base", "kimiyoung-ptb-full-mask",
)  # fmt: skip
FOLDERS = {"hf-wt103": DATA / "hf-wt103" / "pretrained"}


@dataclass(frozen=True)
class Case:
    """One checkpoint under one evaluation: its options for `xl-export import`, and the file with the answers."""

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


def oracle_cases() -> list[Case]:
    cases = []
    for name in NAMES:
        facts = json.loads((DATA / name / "config.json").read_text())
        for evaluation, chosen in {"eval": facts["eval"], **facts.get("extra_evals", {})}.items():
            options: tuple[Any, ...] = ("--segment", chosen["tgt_len"])
            if facts["family"] == "adaptive-span":
                options += ("--ramp", facts["adapt_span_params"]["adapt_span_ramp"])
            else:
                mask = "same-length" if chosen["same_length"] else "full"
                options += (
                    "--mem-len",
                    chosen["mem_len"],
                    "--mask",
                    mask,
                    "--clamp-len",
                    chosen["clamp_len"],
                )
            answers = "expected.npz" if evaluation == "eval" else f"expected_{evaluation}.npz"
            cases.append(
                Case(name, evaluation, FOLDERS.get(name, DATA / name), options, DATA / name / answers)
            )
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
