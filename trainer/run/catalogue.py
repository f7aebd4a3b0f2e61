"""The list of built-in configurations that `xl-export train --list` prints, grouped by their folders."""

from __future__ import annotations

import re

from trainer.run.config import TrainConfig, built_in

TITLES = {  # of the folders in trainer/configs, in the order of the list
    "small": "Small models, on the built-in text or your own, or on the data set of an example",
    "transformer-xl": "Transformer-XL (Dai et al. 2019, Tables 1 to 5)",
    "ablations": "Ablations of Transformer-XL (Dai et al. 2019, Tables 6, 7 and 10)",
    "all-attention": "All-attention networks (Sukhbaatar et al. 2019b) and their variants (Figure 2)",
    "adaptive-span": "Adaptive attention span (Sukhbaatar et al. 2019a)",
    "al-rfou": "Character-level Transformers (Al-Rfou et al. 2018)",
}

# of configurations for a data set that a program of the repository makes: the folder of that program
DATA_SETS = {"chorales": "examples/music", "stories": "examples/stories"}


def catalogue() -> list[str]:
    """Returns the lines of the list of configurations.

    They are the title of each group, and a line for each configuration with its corpus and sizes.
    """
    lines = []
    for folder, title in TITLES.items():
        members = [name for name, path in built_in().items() if path.parent.name == folder]
        lines += [title, *map(_line, sorted(members, key=_by_number)), ""]
    return [*lines, "`xl-export train NAME` trains one of them."]


def _by_number(name: str) -> list[str | int]:
    """A sort key that puts table6 before table10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _line(name: str) -> str:
    config = TrainConfig.load(name)
    model = config.model
    return (
        f"  {name:<34}{config.corpus or DATA_SETS.get(name, 'any text'):<18}{model.layers:>2} layers   "
        f"d_model {model.d_model:<6}{model.heads:>2} heads"
    )
