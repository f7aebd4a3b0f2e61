"""What a run has recorded of its training, for `xl-export runs`: sizes, speed, curves. Loads no PyTorch."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.files import open_file, read_bytes, read_json
from runtimes.contract.spec import VOCAB
from runtimes.contract.tokens import DATA
from runtimes.contract.vocabulary import load_vocab
from trainer.run.config import TrainConfig

CONFIG = "config.json"
METRICS = "metrics.jsonl"
VALID = "valid.txt"
MODEL = "model.safetensors"
STATE = "training.safetensors"
# The unit of a score of one token, where every token stands for one such unit of the text.
UNITS = {"byte": "byte", "char": "character"}
# What a file that is missing, damaged or of another program raises where its header is read.
UNREADABLE = (
    OSError,
    UserError,
    struct.error,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
)
NO_WEIGHTS = ("auxiliary.", "positions.frequencies")  # classifiers of training, and a constant
Values = list[tuple[int, float]]  # of a key, with their steps
Curve = tuple[tuple[int, int, float], ...]  # (step, tokens trained until then, bits per token)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The training of one run. A figure is None where the run does not tell it."""

    path: str
    steps: int  # done so far
    planned: int  # of the whole training
    parameters: int | None  # trained values
    tokens: int  # trained so far
    # The best validation, in bits per token, and its step.
    best_bits: float | None
    best_step: int | None
    final_bits: float | None  # the score of the whole held-out text at the end
    # The best validation for each `byte` or `character` of the text, and which of the two.
    unit: str | None
    bits_per_unit: float | None
    # The SHA-256 of the held-out text, as training recorded it; of a run without that record it is of the
    # text that is there now.
    held_out: str | None
    validated: int | None  # the number of tokens that a validation scores
    # The most that it may score, as configured; None for the whole held-out text.
    validate_tokens: int | None
    learning_rate: float  # the highest of the schedule
    tokens_per_second: float | None  # the median of what was logged
    seconds: float | None  # of training, with validations
    training: Curve
    validations: Curve


def runs_in(path: Path) -> list[Path]:
    """The run in a folder, or the runs in its folders; raises ArtefactError where there is none."""
    if (path / CONFIG).is_file() and (path / METRICS).is_file():
        return [path]
    try:
        found = sorted(child for child in path.iterdir() if (child / METRICS).is_file())
    except OSError as error:
        raise ArtefactError(
            f"{error.filename or path} could not be read ({error.strerror}); give a run, or a folder of runs."
        ) from error
    if not found:
        if (path / METRICS).is_file():
            raise ArtefactError(f"{path} is no whole run, because it has no {CONFIG}; copy or make it again.")
        raise ArtefactError(
            f"{path} is neither a run nor a folder of runs, because it has no {METRICS}; make a run with "
            "`xl-export train --out RUN`."
        )
    return found


def read_record(run: Path) -> Record:
    """What the run in a folder has recorded; raises UserError that names the file that cannot be used."""
    config = TrainConfig.from_json(read_json(run / CONFIG), where=str(run / CONFIG))
    lines = _lines(run / METRICS)
    validations = _values(lines, "validation_bits_per_token")
    steps = max((line["step"] for line in lines), default=0)
    best = min(validations, key=lambda point: point[1], default=None)
    unit, bits_per_unit = _per_unit(run, lines, best)
    speeds = [value for _, value in _values(lines, "tokens_per_second")]
    final = _values(lines, "final_validation_bits_per_token")
    seconds = _values(lines, "seconds")
    return Record(
        path=str(run),
        steps=steps,
        planned=config.steps,
        parameters=_parameters(run / MODEL),
        tokens=tokens_after(config, steps),
        best_bits=best[1] if best else None,
        best_step=best[0] if best else None,
        final_bits=final[-1][1] if final else None,
        unit=unit,
        bits_per_unit=bits_per_unit,
        held_out=_recorded(run / STATE) or _held_out(run, config),
        validated=_validated(run, config) if validations else None,
        validate_tokens=config.validate_tokens,
        learning_rate=config.optimizer.lr,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds[-1][1] if seconds else None,
        training=_curve(config, _values(lines, "bits_per_token")),
        validations=_curve(config, validations),
    )


