"""How a command ends and what reaches a terminal: signals, warnings, and text of strangers."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest

from runtimes.base.terminal import printable, without_controls
from runtimes.cli.ends import terminals_protected
from tests.commands import refused, xl
from tests.nightly import every
from tests.sealing import sealed

ROOT = Path(__file__).parents[3]
ESCAPE = "\x1b[31m"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def evaluated(run: Path, packages: Path) -> tuple[int, str]:
    """Exit code and standard error of `xl-export eval` where a folder's packages come first."""
    command = [sys.executable, "-m", "xl_export", "eval", str(run), "--text", str(run / "config.json")]
    shadowed = {**os.environ, "PYTHONPATH": f"{packages}:{ROOT}"}
    ended = subprocess.run(command, env=shadowed, capture_output=True, text=True, timeout=280)
    return ended.returncode, ended.stderr


def on_a_terminal(*arguments: object) -> tuple[int, str]:
    """Exit code and what a terminal receives of a command."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "xl_export", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment())
    os.close(theirs)
    received = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                received += os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
    os.close(ours)
    return process.wait(timeout=280), received.decode("utf-8", errors="replace")


@pytest.mark.parametrize("seed", every(2, range(6)))
def test_an_interrupt_while_packages_are_imported_ends_in_a_word(
    seed: int, artefacts: dict[str, Path]
) -> None:
    """-X importtime tells when the imports of the command line have begun. The command does not end before
    its input does.
    """
    command = [sys.executable, "-X", "importtime", "-m", "xl_export", "score", str(artefacts["ring"])]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([*command, "--input", "-"], text=True, env=environment(), **pipes)
    assert process.stderr is not None
    until = ["xl_export.shadow", "numpy.exceptions", "click.types", "numpy", "click", "xl_export.cli.main"][
        seed
    ]
    for line in process.stderr:
        if line.split("|")[-1].strip() == until:
            break
    time.sleep(random.Random(seed).random() * 0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=280)
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130, lines
    assert lines == ["stopped"]


# What an import does when a signal comes: it calls `exec`, as data classes and named tuples do, or it raises
# another error in place of the signal's, or goes on as if there had been none.
SWALLOWED = [
    ((130, "stopped\n"), "exec('os.kill(os.getpid(), signal.SIGINT)')"),
    ((130, "stopped\n"), "try: signal.raise_signal(2)\nexcept BaseException: raise SystemError"),
    ((143, ""), "try: signal.raise_signal(15)\nexcept BaseException: pass"),
]


@pytest.mark.parametrize(("end", "code"), SWALLOWED)
def test_a_signal_that_an_import_swallows_ends_in_a_word(
    end: tuple[int, str], code: str, run: Path, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(
        f"import os, signal, time\n{code}\n"
        "for _ in range(1000):\n"
        "    time.sleep(0.01)\n"
        "os._exit(7)  # the command went on\n"
    )
    assert evaluated(run, tmp_path) == end


def test_a_clean_up_that_takes_long_is_not_interrupted_again() -> None:
    program = (
        "import os, signal, time\n"
        "from runtimes.cli import ends\n"
        "ends.clean_up_when_terminated()\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "finally:\n"
        "    for _ in range(70):\n"
        "        time.sleep(0.01)\n"
        "    ends.stop_insisting()\n"
        "    print('cleaned')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=280
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "cleaned\n", "")


def test_what_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """`nohup` and background jobs start a command with signals that are ignored."""
    code = (
        "import os, signal\n"
        "import runtimes.cli.info as info\n"
        "from xl_export.__main__ import stop_at_interrupt\n"
        "stop_at_interrupt()\n"
        "def describe(path):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    raise SystemExit(7)\n"
        "info.describe = describe\n"
        "from xl_export.cli.main import main\n"
        "main(['info', 'x'])\n"
    )

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, preexec_fn=ignore, timeout=280
    )
    assert ended.returncode == 7, ended.stderr


def test_more_threads_than_cpus_are_warned_about(
    artefacts: dict[str, Path], run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("runtimes.cli.options.available_cpus", lambda: 2)
    result = xl("check", artefacts["ring"], "--threads", 3)
    assert result.exit_code == 0
    sentence = "3 threads are more than the 2 CPUs that this process may use, which makes it slower"
    assert result.stderr == f"Warning: {sentence}; give 2 or fewer.\n"
    assert xl("check", artefacts["ring"], "--threads", 2).stderr == ""
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "threads": 5, "steps": 1, "batch": 1}))
    result = xl("train", tmp_path / "config.json", "--out", tmp_path / "run", "--text", tmp_path / "missing")
    assert "Warning: 5 threads are more than the 2 CPUs" in result.stderr


def test_saving_memory_replaces_only_saved_streams(artefacts: dict[str, Path], tmp_path: Path) -> None:
    arguments = ("generate", artefacts["ring"], "--prompt", "a", "--tokens", 2, "--save-memory")
    saved = tmp_path / "streams"
    assert xl(*arguments, saved).exit_code == 0
    before = saved.read_bytes()
    assert xl(*arguments, saved, "--load-memory", saved).exit_code == 0
    assert saved.read_bytes() != before
    np.savez(tmp_path / "weights.npz", owner=np.zeros(3))
    (tmp_path / "notes.txt").write_text("notes of a year")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("weights.npz", "notes.txt", "empty", "pipe"):
        result = xl(*arguments, tmp_path / name)
        refused(result, str(tmp_path / name), "no file of saved streams", "--save-memory")
        assert result.stdout == ""
    assert (tmp_path / "notes.txt").read_text() == "notes of a year"


def test_escapes_are_visible() -> None:
    assert printable("a\x1b[2J\n\x9b\u202e\udcffé ü") == "a\\x1b[2J\\n\\x9b\\u202e\\udcffé ü"
    assert without_controls("a\x1b\t\n\r\x07\u200d\xa0é") == "a\\x1b\t\n\\r\\x07\u200d\xa0é"


def test_untrusted_names_are_escaped(run: Path, tmp_path: Path) -> None:
    result = xl("info", tmp_path / f"{ESCAPE}\x9b2Jname")
    refused(result, "\\x1b[31m\\x9b2Jname")
    assert ESCAPE not in result.stderr
    named = Path(shutil.copytree(run, tmp_path / f"run{ESCAPE}"))
    result = xl("import", named / "model.safetensors", "--describe")
    assert result.exit_code == 0, result.stderr
    assert ESCAPE not in result.stdout


class Terminal(io.StringIO):
    """What a stream writes to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("name", "kept"), [("stdout", "\n\t"), ("stderr", "\n\t\r")])
