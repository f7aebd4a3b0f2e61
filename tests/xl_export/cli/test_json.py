"""With --json, standard output of every command is one JSON document, or JSON lines where results stream."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from runtimes import open_session, save_memory
from tests.architectures import ARCHITECTURES
from tests.commands import json_of, xl
from xl_export.cli.main import main

# The command, and a key of its document. `place` makes the path of each {name}.
COMMANDS = [
    ("check {artefact}", "max_difference"),
    ("info {artefact}", "bytes_per_stream"),
    ("info {artefact} --all", "inputs"),
    ("info {run}", "model"),
    ("info {stream}", "positions"),
    ("eval {artefact} --text {text}", "nats"),
    ("eval {run} --text {text} --mem-len 4,8", "rows"),
    ("devices", "hints"),
    ("runs {trained}", "runs"),
    ("set {artefact} --top-p 0.9", "sampling"),
    ("export {run} --out {new}", "identity"),
    ("train tiny --steps 1 --out {new}", "steps"),
    ("train --list", "configurations"),
    ("import {run} --describe", "parameters"),
    ("polygraphy {artefact} --out {new}", "commands"),
    ("recl {run} --text {text} --lengths 2,4 --positions 10", "models"),
    ("attention {run} --text {text} --out {new} --tokens 200", "mean_distance"),
    ("spans {spans}", "spans"),
    ("prepare tokens --train {ids} --vocab-size 9 --out {new}", "identity"),
    ("prepare text --train {text} --vocab byte --out {new}", "identity"),
    ("prepare vocab --kind word --text {text} --out {new}.json", "special"),
]
STREAMED = ["generate {artefact} --prompt The --tokens 3", "score {artefact} --input {text}"]
# Their own tests read the document: they need a GPU, npm, a compiler, public corpora or trained models.
ELSEWHERE = {"build", "refit", "web", "fused-kernel", "demo", "prepare CORPUS"}


@pytest.fixture
def place(
    artefacts: dict[str, Path],
    run: Path,
    make_run,
    text: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Path]:
    """The paths that a command of the table names."""
    command: str = request.node.callspec.params["command"]
    for name in ("draw_average", "draw_stretch", "draw_terms"):  # which take seconds
        monkeypatch.setattr(f"xl_export.plots.attention.{name}", lambda *what, **options: None)
    places = {name: tmp_path / name for name in ("new", "text", "ids", "stream", "trained")}
    places |= {"artefact": artefacts["ring"], "run": run}
    if "{spans}" in command:
        places["spans"] = make_run(**ARCHITECTURES["adaptive-span"])
    if "set " in command:
        places["artefact"] = shutil.copytree(artefacts["ring"], tmp_path / "own")
    if "{trained}" in command:
        assert xl("train", "tiny", "--steps", "1", "--out", places["trained"]).exit_code == 0
    places["text"] = tmp_path / "text.txt"
    places["text"].write_text(text[:600])
    places["ids"] = tmp_path / "ids.npy"
    np.save(places["ids"], np.arange(300) % 9)
    session = open_session(artefacts["ring"])
    save_memory(session.start(2), places["stream"])
    return places


@pytest.mark.parametrize(("command", "key"), COMMANDS)
def test_standard_output_is_one_document(command: str, key: str, place: dict[str, Path]) -> None:
    assert key in json_of(xl(*command.format_map(place).split(), "--json"))


@pytest.mark.parametrize("command", STREAMED)
def test_standard_output_is_lines_of_json(command: str, place: dict[str, Path]) -> None:
    result = xl(*command.format_map(place).split(), "--json")
    assert result.exit_code == 0, result.output
    assert all(isinstance(json.loads(line), dict) for line in result.stdout.splitlines())


def test_every_command_with_json_is_tested() -> None:
    tested = {command.split("{")[0].split(" -")[0].strip() for command, _ in COMMANDS}
    tested |= {command.split()[0] for command in STREAMED} | ELSEWHERE
    assert set(with_json(main, "")) <= tested | {"train"}


def with_json(group: click.Group, prefix: str) -> Iterator[str]:
    """The names of the commands that take --json; public corpora are one."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from with_json(command, f"{prefix}{name} ")
        elif any("--json" in option.opts for option in command.params):
            own = not prefix or name in ("tokens", "text", "vocab")
            yield f"{prefix}{name}" if own else f"{prefix}CORPUS"
