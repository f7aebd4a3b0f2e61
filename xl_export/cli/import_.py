"""`xl-export import`: checkpoints of other projects become runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.folders import refuse_existing
from runtimes.cli.options import echo_json, json_option

NAMES = (
    "kimiyoung",
    "nvidia",
    "huggingface",
    "adaptive-span",
    "tensorflow",
    "xl-export",
)  # importers/formats.py, without torch


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The run folder to write.")
@click.option("--describe", is_flag=True, help="Print what SOURCE is and write nothing.")
@click.option(
    "--from",
    "wanted",
    type=click.Choice(["auto", *NAMES]),
    default="auto",
    show_default=True,
    help="Its format.",
)
@click.option(
    "--vocab",
    type=click.Path(path_type=Path),
    help="The vocabulary's file; the one beside SOURCE by default.",
)
@click.option(
    "--settings",
    type=click.Path(path_type=Path),
    help="A JSON file of the next five, or the project's words.",
)
@click.option("--mem-len", type=click.IntRange(min=0), help="The project's mem_len.")
@click.option("--segment", type=click.IntRange(min=1), help="Tokens of one step: its tgt_len or block_sz.")
@click.option("--mask", type=click.Choice(["same-length", "full"]), help="With or without its same_length.")
@click.option("--clamp-len", type=click.IntRange(min=-1), help="Its clamp_len; 0 or -1 for none.")
@click.option("--ramp", type=click.IntRange(min=1), help="Its adapt_span_ramp.")
@click.option("--allow-nonfinite", is_flag=True, help="Take weights that are NaN or infinite.")
@click.option("--force", is_flag=True, help="Replace the folder if it holds an earlier import.")
@json_option
def import_command(
    source: Path, out: Path | None, describe: bool, wanted: str, vocab: Path | None, settings: Path | None,
    allow_nonfinite: bool, force: bool, as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Make a run of SOURCE, a checkpoint of another project.

    \b
    kimiyoung      model.pt of kimiyoung/transformer-xl, with cache.pt
    nvidia         checkpoint_*.pt of DeepLearningExamples
    huggingface    a TransfoXL folder
    adaptive-span  checkpoint.pt of facebookresearch/adaptive-span, with corpus.pt
    tensorflow     an .npz of the original release's variables
    xl-export      a run

    A TensorFlow checkpoint becomes an .npz where TensorFlow is installed:

    \b
    import numpy, tensorflow
    variables = tensorflow.train.load_checkpoint("model.ckpt-0")
    numpy.savez("model.npz", **{n: variables.get_tensor(n) for n in
                variables.get_variable_to_shape_map() if "/Adam" not in n})

    How a model is evaluated is mostly not in its file. Settings are in the project's own words and mean what they mean
    there; those that are not given are what the project published, and all are printed. Nothing in SOURCE is executed.
    """
    if (out is None) != describe:
        raise UserError("give either --out RUN to write a run, or --describe to look at SOURCE.")
    if out is not None:
        refuse_existing(out, force=force, marker="import.json")
    with needs("train", "torch", "safetensors", "tqdm"):
        from xl_export.importers.checkpoint import Wishes
        from xl_export.importers.formats import FORMATS, open_source, recognise
        from xl_export.importers.settings import Given, Settings, read_settings
        from xl_export.importers.write import import_record, write_run
    given = [("option", Settings(**flags))]
    if settings is not None:
        given.append((str(settings), read_settings(settings)))
    opened = open_source(source)
    name = recognise(opened, wanted)
    checkpoint = FORMATS[name].read(
        opened, Wishes(given=Given(*given), vocab=vocab, allow_nonfinite=allow_nonfinite)
    )
    record = import_record(checkpoint, name=name, project=FORMATS[name].project)
    if out is not None:
        write_run(checkpoint, out, record=record, force=force)
    model = checkpoint.config
    click.echo(f"format      {name}: {record['project']}")
    for role, facts in record["files"].items():
        click.echo(
            f"{role:<12}{facts['name']}, {facts['num_bytes']:,} bytes, SHA-256 {facts['sha256'][:16]}…"
        )
    click.echo(
        f"sizes       {model.layers} layers, D {model.d_model}, H {model.heads}, K {model.head_dim}, "
        + (f"N {model.persistent}" if model.persistent else f"FF {model.d_ff}")
        + f", {model.positions} positions, {'pre' if model.pre_norm else 'post'}-norm, {model.parameters:,} parameters"
    )
    clusters = (
        f", clusters from {', '.join(map(str, model.vocabulary.cutoffs))}" if model.vocabulary.cutoffs else ""
    )
    click.echo(f"tokens      {model.vocab_size:,}, {checkpoint.vocab.kind}{clusters}")
    for key, setting in checkpoint.settings.items():
        click.echo(f"setting     {key} {setting.value} ({setting.origin})")
    click.echo(f"here        {checkpoint.rule}")
    for note in checkpoint.notes:
        click.echo(f"note        {note}")
    if out is not None:
        following = f"; next: xl-export export {out} --out artefact" if checkpoint.finite else ""
        click.echo(f"{out} is imported{following}")
    sizes = {
        name: getattr(model, name)
        for name in ("layers", "d_model", "heads", "head_dim", "d_ff", "persistent", "vocab_size")
    }
    document = {
        "run": None if out is None else str(out),
        **record,
        "sizes": sizes,
        "parameters": model.parameters,
    }
    echo_json(document, as_json)
