"""The small programs of examples/: what they say to wrong input, and what they read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import runtimes
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
        (("music/play.py", "a", "--endless", "--seconds", 5), "--endless and --seconds were both given"),
        (("music/play.py", "a", "--pipe", "--out", "b"), "--pipe writes sound to standard output, and --out"),
        (("own_checkpoint.py", "nosuch"), "give both: python own_checkpoint.py CHECKPOINT FOLDER"),
        (("gated_transformer_xl.py",), "give a new folder: python gated_transformer_xl.py FOLDER [STEPS]"),
        (("gated_transformer_xl.py", "made", "many"), "give a new folder: python gated_transformer_xl.py"),
        (("gated_transformer_xl.py", EXAMPLES), "examples exists; give the name of a new folder."),
    ],
)
def test_wrong_input_is_one_sentence(words: tuple[object, ...], said: str) -> None:
    ended = run(str(words[0]), *words[1:])
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Error: ")
    assert said in line


def test_a_folder_that_holds_an_artefact_is_no_artefact_and_names_it() -> None:
    with pytest.raises(
        runtimes.UserError,
        match=r"stories is no run, artefact or engine; .*stories/tales in it looks like one",
    ):
        runtimes.open_session(EXAMPLES / "stories")


def test_a_checkpoint_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    ended = run("own_checkpoint.py", tmp_path / "nosuch", tmp_path / "made")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert not (tmp_path / "made").exists()


def test_a_folder_that_was_made_before_is_kept(tmp_path: Path) -> None:
    (tmp_path / "made" / "run").mkdir(parents=True)
    ended = run("own_checkpoint.py", tmp_path / "nosuch", tmp_path / "made")
    assert ended.returncode == 2
    made = tmp_path / "made" / "run"
    assert ended.stderr == f"Error: {made} exists; give another FOLDER, or move this one away.\n"


def test_a_line_that_is_no_utf8_is_read_or_refused(make_run: Callable[..., Path], tmp_path: Path) -> None:
    from runtimes.contract.vocabulary import ByteVocab, save_vocab

    folder = make_run(vocab_size=256)
    save_vocab(folder, ByteVocab())
    artefact = export(folder, tmp_path / "artefact")
    for model, code, said in ((artefact, 0, ""), (TALES, 2, "Error: ")):
        command = [sys.executable, str(EXAMPLES / "score_stream.py"), str(model)]
        ended = subprocess.run(command, input=b"a\xff\xfeb\n", capture_output=True, check=False)
        assert ended.returncode == code, ended.stderr
        assert ended.stderr.decode().startswith(said)
        assert ended.stderr.count(b"\n") == code // 2


def test_the_lines_of_a_model_of_ids_are_numbers(make_run: Callable[..., Path], tmp_path: Path) -> None:
    from runtimes.contract.vocabulary import IdsVocab, save_vocab

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


def test_a_model_whose_ids_have_names_reads_lines_of_names_and_of_ids() -> None:
    music = EXAMPLES / "music" / "chorales"
    ids = runtimes.open_session(music).vocab.encode("4/4 key+0 | S67").tolist()
    named, listed = (run("score_stream.py", music, text=f"{line}\n") for line in ("4/4 key+0 | S67", ids))
    assert named.returncode == 0, named.stderr
    assert named.stdout.split()[0] == listed.stdout.split()[0]
