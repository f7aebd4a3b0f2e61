"""The best text of each group: n-best lists of a recogniser or translator, rescored by a language model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from runtimes.base.errors import UserError
from runtimes.tasks.score_texts import TextScore


@dataclass(frozen=True, kw_only=True)
class BestText:
    """The best text of a group. total: its own score plus the weighted log-probability."""

    group: Any
    total: float
    best: TextScore
    texts: int


def best_of_groups(scores: Iterable[TextScore], *, weight: float) -> Iterator[BestText]:
    """Yields the text of each group with the largest `score + weight * log_prob`; of equal ones the first.

    The texts of a group stand together. Raises UserError for a text without group or score, and for a group
    that comes again after another one.
    """
    if not math.isfinite(weight):
        raise UserError(f"weight is {weight}; expected a finite number.")
    seen: set[int] = set()  # a number for each group, and not its name, so that many groups fit
    best: BestText | None = None
    for score in scores:
        given, place = score.given, score.given.place or f"text {score.number}"
        if given.group is None or given.score is None:
            missing = "group" if given.group is None else "score"
            raise UserError(f"{place} has no {missing}; a weight needs group and score with every text.")
        total = given.score + weight * score.log_prob
        if best is not None and given.group == best.group:
            chosen, total = (score, total) if total > best.total else (best.best, best.total)
            best = BestText(group=best.group, total=total, best=chosen, texts=best.texts + 1)
            continue
        if best is not None:
            yield best
        name = hash(json.dumps(given.group, sort_keys=True))
        if name in seen:
            raise UserError(
                f"{place} is of group {given.group!r:.80}, which ended before; sort the texts so that those "
                "of a group stand together."
            )
        seen.add(name)
        best = BestText(group=given.group, total=total, best=score, texts=1)
    if best is not None:
        yield best
