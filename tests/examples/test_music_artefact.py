"""The trained artefact in examples/music/chorales: it passes its check, is small, and plays music."""

from __future__ import annotations

import subprocess
import sys
import threading
import wave
from pathlib import Path

import numpy as np
import play
import pytest
from scheme import END, IDS, Reader

import runtimes

ARTEFACT = Path(__file__).parents[2] / "examples" / "music" / "chorales"
MAX_BYTES = 3_000_000


@pytest.fixture(scope="module")
def session() -> runtimes.Session:
    return runtimes.open_session(ARTEFACT, threads=1)


def test_it_passes_its_check_and_is_small() -> None:
    assert runtimes.check(ARTEFACT, threads=1).passed
    assert sum(path.stat().st_size for path in ARTEFACT.iterdir()) <= MAX_BYTES


def test_it_plays_in_constant_memory_and_follows_the_scheme(session: runtimes.Session) -> None:
    memory = session.start(batch=1)
    shapes = {name: tensor.shape for name, tensor in memory.tensors.items()}
    chance = np.random.default_rng(0)
    draw = runtimes.Draw([runtimes.Sampler(top_p=0.95)], session.vocab.size)
    reader, token, begun = Reader(), IDS[END], 0
    for _ in range(450):  # more than the memory holds
        logits, memory = session.predict(np.array([[token]]), memory)
        token = int(draw(logits, [chance.random()])[0])
        event = reader.read(token)
        begun += event is not None and event.first
    assert {name: tensor.shape for name, tensor in memory.tensors.items()} == shapes
    assert memory.positions[0] == 450 > session.rule.mem_len
    assert begun >= 1
    assert reader.ignored < 12  # of 450 tokens


def test_the_program_writes_music(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["play.py", str(ARTEFACT), "--seconds", "2", "--seed", "3", "--out", str(tmp_path / "bach")]
    monkeypatch.setattr(sys, "argv", arguments)
    play.main()
    assert "bach.mid" in capsys.readouterr().out
    assert (tmp_path / "bach.mid").read_bytes()[:4] == b"MThd"
    with wave.open(str(tmp_path / "bach.wav")) as file:
        assert file.getnframes() > 2 * file.getframerate()


def test_models_of_other_tokens_are_refused(run: Path) -> None:
    with pytest.raises(runtimes.UserError, match=r"tokens that differ from scheme\.py's"):
        play.music_ids(runtimes.open_session(run), [], sampler=runtimes.Sampler(), seed=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tempo", "3"], "--tempo is 3; expected 10 to 400"),
        (["--out", "missing/bach"], "the folder missing of --out does not exist"),
        (["--top-p", "2"], "--top-p is 2"),
    ],
)
def test_play_refuses_in_one_sentence_and_writes_nothing(
    options: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["play.py", str(ARTEFACT), "--seconds", "1", *options])
    with pytest.raises(SystemExit) as ended:
        play.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"Error: {sentence}")
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not list(tmp_path.iterdir())


def test_play_keeps_files_that_exist_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "bach.wav"
    kept.write_text("another recording")
    arguments = ["play.py", str(ARTEFACT), "--seconds", "1", "--out", str(tmp_path / "bach")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit):
        play.main()
    assert capsys.readouterr().err == f"Error: {kept} exists; give another --out, or --force to replace it.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bach.wav"]
    assert kept.read_text() == "another recording"
    monkeypatch.setattr(sys, "argv", [*arguments, "--force"])
    play.main()
    assert kept.read_bytes()[:4] == b"RIFF"


def test_sound_without_end_goes_on_until_its_reader_goes() -> None:
    command = [sys.executable, ARTEFACT.parent / "play.py", ARTEFACT, "--endless", "--pipe"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    late = threading.Timer(120, program.kill)  # it may never come to an end, where this test fails
    late.start()
    try:
        heard = program.stdout.read(500_000)
        program.stdout.close()
        assert program.wait() == 0
    finally:
        late.cancel()
    assert heard[:4] == b"RIFF"
    assert len(heard) == 500_000
    assert program.stderr.read() == b"stopped\n"
    program.stderr.close()
