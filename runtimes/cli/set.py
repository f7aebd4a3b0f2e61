"""`xl-export set`: how tokens are drawn from a model by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError
from runtimes.base.records import to_json
from runtimes.cli.generate import sampling_options
from runtimes.cli.options import folder_argument, json_option, show
from runtimes.contract.sampling import GENAI, Sampler, genai_is_sealed, read_sampling, write_sampling
from runtimes.sessions.open import opener_of


@click.command("set")
@folder_argument
@sampling_options
@click.option("--reset", is_flag=True, help="First set all settings back to temperature 1 and all tokens.")
@json_option
def set_command(path: Path, reset: bool, as_json: bool, **sampling: Any) -> None:
    """Change how tokens are drawn by default from the model at PATH.

    PATH is an artefact, an engine or a run. Every command and runtime uses these settings unless it is given
    others. They are in the file sampling.json, which is not part of the artefact's identity: saved streams
    and checks stay valid.
    """
    if not reset and all(value is None for value in sampling.values()):
        raise UserError("nothing to set was given; give a setting such as --temperature 0.8, or --reset.")
    opener_of(path)  # refuses a folder that holds no model
    sampler = (Sampler() if reset else read_sampling(path)).replaced(**sampling)
    write_sampling(path, sampler)
    document = {"path": str(path), "sampling": to_json(sampler)}
    lines = [f"{path} draws with {sampler}"]
    if (path / GENAI).is_file() and genai_is_sealed(path):
        lines.append(f"{GENAI} keeps its settings, because {path} was exported by an earlier release")
    show(document, lines, as_json=as_json)
