"""Makes a dataset of token ids from the chorales in music21, for `xl-export train chorales --data`.

    python examples/music/prepare.py --out chorales-data

It needs `pip install '.[train,music]'` in the checkout.
Reading the corpus takes two to five minutes, once: the scores are kept next to the dataset, as `scores.json`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import chorales
from refuse import refusals
from scheme import END, IDS, NAMES, Note, Score, encode

from runtimes.base.errors import needs

PARTS = ("train", "valid", "test")
HELD_OUT = 0.1  # share of the chorales in each of valid and test


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True, help="folder of the dataset")
    options.add_argument(
        "--sources", type=Path, help="folder for ids and scores (default: OUT with -sources)"
    )
    options.add_argument(
        "--keys", choices=("all", "own"), default="all", help="transpose training pieces or not"
    )
    given = options.parse_args()
    sources = given.sources or given.out.with_name(f"{given.out.name}-sources")
    sources.mkdir(parents=True, exist_ok=True)

    with refusals():
        scores = load_scores(sources / "scores.json")
    split = split_by_melody(scores)
    ranges = chorales.pitch_ranges([scores[name] for name in split["train"]])
    documents = {part: [encode(scores[name]) for name in split[part]] for part in PARTS}
    if given.keys == "all":
        moved = [other for name in split["train"] for other in chorales.transpositions(scores[name], ranges)]
        documents["train"] = [encode(score) for score in moved]
    random.Random(0).shuffle(documents["train"])

    (sources / "names.json").write_text(json.dumps(NAMES))
    (sources / "split.json").write_text(json.dumps(split, indent=1))
    for part in PARTS:
        (sources / f"{part}.jsonl").write_text("".join(json.dumps(ids) + "\n" for ids in documents[part]))
        tokens = sum(len(ids) for ids in documents[part])
        print(f"{part}: {len(split[part])} chorales, {len(documents[part])} documents, {tokens:,} tokens")
    command = [sys.executable, "-m", "xl_export", "prepare", "tokens", "--names", str(sources / "names.json")]
    command += ["--end-of-document", str(IDS[END]), "--out", str(given.out)]
    for part in PARTS:
        command += [f"--{part}", str(sources / f"{part}.jsonl")]
    sys.exit(subprocess.run(command).returncode)


def load_scores(path: Path) -> dict[str, Score]:
    """Returns the chorales by name, from `path`, or from music21 where there is none; then it is written."""
    if not path.is_file():
        found = {}
        with needs("music", "music21"):
            files = chorales.chorale_files()
        for file in files:
            try:
                found[file.stem] = chorales.read_chorale(file)
            except chorales.NotAChoraleError as error:
                print(f"{file.name} is left out: {error}")
        path.write_text(json.dumps({name: dataclasses.asdict(score) for name, score in found.items()}))
    read = json.loads(path.read_text())
    return {
        name: Score(**{**score, "notes": [Note(**note) for note in score["notes"]]})
        for name, score in read.items()
    }


def split_by_melody(scores: dict[str, Score]) -> dict[str, list[str]]:
    """Returns the names of each part: copies are left out, and all pieces on one melody are in one part.

    Families of melodies are ordered by a hash of a name, so that the split does not depend on a seed.
    """
    once = {
        chorales.fingerprint(score): name
        for name, score in sorted(scores.items(), key=lambda item: -len(item[0]))
    }
    names = sorted(once.values())
    numbers = chorales.families([scores[name] for name in names])
    members: dict[int, list[str]] = {}
    for name, number in zip(names, numbers, strict=True):
        members.setdefault(number, []).append(name)
    order = sorted(members.values(), key=lambda family: hashlib.sha256(family[0].encode()).hexdigest())
    split: dict[str, list[str]] = {part: [] for part in PARTS}
    for family in order:
        part = next((part for part in ("test", "valid") if len(split[part]) < HELD_OUT * len(names)), "train")
        split[part] += family
    return {part: sorted(members) for part, members in split.items()}


if __name__ == "__main__":
    main()
