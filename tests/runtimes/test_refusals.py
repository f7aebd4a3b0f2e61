"""The table of refusals of the Python entry points: what was given, and words of the one sentence.

`tests/test_sessions.py` has the table of what a session is given, `tests/runtimes/cli/test_refusals.py` that
of the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import (
    Sampler,
    Session,
    TextToScore,
    beam_search,
    best_of,
    best_of_groups,
    evaluate,
    generate,
    open_session,
    score_texts,
)
from runtimes.base.errors import UserError
from runtimes.contract.device import Device
from runtimes.contract.rule import MAX_LENGTH, MemoryRule
from runtimes.contract.sampling import SAMPLING, SETTINGS, read_sampling
from runtimes.contract.vocabulary import ByteVocab, IdsVocab, SpecialTokens
from runtimes.tasks.sweep import parse_values
from tests.runtimes.tasks.independent_texts import Counting

NO_COUNTS = (0, -1, 1.5, math.nan, math.inf, "1", None)
NAMED = IdsVocab(9, names=[*"abcdefghi"], special=SpecialTokens(beginning=7))


class Over(Counting):
    """A session over another vocabulary."""

    def __init__(self, vocab: Any) -> None:
        super().__init__()
        self.vocab, self.sampler = vocab, Sampler()


@dataclass
class Given:
    """What a row of the table may use."""

    ring: Session
    shift: Session
    folder: Path


def continued(g: Given, given: dict[str, Any]) -> None:
    """Generates from streams that have begun."""
    options = {**given}
    memory = g.shift.start(rows := options.pop("rows"))
    memory.positions[:] = 5
    try:
        list(generate(g.shift, max_tokens=2, memory=memory, **options))
    finally:
        assert memory.positions.tolist() == [5] * rows


def scored(g: Given, text: Any) -> None:
    """Scores two texts, of which the second is refused."""
    scores = score_texts(Counting(), [[1, 2], text])
    assert next(scores).tokens == 1
    next(scores)


def sampling(g: Given, content: str) -> None:
    (g.folder / SAMPLING).write_text(content)
    read_sampling(g.folder)


PROMPTS: list[tuple[Any, str]] = [
    ("", "encodes to no tokens"),
    (["a", ""], "prompt 1"),
    ([], "no prompt was given"),
    ("a\u4e00", "'一', character 2"),
    ([1, 999], "the prompt has the token id 999, outside the vocabulary"),
    ([-1], "the token id -1, outside"),
    (np.array([1.0, 2.0]), "the prompt is neither a text nor a list of token ids"),
    ([[[1, 2]]], "the prompt is neither a text nor a list"),
    ([[1], []], "prompt 1 has no token ids"),
    *((given, "token ids") for given in (b"The", [b"The"], bytearray(b"The"), 5)),
]
TEXTS: list[tuple[Any, str]] = [
    ([1, 9], "text 2 has the token id 9, outside the vocabulary"),
    ([-1], "text 2 has the token id -1"),
    ([1.5], "text 2 is neither a text nor a list of token ids"),
    ([[1], [2, 3]], "text 2 is neither"),
    (7, "text 2 is neither"),
    (b"abc", "text 2 is neither"),
    ("abc", "text 2: 'abc', word 1 of the text"),
    (TextToScore(text=[1], context=[9]), "the context of text 2 has the token id 9"),
    (TextToScore(text=[1 << 70], place="line 8"), "line 8 is neither"),
]
DEVICES = [
    (None, "device is 'None'; expected one of"),
    ("gpu", "'gpu'; cuda was probably meant; expected one of auto, cpu"),
    ("GPU:1", "cuda was probably meant"),
    ("tensort", "tensorrt was probably meant"),
    ("trt", "tensorrt was probably meant"),
    ("", "device is ''; expected one of"),
    ("cuda:", "expected one of"),
    ("cuda:1:2", "expected one of"),
    ("cpu:0", "only cuda has numbers"),
    ("cuda:64", "expected a number of 0 to 63"),
    ("cpu+tf32", r"\+tf32 is for cuda; expected cpu or cuda\+tf32"),
]
DRAWING = [
    {name: value}
    for name, each in SETTINGS.items()
    for value in (math.nan, math.inf, "1", each.range.least - 1, each.range.most * 2)
]
SIZES = [
    {name: value}
    for name in ("mem_len", "segment", "clamp_len")
    for value in (-1, 1.5, "8", MAX_LENGTH + 1, *([] if name == "mem_len" else [0]))
]
VALUES = ["", ",", "x", "1.5", "-1", "1:2", "1:2:3:4", "1:9:0", "9:1:-1", "9:1:1", "64,9:1:1", "64,1:9:0"]
VALUES += ["0:99999999999999999999:1", "9" * 5000]

OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"max_tokens": given}, f"max_tokens is {given!r}") for given in NO_COUNTS),
    ({"stop": ["x", ""]}, "stop string is empty"),
    ({"stop": "a", "text": False}, "stop strings are searched in the text"),
    *(({"seed": given}, f"seed is {given!r}") for given in (-1, 1.5, math.inf, None)),
]
CONTINUED: list[tuple[dict[str, Any], str]] = [  # in shift memory
    ({"prompts": ["ab", "a"], "rows": 2}, "equal numbers of tokens"),
    ({"prompts": ["a", "b"], "rows": 2, "stop": ("x",)}, "one stream at a time"),
    ({"prompts": ["a", "b"], "rows": 3}, "2 prompts were given and the memory holds 3 streams"),
]
ONE_TEXT = "texts is one text .* give a list of texts"
SCORED: list[tuple[dict[str, Any], str]] = [
    *(({"texts": text}, ONE_TEXT) for text in ("It is said", b"It is said", TextToScore(text="It"))),
    ({"bos": True}, "bos needs a token before a text, and the byte vocabulary"),
    ({"eos": True}, "eos needs a token after a text"),
    ({"texts": ["\ud800"]}, "text 1 has half of a surrogate pair"),
    *(({"batch": given}, f"batch is {given!r}") for given in NO_COUNTS if given is not None),
    *(({"window": given}, f"window is {given!r}") for given in NO_COUNTS),
]
THREADS = "expected a whole number from 1 to 1024"
EVALUATED: list[tuple[dict[str, Any], str]] = [
    *(({"tokens": np.zeros(n, np.int64)}, "the text has fewer than 2 tokens") for n in (0, 1)),
    *(({"lanes": lanes}, f"lanes is {lanes}; expected 1 to 19") for lanes in (0, -1, 20, 1.5)),
    *(({"segment": segment}, "1 to 8") for segment in (0, -1, 9, 1.5)),
    ({"tokens": np.append(np.zeros(8, np.int64), 999)}, "target 999 is outside"),  # it is only a target
]

# Of each entry point: how it is called, what is given, and words of the sentence.
TABLE: dict[str, tuple[Callable[[Given, Any], Any], list[tuple[Any, str]]]] = {
    "threads": (
        lambda g, given: open_session("nowhere", threads=given),
        [("two", THREADS), (1.5, THREADS), ([1], THREADS), (0, THREADS)],
    ),
    "folder": (lambda g, given: open_session(g.folder / given), [("", "is neither an artefact"), ("x", "x")]),
    "device": (lambda g, given: Device.parse(given), DEVICES),
    "Sampler": (
        lambda g, given: Sampler(**given),
        [(given, f"{next(iter(given))} is .*; expected") for given in DRAWING],
    ),
    "read_sampling": (
        sampling,
        [
            (content, f"{SAMPLING}.*write it again with `xl-export set")
            for content in ('{"top_p": 7}', '{"heat": 1}', "[]", "{", '{"top_k": 0}')
        ],
    ),
    "MemoryRule": (
        lambda g, given: MemoryRule(**{"mem_len": 8, "segment": 4, **given}),
        [(given, f"{name} is {value!r}; expected") for given in SIZES for name, value in given.items()],
    ),
    "IdsVocab": (lambda g, given: IdsVocab(given), [(given, "size is ") for given in NO_COUNTS]),
    "--mem-len": (
        lambda g, given: parse_values(given, "--mem-len"),
        [(given, "^--mem-len is '.*expected whole numbers from 0 on") for given in VALUES],
    ),
    "--segment": (lambda g, given: parse_values(given, "--segment", least=1), [("4,0", "from 1 on")]),
    "evaluate": (lambda g, given: evaluate(g.ring, **{"tokens": np.arange(20), **given}), EVALUATED),
    "prompts": (lambda g, given: generate(g.ring, given, max_tokens=1), PROMPTS),
    "generate": (lambda g, given: generate(g.ring, "a", **{"max_tokens": 5, **given}), OPTIONS),
    "streams": (continued, CONTINUED),
    "empty prompt": (
        lambda g, given: generate(Over(NAMED), given, max_tokens=1),
        [(given, r"or the token ids \[7\] to start at the beginning of a text\.$") for given in ("", [[]])],
    ),
    "beam_search": (
        lambda g, given: beam_search(g.ring, "a", **{"beams": 2, "max_tokens": 3, **given}),
        [
            *(({name: given}, f"{name} is ") for name in ("beams", "max_tokens") for given in NO_COUNTS),
            *(
                ({"length_penalty": given}, "length_penalty is ")
                for given in (-1.0, 500, math.inf, math.nan, "1")
            ),
            ({"beams": 1 << 60}, "a step of 1152921504606846976 beams takes"),
        ],
    ),
    "best_of": (
        lambda g, given: best_of(g.ring, "a", **{"count": 2, "max_tokens": 3, **given}),
        [
            *(({name: given}, f"{name} is ") for name in ("count", "max_tokens") for given in NO_COUNTS),
            ({"count": 1 << 60}, "a step of 1152921504606846976 samples takes"),
            ({"seed": 1.5}, "seed is 1.5"),
        ],
    ),
    "best_of_groups": (
        lambda g, given: next(best_of_groups([], weight=given)),
        [(given, "weight is ") for given in (math.nan, math.inf, 1e300, "1", None)],
    ),
    "TextToScore": (
        lambda g, given: TextToScore(text="a", score=given, place="line 3"),
        [(given, "the score of line 3 is ") for given in (math.nan, -math.inf, "1", True)],
    ),
    "texts": (scored, TEXTS),
    "score_texts": (lambda g, given: list(score_texts(Over(ByteVocab()), **{"texts": [], **given})), SCORED),
}


@pytest.mark.parametrize("entry", TABLE)
def test_what_does_not_fit_is_refused_in_one_sentence(
    entry: str, sessions: dict[str, Session], tmp_path: Path
) -> None:
    call, rows = TABLE[entry]
    for given, words in rows:
        with pytest.raises(UserError, match=words) as caught:
            call(Given(sessions["ring"], sessions["shift"], tmp_path), given)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