def test_no_control_character_reaches_a_terminal(
    name: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    controls = "".join(map(chr, (*range(32), *range(127, 160))))
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        monkeypatch.setattr(sys, name, stream)
        with terminals_protected():
            click.echo(controls, err=name == "stderr", nl=False)
            print(controls, file=getattr(sys, name), end="")
    assert pipe.getvalue() == 2 * controls
    assert {c for c in terminal.getvalue() if c in controls} == set(kept)


@pytest.mark.slow
def test_an_untrusted_name_is_escaped_on_standard_error(run: Path, tmp_path: Path) -> None:
    named = Path(shutil.copytree(run, tmp_path / f"run{ESCAPE}"))
    text = tmp_path / "text.txt"
    text.write_text("The class of the class " * 40)
    code, shown = on_a_terminal(
        *("recl", named, "--text", text, "--lengths", "4,8", "--positions", 5, "--mem-len", 8)
    )
    assert code == 0, shown
    assert "predicting" in shown  # a line of standard error with the name
    assert "\x1b" not in shown


def test_generated_text_is_escaped_only_on_a_terminal(artefacts: dict[str, Path], tmp_path: Path) -> None:
    prompt = "The\x1bc\tkey"
    folder = Path(shutil.copytree(artefacts["ring"], tmp_path / "artefact"))
    vocab = json.loads((folder / "vocab.json").read_text())
    missing = sorted(set(prompt) - set(vocab["symbols"]))
    free = [at for at, symbol in enumerate(vocab["symbols"]) if symbol not in prompt]
    for at, symbol in zip(free, missing, strict=False):
        vocab["symbols"][at] = symbol
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "spec.json").write_bytes(
        sealed(json.loads((folder / "spec.json").read_text()), folder, "vocab.json")
    )
    arguments = ("generate", folder, "--prompt", prompt, "--tokens", 2)
    code, shown = on_a_terminal(*arguments)
    assert code == 0, shown
    assert "\x1b" not in shown
    assert shown.startswith("The\\x1bc\tkey")
    piped = xl(*arguments)
    assert piped.exit_code == 0
    assert piped.stdout.startswith(prompt)
