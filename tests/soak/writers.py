"""Every command that writes something, and how one sees that its result is whole."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtimes import load_memory, open_session
from runtimes.base.files import read_json, write_json
from runtimes.base.npz import read_npz
from runtimes.contract.engine import load_engine
from runtimes.contract.spec import load_spec
from tests.trainer.data.corpus_files import make_source
from trainer.data.dataset import open_dataset
from trainer.run.checkpoint import load_run

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A command line that writes `out`.

    whole: raises where `out` is not a whole result. again: what follows the arguments when `out` exists
    already. needs: the package without which the command cannot run.
    """

    name: str
    arguments: Sequence[str | Path]
    out: Path
    whole: Callable[[Path], object]
    again: Sequence[str] = ("--force",)
    program: str = "xl_export"
    needs: str = "numpy"

    def start(self, *more: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", self.program, *map(str, self.arguments), *more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.out.parent,
            env=environment,
        )

    def hidden(self) -> list[str]:
        """What is half written beside the place of the result."""
        return sorted(path.name for path in self.out.parent.iterdir() if path.name.startswith("."))


def writers(run: Path, artefact: Path, shift: Path, text: Path, folder: Path) -> list[Writer]:
    """Every command that writes, each with a folder of its own.

    artefact, shift: with ring memory, and one that TensorRT takes.
    """

    config = {
        "model": {"layers": 1, "d_model": 16, "heads": 2, "head_dim": 8, "d_ff": 24},
        "training": {"mem_len": 8, "segment": 8},
        "evaluation": {"mem_len": 8, "segment": 8},
        "batch": 4,
        "steps": 60,
        "validate_every": 10,
        "checkpoint_every": 2,
        "threads": 1,
        "text": str(text),
    }
    write_json(folder / "config.json", config)
    enwik8 = make_source(folder / "corpus", "enwik8", "zip")

    def folder_of(name: str, file: str) -> Path:
        (folder / name).mkdir()
        return folder / name / file

    def writer(
        name: str,
        file: str,
        option: str,
        arguments: Sequence[object],
        whole: Callable[[Path], object],
        again: Sequence[str] = ("--force",),
        **more: str,
    ) -> Writer:
        out = folder_of(name, file)
        given = [str(argument) for argument in (*arguments, option, out)]
        return Writer(name=name, arguments=given, out=out, whole=whole, again=again, **more)

    losses = ("eval", artefact, "--text", text)
    recl = ("recl", run, "--text", text, "--lengths", "4:12:4", "--positions", "50")
    corpus = ("prepare", "enwik8", "--from", enwik8, "--unverified")
    engine = ("build", shift, "--flavour", "rtx", "--compute-capability", "8.6")
    imported = (
        "import",
        DATA / "kimiyoung-enwik8",
        "--mem-len",
        "8",
        "--segment",
        "8",
        "--mask",
        "same-length",
    )
    window = ("run", "sliding-window", "--lengths", "16", "--history", folder / "history.jsonl")
    return [
        writer("train", "run", "--out", ("train", folder / "config.json"), load_run),
        writer("export", "artefact", "--out", ("export", run), load_spec),
        writer("import", "run", "--out", imported, load_run),
        writer("prepare", "dataset", "--out", corpus, open_dataset),
        writer("build", "engine", "--out", engine, load_engine, needs="tensorrt_rtx"),
        writer("attention", "pictures", "--out", ("attention", run, "--text", text), _pictures),
        writer("losses", "losses.npz", "--losses", losses, read_npz),
        writer("losses-csv", "losses.csv", "--losses", losses, _table),
        writer(
            "memory",
            "streams",
            "--save-memory",
            ("generate", artefact, "--prompt", "the ", "--tokens", "1000"),
            lambda path: load_memory(path, open_session(artefact)),
            again=(),
        ),
        writer("recl", "recl.json", "--out", recl, read_json),
        writer("benchmarks", "plot.png", "--plot", window, _picture, program="benchmarks"),
    ]


def _pictures(path: Path) -> None:
    read_json(path / "attention.json")
    read_npz(path / "attention.npz")
    for picture in ("figure-5.png", "figure-6.png"):
        _picture(path / picture)


def _picture(path: Path) -> None:
    assert path.read_bytes()[-8:-4] == b"IEND", path  # how a PNG file ends


def _table(path: Path) -> None:
    """Every row of a CSV file has as many cells as the first, and the file ends with a line's end."""
    content = path.read_text(encoding="utf-8")
    assert content.endswith("\n")
    lines = [line for line in content.splitlines() if not line.startswith("#")]
    cells = {len(row) for row in csv.reader(lines)}
    assert len(lines) > 1
    assert len(cells) == 1, cells


def handles(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a process handles a signal; True where the system does not say, and at its end."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return True
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return process.poll() is not None or not masks or bool(masks[0] >> (number - 1) & 1)


def wait_for_handlers(process: subprocess.Popen[str]) -> None:
    """Until the command, which Python begins to load, has come to its first own line."""
    while not handles(process, signal.SIGTERM):
        time.sleep(0.002)
