"""The trained artefact in examples/music/chorales: it passes its check, is small, and plays music."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import play
import pytest
from midi import MidiFile
from scheme import END, IDS, NAMES, Reader

import runtimes

ARTEFACT = Path(__file__).parents[2] / "examples" / "music" / "chorales"
MAX_BYTES = 3_000_000


@pytest.fixture(scope="module")
def session() -> runtimes.Session:
    return runtimes.open_session(ARTEFACT, threads=1)


def test_it_passes_its_check_and_is_small() -> None:
    assert runtimes.check(ARTEFACT, threads=1).passed
    assert sum(path.stat().st_size for path in ARTEFACT.iterdir()) <= MAX_BYTES


def test_its_tokens_have_the_names_of_the_scheme(session: runtimes.Session) -> None:
    vocab = session.vocab
    assert vocab.to_json()["names"] == list(NAMES)
    assert vocab.special.end_of_document == IDS[END]
    assert vocab.encode("4/4 key+0 | S67").tolist() == [IDS[n] for n in ("4/4", "key+0", "|", "S67")]


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


def test_a_stream_goes_on_after_the_end_of_a_piece(session: runtimes.Session) -> None:
    line = ["3/4", "key-2", "|", "S70", "A65", "T58", "B46", "2", "3", "end"]
    prompt = [IDS[name] for name in line]
    stream = play.music_ids(session, prompt, sampler=runtimes.Sampler(top_p=0.9), seed=1)
    names = [NAMES[next(stream)] for _ in range(len(line) + 4)]
    assert names[: len(line)] == line
    assert names[len(line)] in ("3/4", "4/4")
    assert names[len(line) + 1].startswith("key")
    assert names[len(line) + 2] in ("|", "2", "3", "4")


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
    with pytest.raises(runtimes.UserError, match=r"tokens that are not those of scheme\.py"):
        play.music_ids(runtimes.open_session(run), [], sampler=runtimes.Sampler(), seed=0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tempo", "3"], "--tempo is 3; expected 10 to 400"),
        (["--tempo", "nan"], "--tempo is nan; expected 10 to 400"),
        (["--seed", "-1"], "--seed is -1; expected 0"),
        (["--seconds", "0"], "--seconds is 0; expected a positive number"),
        (["--out", "missing/bach"], "the folder missing of --out does not exist"),
        (["--top-p", "2"], "--top-p is 2"),
        (["--temperature", "-1"], "--temperature is -1"),
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


def test_play_ends_in_one_sentence_where_the_stream_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def failing(*_: object) -> Iterator[int]:
        yield IDS["4/4"]
        raise runtimes.UserError("the logits are not numbers.")

    monkeypatch.setattr(play, "_drawn", failing)
    monkeypatch.setattr(sys, "argv", ["play.py", str(ARTEFACT), "--out", str(tmp_path / "bach")])
    with pytest.raises(SystemExit) as ended:
        play.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "Error: the logits are not numbers.\n"


def test_an_interrupted_midi_file_can_be_played(tmp_path: Path) -> None:
    """Every piece that begins leaves the file complete up to there, although nobody closes it."""
    from perform import slices
    from scheme import events

    names = "4/4 key+0 | S70 2 S72 end 4/4 key+0 | S74 end"
    file = MidiFile(tmp_path / "a.mid", tempo=76)
    for piece in slices(events([IDS[name] for name in names.split()]), tempo=76):
        file.write(piece)
    content = (tmp_path / "a.mid").read_bytes()
    length = int.from_bytes(content[18:22], "big")
    assert content[22 : 22 + length].endswith(b"\xff\x2f\x00")
    assert bytes([0x90, 72, 84]) in content[22 : 22 + length]
    file.close()


@pytest.mark.parametrize("part", ["write_wav", "MidiFile"])
def test_a_full_disk_leaves_no_file(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(play, part, full)
    monkeypatch.setattr(
        sys, "argv", ["play.py", str(ARTEFACT), "--seconds", "1", "--out", str(tmp_path / "bach")]
    )
    with pytest.raises(SystemExit) as ended:
        play.main()
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("could not be written: No space left on device; nothing was changed there.")
    assert list(tmp_path.iterdir()) == []


def test_sound_without_end_goes_on_until_its_reader_goes() -> None:
    command = [sys.executable, ARTEFACT.parent / "play.py", ARTEFACT, "--endless", "--pipe"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    late = threading.Timer(120, program.kill)  # it may never come to an end, where this test fails
    late.start()
    try:
        heard = program.stdout.read(2_000_000)
        program.stdout.close()
        assert program.wait() == 0
    finally:
        late.cancel()
    assert heard[:4] == b"RIFF"
    assert len(heard) == 2_000_000
    assert program.stderr.read() == b"stopped\n"
    program.stderr.close()
