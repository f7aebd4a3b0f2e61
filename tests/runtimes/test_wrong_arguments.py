"""What Python code gives by mistake is refused in a sentence that says what was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Session, evaluate, load_memory, open_session
from runtimes.base.errors import UserError


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_a_segment_without_tokens_and_ids_outside_the_vocabulary(session: Session) -> None:
    memory, size = session.start(1), session.vocab.size
    empty = np.zeros((1, 0), np.int64)
    assert refusal(session.step, empty, memory) == "the segment has 0 tokens; give at least one in each row."
    # The last token is a target alone, so it is no token of a step.
    tokens = np.append(np.zeros(session.rule.segment, np.int64), size + 7)
    said = refusal(evaluate, session, tokens)
    assert said.startswith(f"target {size + 7} is outside the vocabulary; expected")


@pytest.mark.parametrize("given", ["two", 1.5, [1], None])
def test_what_is_no_number_is_no_batch_and_no_threads(
    given: Any, session: Session, artefacts: dict[str, Path]
) -> None:
    assert refusal(session.start, given) == f"batch is {given!r}; expected a whole number from 1 to 65536."
    if given is not None:  # which means all threads
        said = refusal(open_session, artefacts["ring"], threads=given)
        assert said == f"threads is {given!r}; expected a whole number from 1 to 1024."
    assert session.start(np.int64(2)).batch == 2  # type: ignore[arg-type]


def test_an_array_is_no_file_of_saved_streams(session: Session, tmp_path: Path) -> None:
    np.save(tmp_path / "s.npy", np.arange(9))
    said = refusal(load_memory, tmp_path / "s.npy", session)
    assert said == f"{tmp_path / 's.npy'} is a .npy file of one array; give a file that `save_memory` wrote."
