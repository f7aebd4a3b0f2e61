"""`xl-export attention` and `xl-export spans`: what the heads of a run attend to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import numpy as np

from runtimes.base.errors import ConfigError, TextError, UserError, needs
from runtimes.base.files import refuse_replacing, write_json
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.base.kinds import PICTURES
from runtimes.base.progress import working
from runtimes.base.records import to_json
from runtimes.cli.options import json_option, options_of, show, threads_option
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import SPEC
from runtimes.contract.tensors import Form, bytes_saved
from runtimes.contract.tokens import read_tokens
from runtimes.contract.vocabulary import Vocab, decode
from xl_export.cli.options import force_option, out_option
from xl_export.plots import attention as pictures
from xl_export.plots.canvas import check_picture, new_figure

if TYPE_CHECKING:
    from trainer.model.inspection import LearnedSpans, Observation
    from trainer.run.checkpoint import Run

MARKER = "attention.json"
ARRAYS = "attention.npz"
ROWS = 16  # target tokens of Figure 6
PACKAGES = ("torch", "safetensors", "tqdm")


@click.command("attention")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--text",
    required=True,
    type=click.Path(path_type=Path),
    help="The text that the model reads, for example RUN/valid.txt.",
)
@out_option
@click.option(
    "--layer",
    type=click.IntRange(min=0),
    help="The layer that Figure 6 shows, counted from 0. By default it shows the head whose attention goes "
    "back the furthest.",
)
@click.option(
    "--head",
    type=click.IntRange(min=0),
    help="The head of that layer, counted from 0. The default is chosen as for --layer.",
)
@click.option(
    "--at",
    type=click.IntRange(min=0),
    help=f"The position in the text of the first of the {ROWS} target tokens of Figure 6. The default shows "
    "the last tokens that are read.",
)
@click.option(
    "--tokens",
    "count",
    default=10_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="How many tokens of the text are read. More are read if --at is behind them.",
)
@options_of(MemoryRule, defaults=False, only=("mem_len",))
@force_option
@threads_option()
@json_option
def attention_command(
    run: Path,
    text: Path,
    out: Path,
    layer: int | None,
    head: int | None,
    at: int | None,
    count: int,
    mem_len: int | None,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Draw to which tokens of a text the heads of RUN attend.

    The pictures are as in Dai et al. 2019, Appendix D.

    \b
    figure-5.png  the average weight of every head by distance
    figure-6.png  the weights of one head over a piece of the text
    figure-7.png  as figure 5, for only terms (a), (b) and (d) of the score; relative positions only
    attention.npz, attention.json  the numbers and the settings

    The mask and the memory are those with which the run was evaluated; --mem-len changes the memory. Averages
    leave out the first tokens, which do not have a whole memory before them.
    """
    refuse_existing(out, PICTURES, force=force, sources=[run, text])
    new_figure(1, 1)  # a missing matplotlib is reported before anything is computed
    opened = _open(run, threads)
    stream = read_tokens(text, opened.vocab).astype(np.int64)
    from trainer.model.inspection import observe

    _check_choice(opened, layer, head)
    rule = opened.config.evaluation
    rule = rule if mem_len is None else dataclasses.replace(rule, mem_len=mem_len)
    stretch = _stretch(len(stream), rule.mem_len, at, count)
    relative = opened.config.model.positions == "relative"
    read = stream[: max(count, stretch.stop)]
    with working(f"averaging the attention over {len(read):,} tokens"):
        seen = observe(opened.model, read, rule, stretch=stretch, terms=relative)
    layer, head = seen.widest(layer, head)
    title = f"mean over {seen.positions:,} tokens; {rule}"
    facts = _facts(opened, rule, seen, layer, head)
    with (
        working("drawing"),
        atomic_folder(out, PICTURES, force=force, sources=[run, text]) as folder,
    ):
        pictures.draw_average(folder / "figure-5.png", seen.average, seen.persistent, title=title)
        _draw_stretch(folder / "figure-6.png", opened, rule, seen, layer, head, stream)
        if seen.terms is not None:
            pictures.draw_terms(folder / "figure-7.png", seen.terms, title=title)
        np.savez(folder / ARRAYS, **_arrays(seen))
        write_json(folder / MARKER, facts)
        names = sorted(path.name for path in folder.iterdir())
    lines = [
        f"{out} has {', '.join(names)}; Figure 6 is of layer {layer}, head {head}, tokens {stretch.start} to "
        f"{stretch.stop - 1}"
    ]
    if not relative:
        lines.append(
            f"figure-7.png is left out, because {opened.config.model.positions} positions have no terms (a) "
            "to (d)"
        )
    show(facts, lines, as_json=as_json)


