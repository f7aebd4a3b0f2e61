"""The player of the music example on a disk that is full or cannot be written: one sentence, no halves."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from midi import MidiFile

from tests.examples.test_music_files import music, parsed

MUSIC = Path(__file__).parents[2] / "examples" / "music"


def play(*options: object, limit: int | None = None, **streams: object) -> subprocess.CompletedProcess[str]:
    """Runs the program. limit: bytes of the largest file that the system lets it write."""

    def lower() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, MUSIC / "play.py", MUSIC / "chorales", "--tempo", "400", *options]
    words = list(map(str, command))
    # Compiled modules would be cut off too, and the next program could not load them.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, **streams}
    return subprocess.run(words, text=True, preexec_fn=lower, check=False, **given)  # type: ignore[call-overload]


# The MIDI file of 2 seconds has more than 100 bytes; it fits into 9000, and its sound does not.
@pytest.mark.parametrize(("limit", "named", "before"), [(100, "bach.mid", False), (9000, "bach.wav", True)])
def test_a_full_disk_leaves_no_file_or_the_old_ones(
    limit: int, named: str, before: bool, tmp_path: Path
) -> None:
    for suffix in (".mid", ".wav") if before else ():
        (tmp_path / f"bach{suffix}").write_text("old")
    ended = play("--seconds", 2, "--out", tmp_path / "bach", "--force", limit=limit)
    assert ended.returncode == 2
    sentence = f"{tmp_path / named} could not be written: File too large; nothing was changed there."
    assert ended.stderr == f"Error: {sentence}\n"
    assert not ended.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == (["bach.mid", "bach.wav"] if before else [])
    assert all(path.read_text() == "old" for path in tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a folder that nobody can write to on Linux")
def test_a_folder_that_cannot_be_written_is_refused_at_once() -> None:
    ended = play("--out", "/proc/x", "--endless", timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("Error: /proc/x.mid could not be written: ")
    assert ended.stderr.endswith("; nothing was changed there.\n")
    assert ended.stderr.count("\n") == 1
    assert not ended.stdout


@pytest.mark.slow
def test_endless_music_on_a_full_disk_ends_whole(tmp_path: Path) -> None:
    out = tmp_path / "bach.mid"
    ended = play("--endless", "--out", tmp_path / "bach", limit=9000)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"Error: {out} could not be written on: File too large; it ends with the last piece that was whole.\n"
    )
    assert list(tmp_path.iterdir()) == [out]
    assert list(parsed(out.read_bytes()))[-1][1] == b"\xff\x2f\x00"


def test_a_midi_file_without_a_whole_piece_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MidiFile, "_mend", full)
    file = MidiFile(tmp_path / "a.mid", tempo=76)
    with pytest.raises(OSError, match="No space left"):
        file.write(music()[0])
    with pytest.raises(OSError, match="No space left"):
        file.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a full disk")
def test_unwritable_standard_output_is_one_sentence() -> None:
    with open("/dev/full", "wb") as full:
        ended = play("--endless", "--pipe", stdout=full, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr == (
        "Error: standard output cannot be used (No space left on device); give another place.\n"
    )


def test_sound_without_end_goes_on_until_its_reader_goes() -> None:
    command = [sys.executable, MUSIC / "play.py", MUSIC / "chorales", "--endless", "--pipe"]
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
