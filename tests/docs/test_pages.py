"""The comparison of outputs: what it lets pass, and what it does not."""

from __future__ import annotations

import pytest

from tests.docs.pages import BLOCK, Block, difference


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ("bits per character  1.6092", "bits per character  1.6111"),
        ("differ by at most 8.58e-06 nats", "differ by at most 3.1e-06 nats"),
        ("speed  23,271 tokens in 0.26 s: 88,276 tokens/s", "speed  23,271 tokens in 11.5 s: 2,024 tokens/s"),
        ("digest 37fea1fd86050b3b7153209ede6682fc", "digest 00fea1fd86050b3b7153209ede6682ff"),
        ("The …", "The memory is yours."),
        ("first\n…\nlast", "first\none\ntwo\nlast"),
        ("a    b", "a b"),
    ],
)
def test_outputs_that_agree(shown: str, real: str) -> None:
    assert difference(shown, real) is None


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ("bits per character  1.6092", "bits per character  1.8298"),
        ("differ by at most 8.58e-06 nats", "differ by at most 1.2e-03 nats"),
        ("passed", "failed"),
        ("passed", "passed\nand more"),
        ("one\ntwo", "one"),
        ("first\n…\nlast", "first\none\ntwo"),
        ("4 layers, D 40", "5 layers, D 40"),
        ("digest 37fea1fd86050b3b7153209ede6682fc", "digest 37fea1fd"),
    ],
)
def test_outputs_that_differ(shown: str, real: str) -> None:
    assert difference(shown, real) is not None


def test_numbers_by_shape_still_need_the_words() -> None:
    assert difference("12 layers", "3 layers", shape_only=True) is None
    assert difference("12 layers", "3 heads", shape_only=True) is not None


def test_a_block_gives_its_mark_and_its_commands() -> None:
    match = BLOCK.search("text\n<!-- not run: needs a GPU -->\n```console\n$ a \\\n> b\nout\n$ c\n```\n")
    assert match is not None
    block = Block(page="p", line=1, language="console", body=match["body"], mark=match["mark"])
    assert block.reason == "needs a GPU"
    assert block.commands == [("a \\\nb", "out"), ("c", "")]
