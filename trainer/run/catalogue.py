"""The built-in configurations by what they reproduce: what `xl-export train --list` prints."""

from __future__ import annotations

from fnmatch import fnmatchcase

from trainer.run.config import BUILT_IN, TrainConfig

GROUPS = {  # patterns of names; a name belongs to the first group that has it
    "small, on the built-in text": ("demo", "tiny", "all-attention-demo", "quality"),
    "Transformer-XL (Dai et al. 2019, Tables 1 to 5)": ("enwik8-*", "text8-*", "wt103-*", "lm1b-*", "ptb"),
    "Dai et al. 2019, Table 6": ("table6-*",),
    "Dai et al. 2019, Table 7": ("table7-*",),
    "Dai et al. 2019, Table 10": ("table10-*",),
    "all-attention (Sukhbaatar et al. 2019)": ("all-attention-*",),
    "its variants (Sukhbaatar et al. 2019, Figure 2)": ("figure2-*",),
    "adaptive span (Sukhbaatar et al. 2019a)": ("adaptive-span-*",),
    "Al-Rfou et al. 2019": ("al-rfou-*",),
    "others": ("*",),
}


def catalogue() -> list[str]:
    """A line for each configuration, with its corpus and sizes, below the title of its group."""
    left = sorted(path.stem for path in BUILT_IN.glob("*.json"))
    lines = []
    for title, patterns in GROUPS.items():
        members = [name for name in left if any(fnmatchcase(name, pattern) for pattern in patterns)]
        left = [name for name in left if name not in members]
        lines += [title, *map(_line, members)] if members else []
    return lines


def _line(name: str) -> str:
    config = TrainConfig.load(name)
    model = config.model
    return f"  {name:<34}{config.corpus or 'any text':<18}{model.layers} layers, D {model.d_model}, H {model.heads}"
