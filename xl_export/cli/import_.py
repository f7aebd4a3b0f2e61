"""`xl-export import`: checkpoints of other projects become runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.folders import refuse_existing
from runtimes.cli.options import json_option, show
from xl_export.cli.options import force_option
from xl_export.importers import FORMATS

HELP = """Import SOURCE, a checkpoint of another project, as a run.

\b
The formats are:
FORMATS

A file may hold only the state dict of one of these models; what its tensors do not show comes from
--settings.

A TensorFlow checkpoint is read if TensorFlow is installed. There, these lines make an .npz file of it,
which can be read everywhere:

\b
import numpy, tensorflow
variables = tensorflow.train.load_checkpoint("model.ckpt-0")
names = [name for name in variables.get_variable_to_shape_map() if "/Adam" not in name]
numpy.savez("model.npz", **{name: variables.get_tensor(name) for name in names})

Most checkpoints do not say how their model is evaluated. The options for that have the meaning that they
have in the project of the checkpoint. Where an option is missing, the value that the project published
is used, and every value is printed with its origin. No code in SOURCE is executed.

Before the run appears, the model scores random tokens in two ways of this project, which must agree. This
cannot find a setting that is wrong in both: compare a few losses with your project's
(docs/guides/own-checkpoint.md).

A setting or module of the checkpoint that is unknown, or that this project does not compute, is refused
by its name.
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
    help="Print what SOURCE holds, and write nothing. It replaces --out.",
)
@click.option(
    "--vocab",
    type=click.Path(),
    callback=lambda _context, _option, given: _vocabulary_path(given),
    help="The file of the vocabulary: the project's own, a vocab.json, a tokenizer.json or a .model of "
    "SentencePiece; or `ids`, if tokens are plain numbers (`./ids` is a file). By default it is in "
    "the folder of SOURCE.",
)
@click.option(
    "--settings",
    type=click.Path(path_type=Path),
    help="A JSON file with the next five options, by these names or the project's own. A bare state "
    "dict may need n_head, cutoffs and pre_lnorm, too.",
)
@click.option(
    "--mem-len",
    type=click.IntRange(min=0),
    help="The length of the memory in tokens: mem_len of the project.",
)
@click.option(
    "--segment",
    type=click.IntRange(min=1),
    help="The tokens of one step: tgt_len or block_sz of the project.",
)
@click.option(
    "--mask",
    type=click.Choice(["same-length", "full"]),
    help="The attention mask: same-length is the project's flag same_length, and full is its absence.",
)
@click.option(
    "--clamp-len",
    type=click.IntRange(min=-1),
    help="The largest distance with a position of its own: clamp_len of the project. 0 or -1 means no limit.",
)
@click.option(
    "--ramp",
    type=click.IntRange(min=1),
    help="The width of the soft edge of adaptive spans: adapt_span_ramp of the project.",
)
@click.option(
    "--allow-nonfinite",
    is_flag=True,
    help="Import the checkpoint although weights in it are NaN or infinite.",
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
        refuse_existing(out, force=force, marker="import.json")
    # The prefix of a TensorFlow checkpoint is not a file itself.
    if not source.exists() and not source.with_name(f"{source.name}.index").exists():
        raise UserError(f"{source} does not exist; give the file or folder of a checkpoint.")
    with needs("train", "torch", "safetensors", "tqdm"):
        from trainer.model.model import count_parameters
        from xl_export.importers.formats import open_source, recognise
        from xl_export.importers.self_check import check_import
        from xl_export.importers.shared.checkpoint import ImportOptions
        from xl_export.importers.shared.settings import Settings, read_settings
        from xl_export.importers.write import import_record, write_run
    chosen = {} if settings is None else read_settings(settings).chosen(str(settings))
    chosen |= Settings(**flags).chosen("option")
    opened = open_source(source)
    name = recognise(opened)
    module = FORMATS[name].module
    checkpoint = module.read(
        opened, ImportOptions(settings=chosen, vocab=vocab, allow_nonfinite=allow_nonfinite)
    )
    record = import_record(checkpoint, name=name, project=module.PROJECT)
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
