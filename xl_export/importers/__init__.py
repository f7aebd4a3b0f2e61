"""Reads checkpoints of other projects without running anything that they contain."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint that `xl-export import` reads."""

    name: str
    """The module of this folder that reads it has the name with `_` for `-`."""
    files: str
    """For help and messages."""
    in_folder: tuple[str, ...] = ()
    """The names of its file, if a folder is given."""

    @property
    def module(self) -> ModuleType:
        """The module that reads it, which needs PyTorch.

        It has PROJECT (a name for messages and records), `recognises(source)`, whether the content is a
        checkpoint of the project, and `read(source, options)`, which returns its `Checkpoint`.
        """
        return importlib.import_module(f"{__name__}.{self.name.replace('-', '_')}")


#: By name. A checkpoint has the first format that recognises it.
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
