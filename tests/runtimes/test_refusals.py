"""The table of refusals of the Python entry points: what is given, and what the one sentence must name.

`tests/test_sessions.py` has the table of what a session is given, `tests/runtimes/cli/test_refusals.py` that
of the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def continued(g: Given, *, rows: int = 2, **options: Any) -> None:
    """Generates from streams that have begun, in shift memory."""
    memory = g.shift.start(rows)
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


PROMPTS = ["", ["a", ""], [], [1, 999], [-1], np.array([1.0, 2.0]), [[[1, 2]]], [[1], []]]
PROMPTS += [b"The", [b"The"], bytearray(b"The"), 5]
TEXTS = [[1, 9], [-1], [1.5], [[1], [2, 3]], 7, b"abc", "abc", TextToScore(text=[1], context=[9])]
DEVICES = [None, "gpu", "GPU:1", "tensort", "trt", "", "cuda:", "cuda:1:2", "cpu:0", "cuda:64", "cpu+tf32"]
VALUES = ["", ",", "x", "1.5", "-1", "1:2", "1:2:3:4", "1:9:0", "9:1:-1", "9:1:1", "64,9:1:1", "64,1:9:0"]
VALUES += ["0:99999999999999999999:1", "9" * 5000]
SIZES = (-1, 1.5, "8", MAX_LENGTH + 1)
DRAWING = {
    name: (math.nan, math.inf, "1", each.range.least - 1, each.range.most * 2)
    for name, each in SETTINGS.items()
}

Call = Callable[[Given, str, Any], Any]
# Of each entry point: how it is called, and by name the values that it refuses. The sentence holds the name.
TABLE: dict[str, tuple[Call, dict[str, Sequence[Any]]]] = {
    "open": (
        lambda g, name, value: open_session("nowhere", **{name: value}),
        {"threads": ("two", 1.5, [1], 0)},
    ),
    "folder": (
        lambda g, name, value: open_session(g.folder / value),
        {"artefact": [""], "nowhere": ["nowhere"]},
    ),
    "Device": (lambda g, name, value: Device.parse(value), {"device": DEVICES}),
    "a misspelt device": (
        lambda g, name, value: Device.parse(value),
        {"cuda was probably meant": ["gpu"], "tensorrt was probably meant": ["tensort", "trt"]},
    ),
    "Sampler": (lambda g, name, value: Sampler(**{name: value}), DRAWING),
    "read_sampling": (
        lambda g, name, value: sampling(g, value),
        {SAMPLING: ['{"top_p": 7}', '{"heat": 1}', "[]", "{", '{"top_k": 0}']},
    ),
    "MemoryRule": (
        lambda g, name, value: MemoryRule(**{"mem_len": 8, "segment": 4, name: value}),
        {"mem_len": SIZES, "segment": (0, *SIZES), "clamp_len": (0, *SIZES)},
    ),
    "IdsVocab": (lambda g, name, value: IdsVocab(value), {"size": NO_COUNTS}),
    "values": (lambda g, name, value: parse_values(value, name), {"--mem-len": VALUES}),
    "values from 1": (lambda g, name, value: parse_values(value, name, least=1), {"--segment": ["4,0"]}),
    "evaluate": (
        lambda g, name, value: evaluate(g.ring, **{"tokens": np.arange(20), name: value}),
        {"lanes": (0, -1, 20, 1.5), "segment": (0, -1, 9, 1.5), "tokens": [np.arange(0), np.arange(1)]},
    ),
    "target": (lambda g, name, value: evaluate(g.ring, value), {"target 999": [np.array([0, 999])]}),
    "prompts": (
        lambda g, name, value: generate(g.ring, value, max_tokens=1),
        {"prompt": PROMPTS, "'一', character 2": ["a\u4e00"]},
    ),
    "empty prompt": (
        lambda g, name, value: generate(Over(NAMED), value, max_tokens=1),
        {"[7]": ["", [[]]]},  # the token that begins a text
    ),
    "generate": (
        lambda g, name, value: generate(g.ring, "a", **{"max_tokens": 5, name: value}),
        {"max_tokens": NO_COUNTS, "stop": [["x", ""]], "seed": (-1, 1.5, math.inf, None)},
    ),
    "no text": (
        lambda g, name, value: generate(g.ring, "a", max_tokens=5, text=False, stop=value),
        {"stop": ["a"]},
    ),
    "streams": (
        lambda g, name, value: continued(g, prompts=value),
        {"tokens": [["ab", "a"]]},
    ),
    "stop of streams": (
        lambda g, name, value: continued(g, prompts=["a", "b"], stop=value),
        {"stream": [["x"]]},
    ),
    "3 streams": (lambda g, name, value: continued(g, prompts=value, rows=3), {"2 prompts": [["a", "b"]]}),
    "beam_search": (
        lambda g, name, value: beam_search(g.ring, "a", **{"beams": 2, "max_tokens": 3, name: value}),
        {
            "beams": (*NO_COUNTS, 1 << 60),
            "max_tokens": NO_COUNTS,
            "length_penalty": (-1.0, 500, math.inf, math.nan, "1"),
        },
    ),
    "best_of": (
        lambda g, name, value: best_of(g.ring, "a", **{"count": 2, "max_tokens": 3, name: value}),
        {"count": NO_COUNTS, "max_tokens": NO_COUNTS, "seed": [1.5]},
    ),
    "samples": (
        lambda g, name, value: best_of(g.ring, "a", count=value, max_tokens=3),
        {"samples": [1 << 60]},
    ),
    "best_of_groups": (
        lambda g, name, value: next(best_of_groups([], weight=value)),
        {"weight": (math.nan, math.inf, 1e300, "1", None)},
    ),
    "TextToScore": (
        lambda g, name, value: TextToScore(text="a", score=value, place="line 3"),
        {"score of line 3": (math.nan, -math.inf, "1", True)},
    ),
    "texts": (
        lambda g, name, value: scored(g, value),
        {"text 2": TEXTS, "line 8": [TextToScore(text=[1 << 70], place="line 8")]},
    ),
    "score_texts": (
        lambda g, name, value: list(score_texts(Over(ByteVocab()), **{"texts": [], name: value})),
        {
            "texts": ["It is said", b"It is said", TextToScore(text="It")],
            "batch": [each for each in NO_COUNTS if each is not None],
            "window": NO_COUNTS,
            "bos": [True],
            "eos": [True],
        },
    ),
    "surrogate": (
        lambda g, name, value: list(score_texts(Over(ByteVocab()), value)),
        {"text 1": [["\ud800"]]},
    ),
}


@pytest.mark.parametrize("entry", TABLE)
def test_what_does_not_fit_is_refused_in_one_sentence(
    entry: str, sessions: dict[str, Session], tmp_path: Path
) -> None:
    call, refused = TABLE[entry]
    for name, values in refused.items():
        for value in values:
            with pytest.raises(UserError) as caught:
                call(Given(sessions["ring"], sessions["shift"], tmp_path), name, value)
            assert name in str(caught.value)
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 500