def tokens_after(config: TrainConfig, steps: int) -> int:
    """The number of tokens that so many steps of training read."""
    total = 0
    at = 0
    segment = config.training.segment
    for start, longer in (*config.segment_schedule, (steps, 0)):
        total += max(0, min(start, steps) - at) * segment
        at = min(start, steps)
        segment = longer
    return total * config.batch


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of the metrics; a line that a kill cut short is left out.

    Raises ArtefactError for a file without one whole line among others.
    """
    written = read_bytes(path).decode("utf-8", errors="replace").splitlines()
    lines = []
    for text in written:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and type(line.get("step")) is int and 0 <= line["step"] <= 1 << 40:
            lines.append(line)
    if len(written) > 1 and not lines:
        raise ArtefactError(f"{path} holds no line of a training; it is damaged, or of another program.")
    return lines


def _values(lines: Sequence[dict[str, Any]], key: str) -> Values:
    """The finite numbers of a key."""
    return [
        (line["step"], float(line[key]))
        for line in lines
        if type(line.get(key)) in (int, float) and abs(line[key]) <= sys.float_info.max
    ]


def _curve(config: TrainConfig, values: Values) -> Curve:
    return tuple((step, tokens_after(config, step), bits) for step, bits in values)


def _per_unit(
    run: Path, lines: Sequence[dict[str, Any]], best: tuple[int, float] | None
) -> tuple[str | None, float | None]:
    """The unit of the text and the best score for each, where tokens are units or it was recorded."""
    recorded = dict(_values(lines, "validation_bits_per_byte"))
    if best and best[0] in recorded:
        return "byte", recorded[best[0]]
    vocabulary = read_json(run / VOCAB)
    unit = UNITS.get(str(vocabulary.get("kind"))) if isinstance(vocabulary, dict) else None
    return unit, best[1] if best and unit else None


def _recorded(checkpoint: Path) -> str | None:
    """The SHA-256 of the held-out text that a checkpoint has recorded; None where it has not."""
    try:
        held_out = json.loads(_header(checkpoint)["__metadata__"]["facts"])["held_out"]
    except UNREADABLE:
        return None
    return held_out if isinstance(held_out, str) else None


def _held_out(run: Path, config: TrainConfig) -> str | None:
    """The SHA-256 of the held-out text that is there now; None where there is none."""
    try:
        if config.data is not None:
            return held_out_of_dataset(Path(config.data))
        return hashlib.sha256(read_bytes(run / VALID)).hexdigest()
    except UserError:
        return None


def held_out_of_dataset(folder: Path) -> str | None:
    """The SHA-256 of the file that the held-out part was made from, and so the same for every vocabulary.

    Where there are several files, or the part was cut from others, it is made of their hashes. It is None
    where the dataset has none. Raises UserError where the dataset cannot be read.
    """
    facts = read_json(folder / DATA)
    known = facts.get("sources") if isinstance(facts, dict) else None
    sources = {
        name: str(source.get("sha256"))
        for name, source in (known.items() if isinstance(known, dict) else ())
        if isinstance(source, dict)
    }
    held_out = {name: digest for name, digest in sources.items() if name.partition("/")[0] == "valid"}
    digests = sorted((held_out or sources).values())
    if len(digests) > 1:
        return hashlib.sha256("".join(digests).encode()).hexdigest()
    return digests[0] if digests else None


def _validated(run: Path, config: TrainConfig) -> int | None:
    """The number of tokens that a validation scores, all but the first; None where the text is not there."""
    limit = config.validate_tokens
    try:
        if config.data is not None:
            facts = read_json(Path(config.data) / DATA)
            tokens = facts.get("tokens") if isinstance(facts, dict) else None
            held_out = tokens.get("valid") if isinstance(tokens, dict) else None
            if type(held_out) is not int:
                return None
        else:
            held_out = len(load_vocab(run / VOCAB).encode(read_bytes(run / VALID)))
    except UserError:  # the data set was moved, or a library of the vocabulary is not installed
        return None
    return max(0, held_out - 1 if limit is None else min(held_out - 1, limit))


def _parameters(path: Path) -> int | None:
    """The number of weights in a safetensors file, from its header; None where it cannot be read."""
    try:
        count: int = sum(
            math.prod(facts["shape"])
            for name, facts in _header(path).items()
            if name != "__metadata__" and not name.startswith(NO_WEIGHTS)
        )
        return count
    except UNREADABLE:
        return None


def _header(path: Path) -> Any:
    """The JSON at the beginning of a safetensors file; raises one of UNREADABLE where there is none."""
    with open_file(path) as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return json.loads(stream.read(min(length, 100_000_000)))
