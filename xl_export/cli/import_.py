"""`xl-export import`: checkpoints of other projects become runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.folders import refuse_existing
from runtimes.base.kinds import IMPORTED
from runtimes.cli.options import json_option, options_of, show
from xl_export.cli.options import force_option
from xl_export.importers import FORMATS
from xl_export.importers.shared.settings import Settings, read_settings

HELP = """Import SOURCE, a checkpoint of another project, as a run.

\b
The formats are:
FORMATS

A bare state dict of one of these models works too; give --settings for what its tensors do not show.
No code in SOURCE is executed. A setting or module that is unknown, or that cannot be computed here, is
refused by name.

Most checkpoints do not say how the model was evaluated: give --mem-len, --segment, --mask, --clamp-len and
--ramp as in its project. By default they have the published values. Each value is printed with its origin.

Before the run is written, two implementations score random tokens and must agree. A setting that is wrong
in both goes unnoticed: compare a few losses with your project's (docs/guides/own-checkpoint.md).

Reading a TensorFlow checkpoint needs TensorFlow. On a machine that has it, these lines make an .npz file
for any other:

\b
import numpy, tensorflow
variables = tensorflow.train.load_checkpoint("model.ckpt-0")
names = [name for name in variables.get_variable_to_shape_map() if "/Adam" not in name]
numpy.savez("model.npz", **{name: variables.get_tensor(name) for name in names})
""".replace("FORMATS", "\n".join(f"{name:<15}{format_.files}" for name, format_ in FORMATS.items()))


def _vocabulary_path(given: str | None) -> Path | None:
    """Returns the path that --vocab names. `ids` is no file; `./ids` is one, and becomes absolute."""
    if given is None or given == "ids" or Path(given) != Path("ids"):
        return None if given is None else Path(given)
    return Path(given).absolute()


@click.command("import", help=HELP)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The folder of the run to write.")
@click.option(
    "--describe",
    is_flag=True,
    help="Print what SOURCE holds, and write nothing. Replaces --out.",
)
@click.option(
    "--vocab",
    type=click.Path(),
    callback=lambda _context, _option, given: _vocabulary_path(given),
    help="File of the vocabulary: the one of the project, a vocab.json, a tokenizer.json or a SentencePiece "
    ".model; or `ids` if tokens are plain numbers. By default it is looked for next to SOURCE.",
)
@click.option(
    "--settings",
    type=click.Path(path_type=Path),
    help="JSON file with the next five options, under these names or the project's. A bare state dict "
    "may also need n_head, cutoffs and pre_lnorm.",
)
@options_of(Settings)
@click.option(
    "--allow-nonfinite",
    is_flag=True,
    help="Import weights that are NaN or infinite, too.",
)
@force_option
@json_option
def import_command(
    source: Path,
    out: Path | None,
    describe: bool,
    vocab: Path | None,
    settings: Path | None,
    allow_nonfinite: bool,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """What `xl-export import` does, see `HELP`."""
    if out is None and not describe:
        raise UserError("give --out RUN to write a run, or --describe to print what SOURCE holds.")
    if out is not None and describe:
        raise UserError(
            f"--describe writes nothing and --out names the run {out}; leave out --describe to import "
            "SOURCE, or --out to print what it holds."
        )
    if out is not None:
        refuse_existing(out, IMPORTED, force=force)
    # The prefix of a TensorFlow checkpoint is not a file itself.
    if not source.exists() and not source.with_name(f"{source.name}.index").exists():
        raise UserError(f"{source} does not exist; give the file or folder of a checkpoint.")
    with needs("train", "torch", "safetensors", "tqdm"):
        from trainer.model.model import count_parameters
        from xl_export.importers.formats import open_source, recognise
        from xl_export.importers.self_check import check_import
        from xl_export.importers.shared.checkpoint import ImportOptions
        from xl_export.importers.write import import_record, write_run
    chosen = {} if settings is None else read_settings(settings).chosen(str(settings))
    chosen |= Settings(**flags).chosen("option")
    opened = open_source(source)
    name = recognise(opened)
    project = FORMATS[name].project
    checkpoint = project.read(
        opened, ImportOptions(settings=chosen, vocab=vocab, allow_nonfinite=allow_nonfinite)
    )
    record = import_record(checkpoint, name=name, project=project.title)
    difference = None
    if out is not None:
        difference = check_import(checkpoint) if checkpoint.finite else None
        write_run(checkpoint, out, record=record, force=force)
    model = checkpoint.config
    lines = [f"format      {name}: {record['project']}"]
    for role, facts in record["files"].items():
        lines.append(
            f"{role:<12}{facts['name']}, {facts['num_bytes']:,} bytes, SHA-256 {facts['sha256'][:16]}…"
        )
    inner = f"N {model.persistent}" if model.persistent else f"FF {model.d_ff}"
    order = "pre" if model.pre_norm else "post"
    lines.append(
        f"sizes       {model.layers} layers, D {model.d_model}, H {model.heads}, K {model.head_dim}, "
        f"{inner}, {model.positions} positions, {order}-norm, {count_parameters(model):,} parameters"
    )
    clusters = (
        f", clusters from {', '.join(map(str, model.vocabulary.cutoffs))}" if model.vocabulary.cutoffs else ""
    )
    lines.append(f"tokens      {model.vocab_size:,}, {checkpoint.vocab.kind}{clusters}")
    for key, setting in checkpoint.settings.items():
        lines.append(f"setting     {key} {setting.value} ({setting.origin})")
    lines.append(f"here        {checkpoint.rule}")
    for note in checkpoint.notes:
        lines.append(f"note        {note}")
    if difference is not None:
        lines.append(
            f"check       the fast form and the naive form in float64 agree to {difference:.1g} nats on "
            "random tokens; both are this project's, so compare losses with your project's too"
        )
    if out is not None:
        following = f"; next: xl-export export {out} --out artefact" if checkpoint.finite else ""
        lines.append(f"{out} is imported{following}")
    sizes = {
        name: getattr(model, name)
        for name in ("layers", "d_model", "heads", "head_dim", "d_ff", "persistent", "vocab_size")
    }
    document = {
        "run": None if out is None else str(out),
        **record,
        "sizes": sizes,
        "parameters": count_parameters(model),
    }
    show(document, lines, as_json=as_json)
