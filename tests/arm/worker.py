"""Runs the edge commands over some artefacts and prints their answers: on the host and in the emulator.

It imports what a device has: NumPy, ONNX Runtime, click and the package. Everything happens in this process,
because the emulator starts no other.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from runtimes import Session, open_session
from runtimes.base.logits import log_sum_exp
from runtimes.sessions import fused_cpu
from xl_export.cli.main import main

TEXT = "The memory of a stream is kept from one segment to the next, and it is the caller's. "
TEXTS = ("The memory", "of a stream", "is kept", "from one segment to the next, always", "a")


def answers(artefact: Path, folder: Path, *, live: bool) -> dict[str, Any]:
    """What check, eval, generate, score and live rows say of an artefact."""
    (folder / "text.txt").write_text(3 * TEXT)
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    checked = command("check", artefact, "--json")[-1]
    scored = command("eval", artefact, "--text", folder / "text.txt", "--json")[-1]
    pieces = command(
        "generate", artefact, "--prompt", TEXT[:20], "--tokens", 16, "--temperature", 0, "--json"
    )
    scores = command("score", artefact, "--input", folder / "texts.txt", "--json")
    return {
        "kernel": checked["kernel"],
        "passed": checked["passed"],
        "max_difference": checked["max_difference"],
        "tolerance": checked["tolerance"],
        "bits": scored["bits_per_token"],
        "generated": pieces[-1]["text"],
        "scores": [score["log_prob"] for score in scores],
        "live": live_rows(open_session(artefact)) if live else [],
    }


def command(*arguments: object) -> list[dict[str, Any]]:
    """The lines of JSON that a command printed."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exit_code:
        raise RuntimeError(
            f"{arguments[0]} ended with {result.exit_code}: {result.output}"
        ) from result.exception
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def live_rows(session: Session) -> list[float]:
    """Log-probabilities of a running batch: rows of unequal length, one restarts, one arrives, one leaves."""
    draw = np.random.default_rng(5)
    memory, told = session.start(2), []
    segment = session.rule.segment

    def step(*lengths: int) -> None:
        nonlocal memory
        tokens = draw.integers(0, session.vocab.size, (len(lengths), segment))
        logits, memory = session.step(tokens, memory, lengths=np.array(lengths))
        for row, length in enumerate(lengths):
            said = logits[row, :length]
            told.extend((said - log_sum_exp(said)[..., None])[:, ::7].ravel().tolist() if length else [])

    for lengths in ((segment, 3), (1, segment), (0, 2)):
        step(*lengths)
    memory.positions[0] = 0
    step(4, 1)
    memory = memory.join(session.start(1))
    for lengths in ((segment, 2, 5), (segment, segment, 1)):
        step(*lengths)
    memory = memory.select([2, 0])
    for lengths in ((1, 1), (segment, segment), (2, 7 % segment)):
        step(*lengths)
    return told


def run(jobs: Path) -> None:
    """One line of JSON for each artefact and each kernel that this machine has."""
    for job in json.loads(jobs.read_text()):
        kernels = {"fused": fused_cpu.built, "standard": lambda: None}
        for kernel, built in kernels.items():
            answer: dict[str, Any]
            fused_cpu.built = built  # type: ignore[assignment]
            try:
                answer = answers(Path(job["artefact"]), jobs.parent, live=job["live"])
            except Exception:
                answer = {"kernel": kernel, "error": traceback.format_exc()[-1500:]}
            fused_cpu.built = kernels["fused"]
            if kernel == "fused" and answer["kernel"] != "fused" and "error" not in answer:
                continue  # the fused operator does not serve it: the next turn says the same
            print(json.dumps({"name": job["name"], "variant": fused_cpu.variant(), **answer}), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
