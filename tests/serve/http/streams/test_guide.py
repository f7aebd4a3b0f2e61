"""The answers that the guide shows have the fields of those that a server gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.serve.http.conftest import Running
from tests.serve.http.streams.conftest import created

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "streams.md"
SHOWN = {
    name: json.loads(block)
    for name, block in re.findall(
        r"<!-- answer: (\w+) -->\n```json\n(.*?)\n```", GUIDE.read_text("utf-8"), re.DOTALL
    )
}


def shape(value: Any) -> Any:
    """The names of all fields and the kinds of their values; of a list that of its first element."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])]
    return type(value).__name__


def test_the_guide_shows_the_fields_of_the_answers(kept: Running, tokens: np.ndarray) -> None:
    stream = created(kept, tokens[:3])
    given = {
        "append": stream.post("append", {"tokens": tokens[3:6].tolist(), "alternatives": 2}),
        "continue": stream.post("continue", {"max_tokens": 6, "seed": 1, "ignore_eos": True}),
        "error": kept.post(f"{stream.path}/rewind", {"tokens": 600}).json(),
    }
    assert set(SHOWN) == set(given)
    for name, answer in given.items():
        assert shape(SHOWN[name]) == shape(answer), name
