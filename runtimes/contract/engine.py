"""`build.json`: what a TensorRT engine is, where it runs, and the proof that it is intact.

Reading needs no TensorRT.

An ENGINE folder holds `step.plan`, the artefact's spec, vocabulary and reference, and `build.json`. A plan is
code that runs on the GPU. Its hash finds damage and not intent, so open only the engines of people you trust.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.sealed import FileFacts, read_sealed, verify_file, write_sealed
from runtimes.contract.spec import ANSWERS, BUILD, REFERENCE, SPEC, VOCAB, Spec, read_spec
from runtimes.contract.vocabulary import VOCAB_FILES

PLAN = "step.plan"
SCHEMA = 1
MAX_AXIS = 1 << 16  # rows, or tokens, in any profile
MAX_FACTS_BYTES = 1 << 20  # of `build.json`
Flavour = Literal["tensorrt", "rtx"]
Attention = Literal["native", "plugin"]
Hardware = Literal["same-gpu", "same-capability", "ampere-plus"]
PACKAGES: dict[Flavour, str] = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
NAMES: dict[Flavour, str] = {"tensorrt": "TensorRT", "rtx": "TensorRT-RTX"}
CAPABILITY = re.compile(r"\d{1,2}\.\d", re.ASCII)


def refuse_unordered(what: str, sizes: tuple[int, ...]) -> None:
    """Raises ConfigError unless the sizes are three, in the order least, usual, most."""
    if len(sizes) != 3 or not 1 <= sizes[0] <= sizes[1] <= sizes[2] <= MAX_AXIS:
        raise ConfigError(
            f"{what} is {':'.join(map(str, sizes))[:40]}; expected least:usual:most in ascending order, "
            f"from 1 to {MAX_AXIS}, such as 1:4:16."
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The shapes of one optimisation profile, which is tuned for the usual ones."""

    name: Literal["segment", "token"]
    batch: tuple[int, ...]  # least, usual and most rows
    tokens: tuple[int, ...]  # least, usual and most tokens

    def __post_init__(self) -> None:
        for what, sizes in (("batch", self.batch), ("tokens", self.tokens)):
            refuse_unordered(f"{what} of the {self.name} profile", sizes)

    def axes(self, which: int) -> dict[str, int]:
        """The sizes of the named axes of graph inputs at the least (0), usual (1) or most (2) shapes."""
        batch = self.batch[which]
        tokens = self.tokens[which]
        return {"batch": batch, "tokens": tokens, "rows": (1, batch, batch * tokens)[which]}

    def takes(self, *, batch: int, tokens: int) -> bool:
        return self.batch[0] <= batch <= self.batch[2] and self.tokens[0] <= tokens <= self.tokens[2]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of this machine, or the one that an engine was built on."""

    name: str
    compute_capability: str  # such as 8.9

    @property
    def capability(self) -> int:
        """The compute capability as compilers of kernels write it, such as 89."""
        return int(self.compute_capability.replace(".", ""))


@dataclass(frozen=True, kw_only=True)
class TacticFacts:
    """The kernels of the project's plugin for the attentions of one kind, at a profile's usual shape."""

    profile: Literal["segment", "token"]
    batch: int
    tokens: int
    keys: int  # of memory and segment, or the slots of the ring
    heads: int
    kernel: str  # attends to parts of the keys
    tile: tuple[int, ...]  # number of queries and keys that the kernel handles at once
    join_queries: int  # number of queries that are joined at once
    milliseconds: float
    """The median time of both kernels in the middle of a stream, on the engine's GPU."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The contract of one engine. The spec of the artefact that it was built from is next to it."""

    schema: int = SCHEMA
    artefact: str  # the identity of the artefact that it was built from
    flavour: Flavour
    version: str  # version of the TensorRT that built it
    attention: Attention
    compute_capabilities: tuple[str, ...]  # capabilities of the GPUs that it runs on
    gpu: Gpu | None  # GPU that it was tuned on; None if it was built ahead of time
    hardware: Hardware
    version_compatible: bool  # whether newer releases of the same major version run it too
    refit: bool
    profiles: tuple[Profile, ...]
    layers: dict[str, int]  # number of layers of each kind in the parsed network
    types: dict[str, int]
    plugin_layers: int  # number of layers of this project's plugin, two for each attention
    seconds: float
    producer: dict[str, str]
    files: dict[str, FileFacts]
    driver_version: str | None = None
    """Version of the GPU's driver during the build, such as 580.65.06; None if no GPU built it or the machine
    hides it.
    """
    driver_cuda: str | None = None  # the newest CUDA that this driver supports, such as 13.0
    tactics: tuple[TacticFacts, ...] = ()  # the plugin's kernels, for each kind of attention in each profile
    identity: str = ""  # SHA-256 of the bytes of `build.json`, which does not hold it

    @property
    def largest_batch(self) -> int:
        return max(profile.batch[2] for profile in self.profiles)


