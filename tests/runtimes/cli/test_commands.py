"""The edge commands: figures on success, one sentence and exit code 2 for what a user can fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runtimes.contract.spec import ANSWERS, REFERENCE, VOCAB, WEIGHTS
from runtimes.tasks import generate as generation
from tests.commands import json_of, refused, xl
from tests.runtimes.tasks.references import read_reference, write_reference

KINDS = ("ring", "torch")


@pytest.fixture
def folders(run: Path, artefacts: dict[str, Path]) -> dict[str, Path]:
    return {**artefacts, "torch": run}


@pytest.fixture
def text_file(text: str, tmp_path: Path) -> Path:
    (tmp_path / "some.txt").write_text(text[:900], encoding="utf-8")
    return tmp_path / "some.txt"


def test_check_passes_and_prints_its_figures(artefacts: dict[str, Path]) -> None:
    figures = json_of(xl("check", artefacts["ring"], "--json", "--threads", 1))
    shown = xl("check", artefacts["ring"]).stdout
    assert shown.startswith("passed: ")
    assert "computed by: ONNX Runtime, standard operators\n" in shown
    assert figures["passed"] is True
    assert figures["max_difference"] <= figures["tolerance"] == 1e-4
    assert figures["tokens"] > 100


def test_check_of_a_wrong_artefact_fails_with_exit_code_1(
    artefact: Path, reseal: Callable[..., None]
) -> None:
    arrays = read_reference(artefact)
    arrays["log_probs"][0, -1] += 0.01
    write_reference(artefact, arrays)
    reseal(artefact, REFERENCE, ANSWERS)
    result = xl("check", artefact, "--json")
    assert result.exit_code == 1
    assert 0.009 < json.loads(result.stdout)["max_difference"] < 0.011
    assert xl("check", artefact).stdout.startswith("FAILED: ")


@pytest.mark.parametrize("kind", KINDS)
def test_eval_prints_its_figures_and_settings(kind: str, folders: dict[str, Path], text_file: Path) -> None:
    figures = json_of(xl("eval", folders[kind], "--text", text_file, "--lanes", 3, "--segment", 5, "--json"))
    assert figures["kernel"] == (None if kind == "torch" else "standard")
    assert figures["computed_by"] == ("PyTorch" if kind == "torch" else "ONNX Runtime, standard operators")
    assert (figures["characters"], figures["bytes"]) == (899, 899)
    assert figures["bits_per_character"] == pytest.approx(figures["bits_per_token"])
    assert figures["bits_per_byte"] == pytest.approx(figures["bits_per_token"])
    assert figures["tokens"] == 899
    assert figures["bits_per_token"] == pytest.approx(figures["nats"] / 899 / np.log(2))
    assert (figures["lanes"], figures["segment"], figures["mem_len"], figures["memory_carried"]) == (
        3,
        5,
        16,
        True,
    )
    forgetful = json_of(xl("eval", folders[kind], "--text", text_file, "--no-memory", "--json"))
    assert forgetful["memory_carried"] is False
    assert forgetful["segment"] == 8
    assert forgetful["nats"] != pytest.approx(figures["nats"], abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_prints_prompt_and_continuation(kind: str, folders: dict[str, Path]) -> None:
    first, second = (
        xl("generate", folders[kind], "--prompt", "The ", "--tokens", 40, "--seed", 5) for _ in range(2)
    )
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("The ")
    assert len(first.stdout) == 4 + 40 + 1
    assert first.stdout == second.stdout
    batch = xl("generate", folders[kind], "--prompt", "The ", "--prompt", "A", "--tokens", 40, "--seed", 5)
    assert batch.stdout.startswith("--- 0\n" + first.stdout + "--- 1\nA")


def test_generate_continues_a_saved_stream(artefacts: dict[str, Path], tmp_path: Path) -> None:
    options = ("--temperature", 0, "--prompt")
    whole = xl("generate", artefacts["ring"], *options, "The class", "--tokens", 31).stdout[9:-1]
    saved = tmp_path / "memory.safetensors"
    first = xl(
        "generate", artefacts["ring"], *options, "The class", "--tokens", 20, "--save-memory", saved
    ).stdout[9:-1]
    rest = xl(
        "generate", artefacts["ring"], *options, whole[20], "--tokens", 10, "--load-memory", saved
    ).stdout[:-1]
    assert first + rest == whole


def test_an_altered_artefact_is_refused_by_every_command(artefact: Path, text_file: Path) -> None:
    data = (artefact / WEIGHTS).read_bytes()
    (artefact / WEIGHTS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for command in (("check",), ("eval", "--text", text_file), ("generate", "--prompt", "a"), ("info",)):
        refused(xl(command[0], artefact, *command[1:]), "weights.bin was altered", "export")
    (artefact / VOCAB).unlink()
    refused(xl("check", artefact), "missing")


def test_a_full_output_device_ends_in_one_sentence(artefacts: dict[str, Path]) -> None:
    with open("/dev/full", "w") as full:
        arguments = [Path(sys.executable).with_name("xl-export"), "info", artefacts["ring"]]
        ended = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=280)
    assert (
        ended.stderr
        == "Error: standard output cannot be used (No space left on device); give another place.\n"
    )
    assert ended.returncode == 2


def test_an_unprintable_character_ends_in_one_sentence(artefacts: dict[str, Path]) -> None:
    arguments = [
        Path(sys.executable).with_name("xl-export"),
        "generate",
        artefacts["ring"],
        "--prompt",
        "—",
        "--tokens",
        "3",
    ]
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    ended = subprocess.run(arguments, capture_output=True, env=latin, timeout=280)
    assert ended.returncode == 2
    message = ended.stderr.decode("latin-1")
    assert message.startswith("Error: standard output is latin-1")
    assert "PYTHONIOENCODING=utf-8" in message
    assert len(message.splitlines()) == 1


def test_generate_shows_each_piece_as_it_comes(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []  # what standard output's reader has got when each token is drawn
    original = generation.Draw.tokens

    def spy(self: generation.Draw, logits: np.ndarray, uniform: list[float]) -> list[int]:
        shown.append(sys.stdout.buffer.getvalue().decode())  # type: ignore[attr-defined]
        return original(self, logits, uniform)

    monkeypatch.setattr(generation.Draw, "tokens", spy)
    result = xl("generate", artefacts["ring"], "--prompt", "The ", "--tokens", 6)
    assert shown == [result.stdout[: 4 + count] for count in range(6)]
