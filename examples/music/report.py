"""Compares generated pieces with Bach's by figures of counterpoint: `report.py ARTEFACT --sources FOLDER`.

FOLDER is the one that `prepare.py` kept ids in. The training pieces are also searched for runs of chords that
the generated pieces repeat, in any key.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from play import music_ids
from refuse import prepared_part, refusals
from scheme import END, IDS, Score, decode
from theory import chord_runs, describe

import runtimes
from runtimes.base.errors import fields_as_options

RUN_LENGTHS = (4, 8, 16)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("artefact", type=Path)
    options.add_argument("--sources", type=Path, required=True)
    options.add_argument("--pieces", type=int, default=41)
    options.add_argument("--temperature", type=float)
    options.add_argument("--top-p", type=float)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    with refusals():
        _report(given)


def _report(given: argparse.Namespace) -> None:
    test, train = (prepared_part(given.sources, part) for part in ("test", "train"))
    if given.seed < 0:
        raise runtimes.UserError(f"--seed is {given.seed}; expected 0 or a positive whole number.")
    session = runtimes.open_session(given.artefact, threads=1)
    with fields_as_options("temperature", "top_p"):
        sampler = session.sampler.replaced(temperature=given.temperature, top_p=given.top_p)
    stream = music_ids(session, [], sampler=sampler, seed=given.seed)
    columns = {
        "generated": [decode(ids) for ids, _ in zip(_pieces(stream), range(given.pieces), strict=False)],
        "Bach, test part": _read(test),
    }
    known = _read(train)
    figures = {name: describe(scores) for name, scores in columns.items()}
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for row in zip(*figures.values(), strict=True):
        cells = [f"{counted.value:.1f} {counted.unit}".strip() for counted in row]
        print(f"| {row[0].name} | " + " | ".join(cells) + " |")
    for length in RUN_LENGTHS:
        seen = chord_runs(known, length)
        cells = []
        for scores in columns.values():
            runs = chord_runs(scores, length)
            cells.append(f"{100 * len(runs & seen) / max(len(runs), 1):.1f} %")
        print(f"| runs of {length} beats that stand in the training part | " + " | ".join(cells) + " |")


def _read(path: Path) -> list[Score]:
    return [decode(json.loads(line)) for line in path.read_text().splitlines()]


def _pieces(stream: Iterator[int]) -> Iterator[list[int]]:
    piece: list[int] = []
    for token in stream:
        piece.append(token)
        if token == IDS[END]:
            yield piece
            piece = []


if __name__ == "__main__":
    main()
