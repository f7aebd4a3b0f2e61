"""Calling the commands in this process, as many tests do."""

from __future__ import annotations

import json
import shlex
from typing import Any

from click.testing import CliRunner, Result

from xl_export.cli.main import main


def xl(*arguments: object) -> Result:
    """`xl("check", path)`, or `xl(f"check {path}")` → the result of the command."""
    if len(arguments) == 1:
        arguments = tuple(shlex.split(str(arguments[0])))
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def json_of(result: Result) -> dict[str, Any]:
    """The JSON document that a command that succeeded printed, and nothing else, on standard output."""
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refused(result: Result, *words: str) -> None:
    """Exit code 2, nothing but one sentence on standard error, which holds the given words."""
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: ")
    assert lines[0].endswith(".")
    for word in words:
        assert word in lines[0], lines[0]
