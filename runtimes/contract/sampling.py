"""How tokens are drawn, and `sampling.json`: the settings that a model recommends.

`sampling.json` is in the folder of a run, an artefact or an engine. It is optional, and no hash covers it:
changing it changes neither the identity of the artefact nor its saved streams.
"""

from __future__ import annotations

import codecs
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from runtimes.base.errors import UserError
from runtimes.base.files import read_bytes, read_json, write_json
from runtimes.base.options import Option, declared
from runtimes.base.ranges import Range
from runtimes.base.records import from_json, refuse_out_of_range

SAMPLING = "sampling.json"
MOST_TOP_K = 2**53 - 1  # the largest whole number that every language reads exactly
LEAST_FLOAT32 = 2.0**-126
GENAI = "genai_config.json"  # onnxruntime-genai's own file, which repeats the settings that it knows


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How tokens are drawn. Raises UserError for a setting outside of its range.

    The paper generates with top_k 40 (Dai et al. 2019, Appendix E).
    """

    temperature: Annotated[
        float,
        Range(0, 1e6),
        Option(
            "--temperature",
            "Below 1 likely tokens become likelier, above 1 less so; 0 takes the likeliest.",
        ),
    ] = 1.0
    top_k: Annotated[
        Annotated[int, Range(1, MOST_TOP_K, whole=True)] | None,
        Option("--top-k", "Draw from the k likeliest tokens. In a command or request, 0 draws from all."),
    ] = None
    top_p: Annotated[
        float,
        Range(0, 1, exclusive=True),
        Option("--top-p", "Draw from the fewest likeliest tokens with this total probability."),
    ] = 1.0
    min_p: Annotated[
        float,
        Range(0, 1),
        Option("--min-p", "Draw from tokens with at least this fraction of the highest probability."),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Range(0.01, 100),
        Option(
            "--repetition-penalty",
            "Above 1 makes tokens of the prompt and of the generated text less likely: positive logits are "
            "divided by it, negative ones multiplied.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Range(-2, 2),
        Option("--presence-penalty", "Subtracted from the logit of each token that was generated before."),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Range(-2, 2),
        Option(
            "--frequency-penalty",
            "Subtracted from the logit of a token for each time it was generated before.",
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        refuse_out_of_range(self)

    def replaced(self, **settings: Any) -> Sampler:
        """This sampler with some settings replaced. None keeps a setting; top_k 0 draws from all tokens."""
        given = {name: value for name, value in settings.items() if value is not None}
        if given.get("top_k") == 0:
            given["top_k"] = None
        return replace(self, **given) if given else self

    def changed(self) -> dict[str, Any]:
        """The settings that change the model's probabilities, by name."""
        return {
            each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default
        }

    def __str__(self) -> str:
        """Such as `temperature 0.8, top-p 0.9`."""
        words = [f"{name.replace('_', '-')} {value:g}" for name, value in self.changed().items()]
        return ", ".join(words) or "temperature 1"


SETTINGS = {each.field.name: each for each in declared(Sampler)}


def read_sampling(folder: Path) -> Sampler:
    """The settings that the model in a folder recommends; a neutral Sampler if it has no `sampling.json`.

    Raises UserError for a file that is not valid, and for anything else by that name. Every implementation
    accepts the same files (`tests/sampling.py`).
    """
    path = folder / SAMPLING
    if not os.path.lexists(path):
        return Sampler()
    try:
        content = read_bytes(path)
        if content.startswith(codecs.BOM_UTF8):
            raise UserError("it begins with a byte-order mark.")
        return from_json(Sampler, read_json(path, content), where=str(path))
    except UserError as error:
        sentence = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise UserError(
            f"{sentence.rstrip('.')}; write it again with `xl-export set {folder} --reset`."
        ) from error


def write_sampling(folder: Path, sampler: Sampler) -> None:
    """Writes `sampling.json` atomically, with the settings that change the model's probabilities.

    The folder's `genai_config.json` follows, unless the artefact is from a release that sealed it.
    """
    write_json(folder / SAMPLING, sampler.changed())
    if (folder / GENAI).is_file() and not genai_is_sealed(folder):
        config = read_json(folder / GENAI)
        config["search"] |= genai_search(sampler, config["model"]["vocab_size"])
        write_json(folder / GENAI, config)


def genai_is_sealed(folder: Path) -> bool:
    """Whether `spec.json` has the hash of `genai_config.json`, as earlier releases wrote it."""
    return GENAI in read_json(folder / "spec.json")["files"]


def genai_search(sampler: Sampler, vocab_size: int) -> dict[str, Any]:
    """The settings as onnxruntime-genai 0.18 reads them; it refuses a file with others, such as `min_p`."""
    top_k = sampler.top_k or 0
    return {
        "do_sample": sampler.temperature > LEAST_FLOAT32,
        "temperature": max(sampler.temperature, LEAST_FLOAT32),  # 0 is refused
        "top_k": top_k if top_k < vocab_size else 0,  # 0 for all; more than all are refused
        "top_p": max(sampler.top_p, LEAST_FLOAT32),  # 0 is taken for 1
        "repetition_penalty": sampler.repetition_penalty,
    }