def side_files(spec: Spec) -> tuple[str, ...]:
    """The names of the files that an engine has of its artefact as they are, a tokenizer's file included."""
    tokenizers = (name for name in VOCAB_FILES if name in spec.files)
    return tuple(dict.fromkeys((SPEC, VOCAB, REFERENCE, ANSWERS, *tokenizers)))


def save_engine(folder: Path, facts: EngineFacts) -> EngineFacts:
    """Writes `build.json`; returns the facts with the identity that they have now."""
    return write_sealed(folder / BUILD, facts)


def load_engine(folder: Path) -> tuple[EngineFacts, Spec]:
    """The facts of an engine folder and the spec of its artefact, after digest, sizes and all hashes were
    verified.

    TensorRT reads nothing before that. Raises ArtefactError that says what is wrong and how to build
    the engine again.
    """
    where = folder / BUILD
    if where.is_file() and where.stat().st_size > MAX_FACTS_BYTES:
        raise ArtefactError(
            f"{where} has more than {MAX_FACTS_BYTES} bytes; build the engine again with `xl-export build`."
        )
    facts = _read(where)
    again = f"build it again: {rebuild_command(folder, facts)}"

    def verify(*names: str) -> None:
        for name in names:
            if name not in facts.files:
                raise ArtefactError(f"{where} does not list {name}; {again}.")
            verify_file(folder / name, facts.files[name], record=BUILD, again=again)

    verify(PLAN, SPEC, VOCAB, REFERENCE, ANSWERS)
    spec = read_spec(folder / SPEC)
    if spec.identity != facts.artefact:
        raise ArtefactError(
            f"{folder} was built from the artefact {facts.artefact:.12}, and its {SPEC} is of the artefact "
            f"{spec.identity:.12}; {again}."
        )
    return facts, spec


def _read(path: Path) -> EngineFacts:
    again = "build the engine again with `xl-export build`"
    facts = read_sealed(EngineFacts, path, schema=SCHEMA, what="engine", again=again)
    names = [profile.name for profile in facts.profiles]
    capabilities = facts.compute_capabilities  # a user may run the command that has them
    sound = bool(capabilities) and all(map(CAPABILITY.fullmatch, capabilities))
    if facts.schema != SCHEMA or names != ["segment", "token"] or not sound:
        raise ArtefactError(
            f"{path} was altered: its schema, profiles or capabilities cannot be an engine's; {again}."
        )
    return facts


def refuse_elsewhere(facts: EngineFacts, folder: Path, *, version: str, gpu: Gpu) -> None:
    """Raises ArtefactError if this TensorRT or this GPU does not run the engine.

    The message has the command that fixes it.
    """
    again = f"build it again here: {rebuild_command(folder, facts, here=gpu)}"
    name = NAMES[facts.flavour]
    if version != facts.version and not (
        facts.version_compatible and _newer_of_same_major(version, facts.version)
    ):
        raise ArtefactError(f"{folder} was built by {name} {facts.version} and this is {version}; {again}.")
    if facts.hardware == "ampere-plus":
        if float(gpu.compute_capability) < 8.0:
            raise ArtefactError(
                f"{folder} runs on GPUs of compute capability 8.0 and up, and {_named(gpu)}; {again}."
            )
    elif gpu.compute_capability not in facts.compute_capabilities:
        listed = ", ".join(facts.compute_capabilities)
        raise ArtefactError(
            f"{folder} was built for GPUs of compute capability {listed}, and {_named(gpu)}; {again}."
        )
    elif facts.hardware == "same-gpu" and facts.gpu and facts.gpu.name != gpu.name:
        raise ArtefactError(f"{folder} was tuned on {facts.gpu.name!r:.80}, and {_named(gpu)}; {again}.")


def _named(gpu: Gpu) -> str:
    return f"this one is {gpu.name} ({gpu.compute_capability})"


def _newer_of_same_major(version: str, built: str) -> bool:
    here, there = ([int(part) for part in text.split(".") if part.isdigit()] for text in (version, built))
    return here[:1] == there[:1] and here >= there


def rebuild_command(folder: Path, facts: EngineFacts, *, here: Gpu | None = None) -> str:
    """The command that builds an engine like this one into its folder, as quoted text.

    here: the GPU to build for; the engine's own when None.
    """
    segment, token = facts.profiles
    words = [
        "xl-export build ARTEFACT",
        f"--out {shlex.quote(str(folder))}",
        f"--flavour {facts.flavour}",
        f"--attention {facts.attention}",
    ]
    if facts.flavour == "rtx":
        words.append(
            "--compute-capability "
            f"{here.compute_capability if here else ','.join(facts.compute_capabilities)}"
        )
    words += [
        f"--batch {_colons(segment.batch)}",
        f"--token-batch {_colons(token.batch)}",
        f"--tokens {segment.tokens[1]}",
    ]
    if facts.flavour == "tensorrt" and facts.hardware != "same-gpu":
        words.append(f"--hardware {facts.hardware}")
    if facts.version_compatible:
        words.append("--version-compatible")
    if facts.refit:
        words.append("--refit")
    return f"`{' '.join([*words, '--force'])}`"


def _colons(sizes: tuple[int, ...]) -> str:
    return ":".join(map(str, sizes))
