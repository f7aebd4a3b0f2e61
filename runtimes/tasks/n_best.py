"""The best text of each group: n-best lists of a recogniser or translator, rescored by a language model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from runtimes.base.errors import UserError
from runtimes.base.ranges import Range
from runtimes.base.records import json_text
from runtimes.tasks.score_texts import TextScore

MAX_GROUPS = 1 << 16  # groups
WEIGHTS = Range(-1e6, 1e6)  # no total of a finite score and a log-probability overflows


@dataclass(frozen=True, kw_only=True)
class BestText:
    """The best text of a group."""

    group: Any
    total: float
    """Score of the input plus the weighted log-probability."""
    best: TextScore
    texts: int
    """The number of texts in the group."""


def best_of_groups(scores: Iterable[TextScore], *, weight: float) -> Iterator[BestText]:
    """Yields the text of each group with the largest `score + weight * log_prob`; of equal ones the first.

    The texts of a group must be consecutive. Groups are compared by their JSON, so 1, 1.0 and True are three
    groups.

    Raises UserError for a text without group or score, for a group that is not JSON, for a text whose first
    token was not predicted, and for a group that comes back after another one (of the last MAX_GROUPS).
    """
    WEIGHTS.check("weight", weight)
    seen = OrderedDict[int, None]()  # the last groups: a number for each, so that their memory is bounded
    best: BestText | None = None
    name = ""
    for score in scores:
        source = score.source
        place = score.source.place or f"text {score.number}"
        if source.group is None or source.score is None:
            missing = "group" if source.group is None else "score"
            raise UserError(f"{place} has no {missing}; a weight needs group and score with every text.")
        if not score.whole:
            raise UserError(
                f"{place} is of a group, and its first token was not predicted, so that a shorter text would "
                "win; give every text a context, such as a newline, or score with --bos."
            )
        before = name
        name = _canonical(source.group, place)
        total = source.score + weight * score.log_prob
        if best is not None and name == before:
            chosen, total = (score, total) if total > best.total else (best.best, best.total)
            best = BestText(group=best.group, total=total, best=chosen, texts=best.texts + 1)
            continue
        if best is not None:
            yield best
        if hash(name) in seen:
            raise UserError(
                f"{place} is of group {source.group!r:.80}, which ended before; sort the texts so that those "
                "of a group stand together."
            )
        if len(seen) == MAX_GROUPS:
            seen.popitem(last=False)
        seen[hash(name)] = None
        best = BestText(group=source.group, total=total, best=score, texts=1)
    if best is not None:
        yield best


def _canonical(group: Any, place: str) -> str:
    """The group as JSON; two groups with the same are one."""
    try:
        return json_text(group, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{place} has the group {group!r:.80}, which cannot be written as JSON; give a text or a number."
        ) from error
