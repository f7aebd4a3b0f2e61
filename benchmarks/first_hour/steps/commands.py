"""The commands on a GPU: what `eval`, `score` and `generate` say of an artefact and a run, beside the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps.models import Kind, artefact_of, config_of, run_folder
from benchmarks.first_hour.steps.timed import tolerance_of
from xl_export.cli.main import main

KIND = Kind(target="onnxruntime", form="ring", precision="fp32")
SEGMENTS, DRAWN = 4, 16  # of the scored text; tokens
TEXTS = "texts.txt"
LENGTHS = (1, 2, 3, 5, 8, 13, 40)  # letters of the texts for `score`, which computes some of them together


def run(record: Record, *, size: str, devices: str) -> None:
    """Compares the commands on each of the devices, with commas between them, with those on the CPU."""
    config = config_of(size, quick=record.quick)
    text = record.work / "text.txt"
    draw = np.random.default_rng(0)
    text.write_bytes(draw.integers(97, 123, SEGMENTS * config.segment).astype(np.uint8))
    lines = [draw.integers(97, 123, length).astype(np.uint8).tobytes() for length in LENGTHS]
    text.with_name(TEXTS).write_bytes(b"\n".join(lines) + b"\n")
    folders = {"run": run_folder(record, config), "artefact": artefact_of(record, config, KIND)}
    for kind, folder in folders.items():
        expected = _said(folder, text, "cpu")
        for device in devices.split(","):
            with record.attempt(f"{kind} on {device}"):
                _compare(record, f"{kind} on {device}", _said(folder, text, device), expected)


def _compare(record: Record, name: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    record.fact(f"{name}: computed by", found["computed_by"])
    apart = abs(found["bits"] - expected["bits"]) * np.log(2)
    limit = tolerance_of("fp32")
    said = f"{found['bits']:.6f} bits a token, {apart:.2e} nats from the CPU (tolerance {limit:g})"
    record.check(f"{name}: eval", bool(apart <= limit), said)
    pairs = list(zip(found["texts"], expected["texts"], strict=True))
    worst = np.max([abs(mine - other) / max(1, tokens) for (tokens, mine), (_, other) in pairs])
    counted = all(mine == other for (mine, _), (other, _) in pairs) and len(pairs) == len(LENGTHS)
    said = f"{len(pairs)} texts, at most {worst:.2e} nats a token from the CPU (tolerance {limit:g})"
    said += "" if counted else ", and their tokens are counted otherwise"
    record.check(f"{name}: score", bool(counted and worst <= limit), said)
    same = found["ids"] == expected["ids"]
    record.check(
        f"{name}: generate", same, f"its {DRAWN} tokens are {'' if same else 'not '}those of the CPU"
    )


def _said(folder: Path, text: Path, device: str) -> dict[str, Any]:
    scored = _json("eval", folder, "--text", text, "--device", device)
    drawn = _json(
        "generate", folder, "--prompt", "a", "--tokens", DRAWN, "--temperature", 0, "--device", device
    )
    texts = _printed("score", folder, "--input", text.with_name(TEXTS), "--device", device)
    documents = [json.loads(line) for line in texts]
    return {
        "bits": scored["bits_per_token"],
        "computed_by": scored["computed_by"],
        "texts": [(document["tokens"], document["log_prob"]) for document in documents],
        "ids": drawn["ids"],
    }


def _json(*words: object) -> dict[str, Any]:
    """The last line of JSON that a command prints."""
    document: dict[str, Any] = json.loads(_printed(*words)[-1])
    return document


def _printed(*words: object) -> list[str]:
    """The lines that a command prints with --json. Raises the error that it made a sentence of."""
    ended = CliRunner().invoke(main, [*map(str, words), "--json"], standalone_mode=False)
    if ended.exception is not None:
        raise ended.exception.__cause__ or ended.exception
    return ended.stdout.strip().splitlines()
