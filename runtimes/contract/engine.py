"""`build.json`: what a TensorRT engine is, where it runs, and the proof that it is intact. Needs no TensorRT to read.

An ENGINE folder holds `step.plan`, the artefact's spec, vocabulary and reference, and `build.json`. A plan is code that
runs on the GPU: its hash finds damage, not intent, so open the engines of people you trust.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import read_json, write_json
from runtimes.base.records import from_json, to_json
from runtimes.contract.spec import REFERENCE, SPEC, VOCAB, FileFacts, Spec, parse_spec, verify_file

BUILD, PLAN = "build.json", "step.plan"
SIDE_FILES = (SPEC, VOCAB, REFERENCE)  # copied from the artefact as they are
SCHEMA = 1
MOST = 1 << 16  # rows, or tokens, in any profile
MOST_FACTS = 1 << 20  # bytes of `build.json`
Flavour = Literal["tensorrt", "rtx"]
Attention = Literal["native", "plugin"]
Hardware = Literal["same-gpu", "same-capability", "ampere-plus"]
PACKAGES: dict[Flavour, str] = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
NAMES: dict[Flavour, str] = {"tensorrt": "TensorRT", "rtx": "TensorRT-RTX"}
CAPABILITY = re.compile(r"\d{1,2}\.\d", re.ASCII)
WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)  # what is printed as it is must be no more than this


def refuse_falling(what: str, sizes: tuple[int, ...]) -> None:
    """Raises ConfigError unless the sizes are least, usual and most."""
    if len(sizes) != 3 or not 1 <= sizes[0] <= sizes[1] <= sizes[2] <= MOST:
        raise ConfigError(
            f"{what} is {':'.join(map(str, sizes))[:40]}; expected least:usual:most, rising, from 1 to {MOST}, such as 1:4:16."
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The shapes of one optimisation profile: least, usual and most batch rows and tokens; tuned for the usual ones."""

    name: Literal["segment", "token"]
    batch: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        for what, sizes in (("batch", self.batch), ("tokens", self.tokens)):
            refuse_falling(f"{what} of the {self.name} profile", sizes)

    def axes(self, which: int) -> dict[str, int]:
        """The named axes of graph inputs at the least (0), usual (1) or most (2) shapes."""
        batch, tokens = self.batch[which], self.tokens[which]
        return {"batch": batch, "segment": tokens, "rows": (1, batch, batch * tokens)[which]}

    def takes(self, *, batch: int, tokens: int) -> bool:
        return self.batch[0] <= batch <= self.batch[2] and self.tokens[0] <= tokens <= self.tokens[2]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The GPU of this machine, or the one that an engine was built on."""

    name: str
    compute_capability: str  # such as 8.9


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The contract of one engine, beside the spec of the artefact that it was built from.

    artefact: identity of that artefact. version: of the TensorRT that built it. compute_capabilities: of the GPUs that it runs
    on. gpu: that it was tuned on; None where it was built ahead of time. version_compatible: newer releases of the same major
    version run it too. layers: of the parsed network, by kind; plugin_layers: those of our kernel, two for each attention.
    """

    schema: int = SCHEMA
    artefact: str
    flavour: Flavour
    version: str
    attention: Attention
    compute_capabilities: tuple[str, ...]
    gpu: Gpu | None
    hardware: Hardware
    version_compatible: bool
    refit: bool
    profiles: tuple[Profile, ...]
    layers: dict[str, int]
    types: dict[str, int]
    plugin_layers: int
    seconds: float
    producer: dict[str, str]
    files: dict[str, FileFacts]

    @property
    def identity(self) -> str:
        """SHA-256 over the whole contract, the plan's hash included."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()

    @property
    def largest_batch(self) -> int:
        return max(profile.batch[2] for profile in self.profiles)


def save_engine(folder: Path, facts: EngineFacts) -> None:
    """Writes `build.json` with its own digest."""
    write_json(folder / BUILD, {**to_json(facts), "digest": facts.identity})


def load_engine(folder: Path) -> tuple[EngineFacts, Spec]:
    """The verified facts of an engine folder, and the spec of its artefact.

    Digest, sizes and the hash of every file are checked before anything is given to TensorRT. Raises ArtefactError that says
    what is wrong and how to build it again.
    """
    where = folder / BUILD
    if where.is_file() and where.stat().st_size > MOST_FACTS:
        raise ArtefactError(
            f"{where} has more than {MOST_FACTS} bytes; build the engine again with `xl-export build`."
        )
    facts = _parse(read_json(where), where=str(where))
    again = f"build it again: {rebuild_command(folder, facts)}"
    for name in (PLAN, *SIDE_FILES):
        if name not in facts.files:
            raise ArtefactError(f"{where} does not list {name}; {again}.")
        verify_file(folder / name, facts.files[name], record=BUILD, again=again)
    spec = parse_spec(read_json(folder / SPEC), where=str(folder / SPEC))
    if spec.identity != facts.artefact:
        raise ArtefactError(
            f"{folder} was built from the artefact {facts.artefact:.12}, and its {SPEC} is of {spec.identity:.12}; {again}."
        )
    return facts, spec


def _parse(data: Any, *, where: str) -> EngineFacts:
    try:
        digest = data.pop("digest", None) if isinstance(data, dict) else None
        facts = from_json(EngineFacts, data, where=where)
    except ConfigError as error:
        raise ArtefactError(
            f"{str(error).rstrip('.')}; the engine is damaged or of another version of xl-export: build it again with "
            "`xl-export build`."
        ) from error
    names = [profile.name for profile in facts.profiles]
    plain = all(CAPABILITY.fullmatch(capability) for capability in facts.compute_capabilities) and bool(
        facts.compute_capabilities
    )
    plain = plain and all(WORD.fullmatch(word) for word in (facts.version, *facts.layers))
    if digest != facts.identity or facts.schema != SCHEMA or names != ["segment", "token"] or not plain:
        raise ArtefactError(
            f"{where} was altered: its digest does not match its content; build the engine again with `xl-export build`."
        )
    return facts


def refuse_elsewhere(facts: EngineFacts, folder: Path, *, version: str, gpu: Gpu) -> None:
    """Raises ArtefactError where this TensorRT or this GPU does not run the engine; says how to build one that it runs."""
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
    """The command that builds an engine like this one into its folder, for the GPU that is `here` where one is given."""
    segment, token = facts.profiles
    words = [
        "xl-export build ARTEFACT",
        f"--out {shlex.quote(str(folder))}",
        f"--flavour {facts.flavour}",
        f"--attention {facts.attention}",
    ]
    if facts.flavour == "rtx":
        words.append(
            f"--compute-capability {here.compute_capability if here else ','.join(facts.compute_capabilities)}"
        )
    words += [
        f"--batch {_colons(segment.batch)}",
        f"--token-batch {_colons(token.batch)}",
        f"--tokens {segment.tokens[1]}",
    ]
    words += (
        [f"--hardware {facts.hardware}"]
        if facts.flavour == "tensorrt" and facts.hardware != "same-gpu"
        else []
    )
    words += [
        name
        for name, wanted in (("--version-compatible", facts.version_compatible), ("--refit", facts.refit))
        if wanted
    ]
    return f"`{' '.join([*words, '--force'])}`"


def _colons(sizes: tuple[int, ...]) -> str:
    return ":".join(map(str, sizes))
