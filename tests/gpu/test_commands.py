"""Commands on a GPU give what they give on the CPU, and training uses the GPU as it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.gpu.sides import LEAST_TOLERANCE, Graph, artefact_of, recipe_of, run_folder
from tests.gpu.stand_ins import TINY, on_gpu
from trainer.training.state import Training
from xl_export.cli.main import main

LENGTHS = (1, 2, 3, 5, 8, 13, 40)  # letters of the texts for `score`, which computes some of them together
ROWS = {f"{kind}-{device}": (kind, device) for kind in ("run", "artefact") for device in ("cuda", "auto")}
STAND_INS = {kind: (kind, "cpu") for kind in ("run", "artefact")}


@pytest.mark.parametrize(("gpu", "row"), on_gpu(ROWS, STAND_INS), indirect=["gpu"])
def test_commands_print_the_same_as_on_the_cpu(
    gpu: Any, row: tuple[str, str], work: Path, tmp_path: Path
) -> None:
    kind, device = row
    folder = run_folder(work, TINY) if kind == "run" else artefact_of(work, TINY, Graph())
    draw = np.random.default_rng(0)
    (tmp_path / "text.txt").write_bytes(draw.integers(97, 123, 4 * TINY.segment).astype(np.uint8))
    lines = [draw.integers(97, 123, length).astype(np.uint8).tobytes() for length in LENGTHS]
    (tmp_path / "texts.txt").write_bytes(b"\n".join(lines) + b"\n")
    found, expected = (_answers(folder, tmp_path, where) for where in (device, "cpu"))
    assert abs(found["bits"] - expected["bits"]) * np.log(2) <= LEAST_TOLERANCE
    assert len(found["texts"]) == len(LENGTHS)
    for (tokens, mine), (expected_tokens, other) in zip(found["texts"], expected["texts"], strict=True):
        assert tokens == expected_tokens
        assert abs(mine - other) <= LEAST_TOLERANCE * max(1, tokens)
    assert found["ids"] == expected["ids"]


def _answers(folder: Path, texts: Path, device: str) -> dict[str, Any]:
    (scored,) = _json("eval", folder, "--text", texts / "text.txt", "--device", device)
    (drawn,) = _json(
        "generate", folder, "--prompt", "a", "--tokens", 16, "--temperature", 0, "--device", device
    )
    documents = _json("score", folder, "--input", texts / "texts.txt", "--device", device)
    pairs = [(document["tokens"], document["log_prob"]) for document in documents]
    return {"bits": scored["bits_per_token"], "ids": drawn["ids"], "texts": pairs}


def _json(*words: object) -> list[Any]:
    ended = CliRunner().invoke(main, [*map(str, words), "--json"], standalone_mode=False)
    if ended.exception is not None:
        raise ended.exception.__cause__ or ended.exception
    lines = ended.stdout.strip().splitlines()
    return [json.loads(line) for line in (lines if words[0] == "score" else lines[-1:])]


@pytest.mark.gpu
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_gpus_train_together(gpu: Any, parallel: str, tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"it needs two GPUs, and PyTorch sees {count}")
    words = ["train", "tiny", "--device", "cuda", "--processes", str(count), "--steps", "20"]
    words += ["--set", f"parallel={parallel}", "--set", f"batch={8 * count}", "--out", str(tmp_path / "run")]
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code == 0, ended.output


@pytest.mark.gpu
def test_a_training_step_does_not_wait_for_the_gpu(gpu: Any) -> None:
    from dataclasses import replace

    training = Training.start(replace(recipe_of("training-fp32", TINY), device="cuda", steps=100))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 513))
    training.advance(tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            training.advance(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    training.refuse_not_finite()
