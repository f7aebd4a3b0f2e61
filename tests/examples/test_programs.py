"""The small programs of examples/: what they say to wrong input, and what they read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from xl_export.artefact.export import export

EXAMPLES = Path(__file__).parents[2] / "examples"
TALES = EXAMPLES / "stories" / "tales"


def run(name: str, *words: object, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("score_stream.py",), "give the folder of an artefact: python score_stream.py ARTEFACT"),
        (("score_stream.py", "nosuch"), "nosuch does not exist; give a run, an artefact or an engine."),
        (("live_streams.py",), "give the folder of an artefact: python live_streams.py ARTEFACT"),
        (("live_streams.py", "nosuch"), "nosuch does not exist; give a run, an artefact or an engine."),
        (("plain_onnxruntime.py",), "give an artefact and a prompt"),
        (("plain_onnxruntime.py", "nosuch", "a"), "nosuch is no artefact (it has no spec.json); give the"),
        (("plain_onnxruntime.py", TALES, "a"), "has a vocabulary of other tokens than characters; use"),
        (("own_checkpoint.py", "nosuch"), "give both: python own_checkpoint.py CHECKPOINT FOLDER"),
    ],
)
def test_wrong_input_is_one_sentence(words: tuple[object, ...], said: str) -> None:
    ended = run(str(words[0]), *words[1:])
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Error: ")
    assert said in line


def test_a_checkpoint_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    ended = run("own_checkpoint.py", tmp_path / "nosuch", tmp_path / "made")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert not (tmp_path / "made").exists()


def test_the_lines_of_a_model_of_ids_are_numbers(make_run: Callable[..., Path], tmp_path: Path) -> None:
    from runtimes.contract.vocabulary import IdsVocab, save_vocab

    folder = make_run(vocab_size=50)
    save_vocab(folder, IdsVocab(50))
    artefact = export(folder, tmp_path / "artefact")
    ended = run("score_stream.py", artefact, text="1 2 3\n\n4 5\n")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split("bits per token  ")[1] for line in lines] == ["1 2 3", "4 5"]
    ended = run("score_stream.py", artefact, text="1 two\n")
    assert ended.returncode == 2
    assert "the line '1 two' is no list of token ids; give whole numbers" in ended.stderr
