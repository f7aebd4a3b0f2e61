"""`xl-export recl`: the relative effective context length of a group of models (Dai et al. 2019, Table 8)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import click
import numpy as np

from runtimes.base.errors import ConfigError, UserError
from runtimes.base.files import refuse_replacing, refuse_unwritable, write_json
from runtimes.base.ranges import Range
from runtimes.base.records import to_json
from runtimes.cli.eval import dtype_option, ids_option, text_option
from runtimes.cli.options import Number, device_option, json_option, show, threads_option
from runtimes.contract.device import Device
from runtimes.contract.session import Session
from runtimes.contract.tokens import read_tokens
from runtimes.sessions.open import open_session
from runtimes.tasks.context_losses import context_losses, refuse_beyond_context, spread_positions
from runtimes.tasks.effective_context import THRESHOLD, perplexities, perplexity_gains, recl, relative_gains
from runtimes.tasks.sweep import parse_values, sweep


@click.command("recl")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@text_option
@ids_option
@dtype_option
@click.option(
    "--lengths",
    required=True,
    metavar="FIRST:LAST:STEP",
    help="The context lengths that are compared, in tokens, such as 100:1000:100 or 10,20,50.",
)
@click.option(
    "--r",
    "shares",
    multiple=True,
    type=Number(Range(0, 1, exclusive=True)),
    default=(0.1, 0.5, 1.0),
    show_default=True,
    help="The share of the tokens, the hardest first, over which gains are averaged. Give it again for more "
    "shares.",
)
@click.option(
    "--positions",
    default=1000,
    show_default=True,
    type=click.IntRange(min=1),
    help="How many tokens of the text are predicted.",
)
@click.option(
    "--mem-len",
    type=click.IntRange(min=0),
    help="How many tokens a run remembers. The default is each run's own number; artefacts keep theirs.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write all numbers to this .json file.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw gains and perplexities into this .png file."
)
@click.option("--force", is_flag=True, help="Replace the files of --out and --plot if they exist.")
@threads_option()
@device_option
@json_option
def recl_command(
    paths: tuple[Path, ...],
    text: Path,
    ids: bool,
    dtype: str | None,
    lengths: str,
    shares: tuple[float, ...],
    positions: int,
    mem_len: int | None,
    out: Path | None,
    plot: Path | None,
    force: bool,
    threads: int | None,
    device: Device,
    as_json: bool,
) -> None:
    """Measure the effective context length (RECL) of PATHS.

    PATHS are runs and artefacts, which are compared as one group. The relative effective context length of a
    model is the longest context that still lowers the group's best perplexity by 1% or more, over the share r
    of the tokens that are hardest to predict (Dai et al. 2019, section 4.3 and Appendix C). A model that
    still gains at the last length has at least that RECL.
    """
    contexts = _ascending(lengths)
    if out:
        refuse_unwritable(out, option="--out", suffixes=(".json",))
        refuse_replacing(out, option="--out", force=force)
    if plot:
        from xl_export.plots.canvas import check_picture

        check_picture(plot, "--plot")
        refuse_replacing(plot, option="--plot", force=force)
    sessions = _group(paths, mem_len=mem_len, threads=threads, device=device)
    refuse_beyond_context(sessions, contexts[-1])
    tokens = read_tokens(text, sessions[0].vocab, ids=ids, dtype=dtype)
    where = spread_positions(len(tokens), count=positions, longest=contexts[-1])
    names = [str(path) for path in paths]
    losses_ICN = np.empty((len(sessions), len(contexts), len(where)), np.float32)
    for (i, session), (c, context) in itertools.product(enumerate(sessions), enumerate(contexts)):
        click.echo(f"{names[i]}: predicting {len(where):,} tokens, each after {context} others", err=True)
        losses_ICN[i, c] = context_losses(session, tokens, where, context=context)
    report = _report(names, sessions, contexts, losses_ICN, shares)
    if out:
        write_json(out, report)
    if plot:
        from xl_export.plots.curves import plot_recl

        plot_recl(plot, report)
    show(report, _lines(report), as_json=as_json)


def _ascending(text: str) -> tuple[int, ...]:
    lengths = parse_values(text, "--lengths", least=1)
    if len(lengths) < 2 or list(lengths) != sorted(lengths):
        raise ConfigError(
            f"--lengths is {text!r:.60}; expected at least two context lengths in ascending order."
        )
    return lengths


def _group(
    paths: tuple[Path, ...], *, mem_len: int | None, threads: int | None, device: Device
) -> list[Session]:
    sessions = []
    for path in paths:
        session = open_session(path, threads=threads, device=device)
        ((rule, _),) = sweep(session.rule, mem_lens=None if mem_len is None else (mem_len,))
        sessions.append(session.with_rule(rule))
        if session.vocab.to_json() != sessions[0].vocab.to_json():
            raise UserError(
                f"{path} has another vocabulary than {paths[0]}, and losses are compared token by token; "
                "give models with one vocabulary."
            )
    return sessions


def _report(
    names: list[str],
    sessions: list[Session],
    lengths: tuple[int, ...],
    losses_ICN: np.ndarray,
    shares: tuple[float, ...],
) -> dict[str, Any]:
    """Returns all numbers as JSON.

    For each model these are its rule and perplexities, and for each r its RECL and the gain of every step.
    """
    models: list[dict[str, Any]] = [
        {
            "name": name,
            "identity": session.identity,
            "rule": to_json(session.rule),
            "perplexity": perplexity.tolist(),
            "by_r": [],
        }
        for name, session, perplexity in zip(names, sessions, perplexities(losses_ICN), strict=True)
    ]
    for r in shares:
        found = recl(losses_ICN, lengths, r=r)
        gains = relative_gains(losses_ICN, r=r)
        perplexity_drops = perplexity_gains(losses_ICN, r=r)
        for i, model in enumerate(models):
            model["by_r"].append(
                {
                    "r": r,
                    "recl": found[i].length,
                    "at_least": found[i].at_least,
                    "shown": str(found[i]),
                    "relative_gain": gains[i].tolist(),
                    "perplexity_gain": perplexity_drops[i].tolist(),
                }
            )
    return {
        "lengths": list(lengths),
        "threshold": THRESHOLD,
        "positions": losses_ICN.shape[2],
        "models": models,
    }


def _lines(report: dict[str, Any]) -> list[str]:
    models = report["models"]
    lengths = report["lengths"]
    width = max(12, *(len(model["name"]) + 2 for model in models))
    lines = ["model".ljust(width) + "".join(f"r = {by['r']:g}".rjust(10) for by in models[0]["by_r"])]
    for model in models:
        lines.append(model["name"].ljust(width) + "".join(by["shown"].rjust(10) for by in model["by_r"]))
    still = any(by["at_least"] for model in models for by in model["by_r"])
    lines.append(
        f"context lengths {lengths[0]} to {lengths[-1]}, {report['positions']:,} positions, threshold "
        f"{report['threshold']:g}" + ("; ≥ marks a model that still gains at the last length" * still)
    )
    return lines