@click.command("spans")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Draw the spans into this PNG file.")
@click.option("--force", is_flag=True, help="Replace the file of --out if it exists.")
@json_option
def spans_command(run: Path, out: Path | None, force: bool, as_json: bool) -> None:
    """Print how many tokens back every head of RUN attends.

    These are the adaptive spans of Sukhbaatar et al. 2019a, which a model learns, and the bytes of memory
    that they save.
    """
    if out:
        check_picture(out, "--out")
        refuse_replacing(out, option="--out", force=force)
    opened = _open(run, None)
    from trainer.model.inspection import learned_spans

    learned = learned_spans(opened.model)
    rule = opened.config.evaluation
    saved = {form: bytes_saved(opened.model.facts(), rule, form) for form in get_args(Form)}
    forms = ", ".join(f"{num_bytes:,} bytes ({form})" for form, num_bytes in saved.items())
    if out:
        title = f"the model can learn spans of up to {learned.maximum:,} tokens; {rule}"
        pictures.draw_spans(
            out, learned.spans, learned.longest_distances, maximum=learned.maximum, title=title
        )
        click.echo(f"drawn to {out}", err=True)
    document = {
        "maximum": learned.maximum,
        "spans": learned.spans,
        "reaches": learned.longest_distances,
        "bytes_saved": saved,
    }
    sentence = f"an artefact with memory {rule.mem_len} saves {forms} per stream"
    show(document, [*span_lines(learned), sentence], as_json=as_json)


def span_lines(learned: LearnedSpans) -> list[str]:
    """Returns a line for each layer.

    It has the span of every head in tokens, and the largest distance that has any weight.
    """
    rows = [["layer", *(f"head {head}" for head in range(len(learned.spans[0])))]]
    for layer, heads in enumerate(zip(learned.spans, learned.longest_distances, strict=True)):
        rows.append([str(layer), *(f"{span:.1f} → {reach}" for span, reach in zip(*heads, strict=True))])
    width = max(len(cell) for row in rows for cell in row[1:])
    table = ["  ".join([f"{row[0]:>5}", *(f"{cell:>{width}}" for cell in row[1:])]) for row in rows]
    return [f"span in tokens (at most {learned.maximum}) → largest distance that has any weight", *table]


def _open(folder: Path, threads: int | None) -> Run:
    if (folder / SPEC).is_file():
        raise UserError(
            f"{folder} is an artefact, which does not give the weights of its heads; give the run that it "
            "was exported from."
        )
    with needs("train", *PACKAGES):
        import torch

        from trainer.run.checkpoint import load_run
    if threads is not None:
        torch.set_num_threads(threads)
    run = load_run(folder)
    run.model.eval()
    return run


def _check_choice(run: Run, layer: int | None, head: int | None) -> None:
    """Raises ConfigError for a layer or head that is missing or does not attend to the text."""
    for name, chosen, count in (
        ("layer", layer, run.config.model.layers),
        ("head", head, run.model.facts().context_heads),
    ):
        if chosen is not None and chosen >= count:
            raise ConfigError(
                f"--{name} is {chosen}; expected 0 to {count - 1}, those that attend to the text."
            )


def _stretch(length: int, mem_len: int, at: int | None, count: int) -> range:
    """Returns the targets of Figure 6, each with a whole memory before it.

    They begin at `at`, or are the last of the tokens that are averaged over.
    """
    last = length - ROWS
    if last < mem_len:
        raise TextError(
            f"the text has {length} tokens, expected at least {mem_len + ROWS} for a memory of {mem_len} "
            f"and {ROWS} targets; give a longer --text or a smaller --mem-len."
        )
    if at is not None and not mem_len <= at <= last:
        raise TextError(
            f"--at is {at}; expected {mem_len} to {last}, so that a whole memory precedes and {ROWS} "
            "tokens follow."
        )
    first = max(mem_len, min(count, length) - ROWS) if at is None else at
    return range(first, first + ROWS)


def _symbol(vocab: Vocab, token: int) -> str:
    """One token as text; a byte that is not a character by itself as two hexadecimal digits."""
    text = decode(vocab, [token])
    return pictures.legible(text) if text and "\ufffd" not in text else f"{token:02x}"


def _draw_stretch(
    path: Path, run: Run, rule: MemoryRule, seen: Observation, layer: int, head: int, stream: np.ndarray
) -> None:
    from trainer.model.inspection import highlighted

    weights = seen.weights[layer, head]
    context = range(seen.stretch.start - seen.weights.shape[-1] + 1, seen.stretch.stop)
    symbols = [_symbol(run.vocab, int(stream[position])) if position >= 0 else "" for position in context]
    pictures.draw_stretch(
        path,
        weights,
        seen.seen,
        highlighted(weights, seen.seen),
        symbols,
        first=seen.stretch.start,
        title=f"layer {layer}, head {head}; {rule}",
    )


def _arrays(seen: Observation) -> dict[str, np.ndarray]:
    """The numbers that the pictures show; `Observation` has their shapes."""
    arrays = {"average": seen.average, "weights": seen.weights, "seen": seen.seen}
    if seen.persistent is not None:
        arrays["persistent"] = seen.persistent
    return arrays | {f"term_{name}": values for name, values in (seen.terms or {}).items()}


def _facts(run: Run, rule: MemoryRule, seen: Observation, layer: int, head: int) -> dict[str, Any]:
    """The settings, and one number or two for each head."""
    return {
        "weights_sha256": run.sha256,
        "rule": to_json(rule),
        "positions": seen.positions,
        "figure_6": {"layer": layer, "head": head, "first": seen.stretch.start, "targets": len(seen.stretch)},
        "mean_distance": seen.mean_distances.tolist(),
        "persistent_share": None if seen.persistent is None else seen.persistent.tolist(),
    }
