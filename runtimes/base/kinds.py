"""The kinds of folders that commands write, and the files that belong to each.

`runtimes.base.folders` replaces a folder only if all of its files are on the list of its kind, and writes no
file that is not on it.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.files import read_json
from runtimes.base.lock import LOCK
from runtimes.base.partial import destination

DATA = "data.json"  # marks a prepared dataset
# What Weights & Biases writes into its folder.
WANDB = (
    "wandb/run-*/**",
    "wandb/offline-run-*/**",
    "wandb/latest-run/**",
    "wandb/latest-run",
    "wandb/debug*.log",
)
Pattern = tuple[str, ...]  # the parts of a path, in which `*` is any text; a last part `**` is anything below


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of folder, such as artefacts. Paths are relative to the folder, with `/` between their parts."""

    what: str
    """Name of one such folder, for messages."""
    marker: str
    """File that is in every such folder."""
    proofs: tuple[str, ...]
    """Files of which one is there too: the name of the marker proves little."""
    names: tuple[str, ...] = ()
    """Paths of its other files: `*` is any text within a name, `folder/**` everything in a folder."""
    lists: tuple[str, ...] = ()
    """JSON files whose `files` are the names of further files, relative to the JSON file."""
    unlisted: tuple[str, ...] = ()
    """Paths of further files, if a file of `lists` is from a release that wrote no `files` into it."""

    def lacks(self, folder: Path) -> str | None:
        """The file without which a folder is not of this kind; None if it is."""
        if not (folder / self.marker).is_file():
            return self.marker
        return None if any((folder / name).exists() for name in self.proofs) else self.proofs[0]

    def foreign(self, folder: Path) -> list[str]:
        """Paths in a folder that no command wrote as a part of this kind of folder.

        Files that are being written count as the files that they become. A folder in which nothing can be
        ours is one path. Raises UserError if a file that lists others cannot be read.
        """
        if self.lacks(folder):
            return sorted(os.listdir(folder))
        return list(_foreign(folder, (), self._patterns(folder)))

    def _patterns(self, folder: Path) -> set[Pattern]:
        own = [self.marker, *self.proofs, *self.names]
        for pattern in self.lists:
            for path in folder.glob(pattern):
                below = path.parent.relative_to(folder)
                listed = _listed(path)
                own += [glob.escape((below / name).as_posix()) for name in listed or ()]
                own += self.unlisted if listed is None else ()
        return {tuple(name.split("/")) for name in own}


def _listed(path: Path) -> list[str] | None:
    """The `files` of a JSON file; None if it has none. Raises ArtefactError if it is damaged."""
    try:
        document = read_json(path)
    except UserError:
        document = None
    files = document.get("files", {}) if isinstance(document, dict) else None
    if not isinstance(files, dict | list):
        raise ArtefactError(
            f"{path} is damaged and does not list the files of its folder, so none of them is replaced; "
            "delete the folder yourself, or give another --out."
        )
    return [str(name) for name in files] or None


def _foreign(folder: Path, above: Pattern, patterns: set[Pattern]) -> Iterator[str]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = *above, destination(entry.name) or entry.name
        if path in patterns and not entry.is_dir(follow_symlinks=False):
            continue  # most files have a plain name on the list
        leading = [pattern for pattern in patterns if _leads_to(pattern, path)]
        if not entry.is_dir(follow_symlinks=False):
            if not any(len(pattern) == len(path) for pattern in leading):
                yield "/".join((*above, entry.name))
        elif not leading or max(map(len, leading)) == len(path):
            yield "/".join((*above, entry.name))
        elif not any(pattern[len(path) :] == ("**",) for pattern in leading):
            yield from _foreign(Path(entry.path), (*above, entry.name), patterns)


def _leads_to(pattern: Pattern, path: Pattern) -> bool:
    """Whether a path is one of a pattern, or a folder above one."""
    return len(pattern) >= len(path) and all(
        fnmatchcase(name, part) for part, name in zip(pattern, path, strict=False)
    )


VOCABULARY = ("vocab.json", "tokenizer.json", "tokenizer.model")
ARTEFACT = Kind(
    what="an artefact",
    marker="spec.json",
    proofs=("reference.json",),
    names=("spec.json.sig", "sampling.json", "genai_config.json"),
    lists=("spec.json",),
)
ENGINE = Kind(
    what="an engine",
    marker="build.json",
    proofs=("step.plan",),
    names=("build.json.sig", "sampling.json"),
    lists=("build.json",),
)
RUN = Kind(
    what="a run",
    marker="metrics.jsonl",
    proofs=("config.json",),
    names=(
        *("model.safetensors", "training.safetensors", "sampling.json", *VOCABULARY, LOCK),
        *("valid.txt", "test.txt", "test.npy", "test.json", "tensorboard/events.out.tfevents.*", *WANDB),
    ),
)
IMPORTED = Kind(
    what="an imported run",
    marker="import.json",
    proofs=("config.json",),
    names=("model.safetensors", "sampling.json", *VOCABULARY),
)
DATASET = Kind(
    what="a dataset",
    marker=DATA,
    proofs=("train.bin",),
    names=("valid.bin", "test.bin", *VOCABULARY),
)
SITE = Kind(
    what="a web page",
    marker="site.json",
    proofs=("page/main.js",),
    names=("models/*/spec.json", "models/*/spec.json.sig", "models/*/sampling.json"),
    lists=("site.json", "models/*/spec.json"),
    unlisted=("index.html", "page/*", "src/*", "src/*/*", "vendor/*"),
)
SERVER_MODEL = Kind(
    what="a model of Triton Inference Server",
    marker="config.pbtxt",
    proofs=("spec.json", "artefact/spec.json"),
    names=(
        *("1/model.onnx", "1/weights.bin", "1/model.plan", "1/model.py", "artefact/sampling.json"),
        *VOCABULARY,
    ),
    lists=("artefact/spec.json",),
)
POLYGRAPHY = Kind(
    what="a folder for Polygraphy",
    marker="inputs.json",
    proofs=("polygraphy.txt",),
    names=("answers.json",),
)
PICTURES = Kind(
    what="a folder of pictures of attention",
    marker="attention.json",
    proofs=("attention.npz",),
    names=("figure-5.png", "figure-6.png", "figure-7.png"),
)
GPU_REPORT = Kind(
    what="a report",
    marker="report.md",
    proofs=("logs",),
    names=("logs/*.txt", "results.jsonl", "report.tar.gz"),
)
KINDS = (ENGINE, ARTEFACT, RUN, IMPORTED, DATASET, SITE, SERVER_MODEL, POLYGRAPHY, PICTURES, GPU_REPORT)
