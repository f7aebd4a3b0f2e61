"""Signals at random moments in every command that writes: the result is absent, the old one, or whole."""

from __future__ import annotations

import importlib.util
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtimes.base.tensors_file import read_tensors
from tests.soak.writers import Writer, wait_for_handlers, writers
from xl_export.artefact.export import export

GENTLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LONGEST = 60.0  # seconds that a signal waits for its moment


@pytest.fixture(scope="module")
def commands(
    run: Path, artefacts: dict[str, Path], text: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Writer]:
    folder = tmp_path_factory.mktemp("writers")
    (folder / "text.txt").write_text(text[:4000], encoding="utf-8")
    shift = export(run, folder / "shift", memory="shift", target="tensorrt")
    made = writers(run, artefacts["ring"], shift, folder / "text.txt", folder)
    return {writer.name: writer for writer in made if importlib.util.find_spec(writer.needs)}


def finish(writer: Writer) -> float:
    """Runs the command to its end, after which nothing half written is left; how long it took."""
    began = time.monotonic()
    process = writer.start(*(writer.again if writer.out.exists() else ()))
    _, said = process.communicate()
    assert process.returncode == 0, f"{writer.name}: {said}"
    writer.whole(writer.out)
    assert writer.hidden() == [], f"{writer.name} left these after it ended"
    return time.monotonic() - began


def interrupt(writer: Writer, number: signal.Signals, seconds: float) -> str:
    """Sends the signal so long after the command has begun; what became of the command."""
    there = writer.out.exists()
    process = writer.start(*(writer.again if there else ()))
    wait_for_handlers(process)
    time.sleep(seconds)
    process.send_signal(number)
    _, said = process.communicate()
    what = f"{writer.name}, {number.name} after {seconds:.3f} s: exit code {process.returncode}\n{said}"
    if writer.out.exists():
        try:
            writer.whole(writer.out)
        except Exception as error:
            raise AssertionError(f"{writer.out} is not whole ({error}): {what}") from error
    else:
        assert not there, f"the old result is gone: {what}"
    if process.returncode == 0:  # it came to its end first
        return "finished"
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL, what
        return "killed"
    # While Python itself ends, a signal has its default action again; the work is done by then.
    ended = process.returncode == -number and writer.out.exists() and not said
    assert ended or process.returncode == 128 + number, what
    for word in ("Traceback", "Exception ignored", "most recent call"):
        assert word not in said, what
    assert writer.hidden() == [], f"it left {writer.hidden()}: {what}"
    return "finished" if ended else "stopped"


@pytest.mark.parametrize("number", GENTLE)
def test_saving_streams_ends_well_at_a_signal(
    number: signal.Signals, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    """For the command that starts fastest; `make soak` has all commands and random moments."""
    file = tmp_path / "streams"
    endless = (
        "generate",
        artefacts["ring"],
        "--prompt",
        "the ",
        "--tokens",
        "10000000",
        "--save-memory",
        file,
    )
    writer = Writer(name="memory", arguments=endless, out=file, whole=read_tensors, again=())
    assert interrupt(writer, number, 0.2) == "stopped"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_of_signals(commands: dict[str, Writer], rounds: Callable[[str], Iterator[int]]) -> None:
    counts: Counter[str] = Counter()
    durations: dict[str, float] = {}
    faults: list[str] = []
    for seed in rounds("signals"):
        chance = random.Random(seed)
        writer = commands[sorted(commands)[seed % len(commands)]]
        try:
            if writer.name not in durations:
                durations[writer.name] = finish(writer)
            for _ in range(3):
                number = chance.choice((*GENTLE, signal.SIGKILL))
                seconds = chance.uniform(0, min(durations[writer.name], LONGEST))
                counts[interrupt(writer, number, seconds)] += 1
            finish(writer)
            counts[writer.name] += 1
        except AssertionError as error:
            faults.append(f"SOAK_SEED={seed}: {error}")
            print(f"soak: FAULT {faults[-1]}", flush=True)
        print(f"soak: signals, {dict(counts)}", flush=True)
    assert not faults, "\n".join(faults)
