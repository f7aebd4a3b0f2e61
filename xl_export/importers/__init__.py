"""Reads checkpoints of other projects without running anything that they contain."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xl_export.importers.transformer_xl import Project


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint that `xl-export import` reads."""

    name: str
    """The name; its module in this folder has `_` for `-`."""
    files: str
    """Files of the format, for help and messages."""
    in_folder: tuple[str, ...] = ()
    """Names of its file, if a folder is given."""

    @property
    def project(self) -> Project:
        """What reads it, which needs PyTorch."""
        found: Project = importlib.import_module(f"{__name__}.{self.name.replace('-', '_')}").PROJECT
        return found


FORMATS = {
    format_.name: format_
    for format_ in (
        Format("kimiyoung", "model.pt of kimiyoung/transformer-xl, with its cache.pt", ("model.pt",)),
        Format(
            "nvidia",
            "checkpoint_*.pt of NVIDIA DeepLearningExamples",
            ("checkpoint_best.pt", "checkpoint_last.pt"),
        ),
        Format(
            "fairseq",
            "checkpoint_*.pt of fairseq's examples/truncated_bptt, with its dict.txt",
            ("checkpoint_best.pt", "checkpoint_last.pt"),
        ),
        Format("huggingface", "the folder of a TransfoXL model, whose weights may be shards"),
        Format(
            "adaptive-span",
            "checkpoint.pt of facebookresearch/adaptive-span, with its corpus.pt",
            ("checkpoint.pt",),
        ),
        Format(
            "tensorflow",
            "a checkpoint of the original TensorFlow release, or an .npz file of its variables",
            ("model.npz",),
        ),
        Format("xl-export", "a run of this project"),
    )
}
"""Formats by name. A checkpoint has the first format that recognises it."""
