"""`xl-export generate` with prompts of ids, prompts in a file, and answers as ids or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from runtimes.sessions.open import open_session
from tests.commands import xl
from xl_export.cli.main import main

GREEDY = ("--tokens", 6, "--temperature", 0)


def prompt_of(folder: Path, text: str) -> str:
    return ",".join(map(str, open_session(folder).vocab.encode(text).tolist()))


def test_ids_generate_what_their_text_generates(artefacts: dict[str, Path]) -> None:
    folder = artefacts["ring"]
    given = prompt_of(folder, "The ")
    as_text = xl("generate", folder, "--prompt", "The ", *GREEDY).stdout
    assert xl("generate", folder, "--prompt-ids", given, *GREEDY).stdout == as_text
    shown = xl("generate", folder, "--prompt-ids", given, "--ids", *GREEDY).stdout.split()
    assert shown[:4] == given.split(",")
    assert open_session(folder).vocab.encode(as_text[:-1]).tolist() == [int(token) for token in shown]


@pytest.mark.parametrize("content", ["The \nA", '{"text": "The "}\n\n{"ids": [IDS]}\n', '"The "\n[IDS]'])
def test_prompts_come_from_a_file_or_from_standard_input(
    content: str, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    folder = artefacts["ring"]
    content = content.replace("IDS", prompt_of(folder, "A"))
    expected = xl("generate", folder, "--prompt", "The ", "--prompt", "A", *GREEDY).stdout
    (tmp_path / "prompts").write_text("\ufeff" + content)
    assert xl("generate", folder, "--prompts", tmp_path / "prompts", *GREEDY).stdout == expected
    arguments = [str(argument) for argument in ("generate", folder, "--prompts", "-", *GREEDY)]
    assert CliRunner().invoke(main, arguments, input=content).stdout == expected


def test_json_has_each_token_and_each_finished_row(artefacts: dict[str, Path]) -> None:
    folder = artefacts["ring"]
    expected = xl("generate", folder, "--prompt", "The ", *GREEDY).stdout[:-1]
    result = xl("generate", folder, "--prompt", "The ", "--prompt", "A", "--json", *GREEDY)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    rows = [line for line in lines if "ended" in line]
    pieces = [line for line in lines if "token" in line]
    assert [(row["row"], row["prompt"], row["ended"]) for row in rows] == [
        (0, "The ", "length"),
        (1, "A", "length"),
    ]
    assert rows[0]["prompt"] + rows[0]["text"] == expected
    assert rows[0]["ids"] == [piece["token"] for piece in pieces if piece["row"] == 0]
    assert rows[0]["text"] == "".join(piece["text"] for piece in pieces if piece["row"] == 0)
    assert len(pieces) == 12
    stopped = xl(
        "generate", folder, "--prompt", "The ", "--stop", rows[0]["text"][0], "--json", *GREEDY
    ).stdout
    assert json.loads(stopped.splitlines()[-1])["ended"] == "stop"


def test_searches_print_the_best_and_as_json_all(artefacts: dict[str, Path]) -> None:
    for options in (["--beams", "3"], ["--best-of", "3", "--seed", "2"]):
        command = ["generate", artefacts["ring"], "--prompt", "The ", "--tokens", "8", *options]
        lines = [json.loads(line) for line in xl(*command, "--json").stdout.splitlines()]
        assert [line["rank"] for line in lines] == [0, 1, 2]
        assert xl(*command).stdout == f"The {lines[0]['text']}\n"
        assert lines[0]["score"] >= lines[1]["score"] >= lines[2]["score"]
        ids = " ".join(map(str, lines[0]["prompt_ids"] + lines[0]["ids"]))
        assert xl(*command, "--ids").stdout == f"{ids}\n"
