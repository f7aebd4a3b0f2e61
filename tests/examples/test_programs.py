"""The small programs of examples/: what they say to wrong input, and what they read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.contract.vocabulary import ByteVocab, IdsVocab, save_vocab
from tests.examples.conftest import EXAMPLES, run
from xl_export.artefact.export import export

TALES = EXAMPLES / "stories" / "tales"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("score_stream.py",), "give the folder of an artefact: python score_stream.py ARTEFACT"),
        (("score_stream.py", "nosuch"), "nosuch does not exist; give a run, an artefact or an engine."),
        (("plain_onnxruntime.py",), "give an artefact and a prompt"),
        (("plain_onnxruntime.py", "nosuch", "a"), "nosuch is no artefact (it has no spec.json); give the"),
        (("plain_onnxruntime.py", TALES, "a"), "has a vocabulary of other tokens than characters; use"),
        (("music/play.py", "a", "--endless", "--seconds", 5), "--endless and --seconds were both given"),
        (("own_checkpoint.py", "nosuch"), "give both: python own_checkpoint.py CHECKPOINT FOLDER"),
        (("gated_transformer_xl.py",), "give a new folder: python gated_transformer_xl.py FOLDER [STEPS]"),
        (("gated_transformer_xl.py", EXAMPLES), "examples exists; give the name of a new folder."),
    ],
)
def test_wrong_input_is_one_sentence(words: tuple[object, ...], said: str) -> None:
    ended = run(str(words[0]), *words[1:])
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Error: ")
    assert said in line


def test_a_missing_checkpoint_changes_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "own_checkpoint.py", tmp_path / "nosuch", tmp_path / "made"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert not (tmp_path / "made").exists()
    made = tmp_path / "made" / "run"
    made.mkdir(parents=True)
    again = run("own_checkpoint.py", tmp_path / "nosuch", tmp_path / "made")
    assert again.returncode == 2
    assert again.stderr == f"Error: {made} exists; give another FOLDER, or move this one away.\n"


def test_a_line_that_is_no_utf8_is_read_or_refused(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run(vocab_size=256)
    save_vocab(folder, ByteVocab())
    artefact = export(folder, tmp_path / "artefact")
    for model, code, said in ((artefact, 0, ""), (TALES, 2, "Error: ")):
        ended = run("score_stream.py", model, text=b"a\xff\xfeb\n")
        assert ended.returncode == code, ended.stderr
        assert ended.stderr.startswith(said)
        assert ended.stderr.count("\n") == code // 2


def test_the_lines_of_a_model_of_ids_are_numbers(make_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run(vocab_size=50)
    save_vocab(folder, IdsVocab(50))
    artefact = export(folder, tmp_path / "artefact")
    ended = run("score_stream.py", artefact, text="1 2 3\n\n4 5\n")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split("bits per token  ")[1] for line in lines] == ["1 2 3", "4 5"]
    lists = run("score_stream.py", artefact, text="[1, 2, 3]\n[]\n [4,5]\n")
    assert [line.split()[0] for line in lists.stdout.splitlines()] == [line.split()[0] for line in lines]
    for wrong, said in {
        "1 two": "the line '1 two' is no list of token ids; give whole numbers",
        "[1, [2]]": "the line '[1, [2]]' is no list of token ids",
        "9" * 30: "is no list of token ids",
        "1 -1": "has the token id -1 at index 1, outside the vocabulary (0 to 49); give ids of this model",
    }.items():
        ended = run("score_stream.py", artefact, text=wrong + "\n")
        assert ended.returncode == 2
        (line,) = ended.stderr.splitlines()
        assert said in line
        assert not ended.stdout
