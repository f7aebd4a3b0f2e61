"""What the demo shows of a trained model."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtimes.base.errors import UserError
from runtimes.sessions.open import open_session
from xl_export.demo import shipped


def test_trained_models_are_found_below_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped.find_shipped(Path("examples/none")) is None
    (tmp_path / "examples/none").mkdir(parents=True)
    (tmp_path / "examples/none/spec.json").touch()
    assert shipped.find_shipped(Path("examples/none")) == tmp_path / "examples/none"


def test_a_stream_is_written_and_measured(make_run, capsys):
    session = open_session(make_run())
    text = shipped.write_text(session, "The fox", tokens=9, seed=0)
    assert text.startswith("The fox")
    assert capsys.readouterr().out == text + "\n"
    flat = shipped.measure_flat(session, tokens=7)
    assert flat.tokens == 7
    assert flat.memory_bytes == sum(tensor.nbytes for tensor in session.start(1).tensors.values())
    assert min(flat.first, flat.last) > 0


def test_music_is_written_by_the_examples_program(tmp_path, capsys):
    music = shipped.find_shipped(shipped.MUSIC)
    assert music is not None
    (tmp_path / "tune.mid").touch()
    with pytest.raises(UserError, match=r"play\.py: .*tune\.mid exists; give another --out, or --force"):
        shipped.play_music(music, tmp_path / "tune", seconds=1)
    shipped.play_music(music, tmp_path / "tune", seconds=1, force=True)
    assert (tmp_path / "tune.mid").stat().st_size
    assert (tmp_path / "tune.wav").is_file()
    assert "tune.mid" in capsys.readouterr().out


def test_the_error_of_the_program_is_told_whole(tmp_path, monkeypatch):
    music = tmp_path / "chorales"
    monkeypatch.setattr(shipped.sys, "executable", "/bin/sh")
    sentence = f"{'a long name ' * 40}could not be written: no space left."
    program = tmp_path / "play.py"
    program.write_text(f"echo 'Error: {sentence}' >&2; exit 2")
    with pytest.raises(UserError) as found:
        shipped.play_music(music, tmp_path / "tune")
    assert str(found.value) == f"{program}: {sentence}"
    program.write_text("printf 'Traceback:\\n  a line\\nKeyError: 1' >&2; exit 1")
    with pytest.raises(UserError) as found:
        shipped.play_music(music, tmp_path / "tune")
    assert str(found.value) == f"{program}: KeyError: 1"
    program.write_text("exit 3")
    with pytest.raises(UserError, match=r"play\.py: it ended with exit code 3\.$"):
        shipped.play_music(music, tmp_path / "tune")
