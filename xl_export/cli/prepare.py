"""`xl-export prepare`: a published corpus as a dataset to train on."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.folders import refuse_existing
from runtimes.base.records import to_json
from runtimes.cli.options import echo_json, json_option

NAMES = (
    "enwik8",
    "text8",
    "wikitext-103",
    "one-billion-word",
    "penn-treebank",
)  # those of trainer.data.corpora
SHORT = {"wt103": "wikitext-103", "lm1b": "one-billion-word", "ptb": "penn-treebank"}


@click.command("prepare")
@click.argument("name", type=click.Choice([*NAMES, *SHORT]))
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    help="Its archive (zip, tar.gz), or a folder or file of it.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The dataset folder to write.")
@click.option(
    "--download",
    "fetch",
    is_flag=True,
    help="Fetch the published archive to --from first, if nothing is there.",
)
@click.option("--unverified", is_flag=True, help="Accept files that are not the published ones.")
@click.option("--force", is_flag=True, help="Replace the folder if it holds an earlier dataset.")
@json_option
def prepare_command(
    name: str, source: Path, out: Path, fetch: bool, unverified: bool, force: bool, as_json: bool
) -> None:
    """Prepare a public corpus as a dataset to train on.

    It has the standard parts and vocabulary, as memory-mapped tokens.

    \b
    enwik8            bytes, newlines among them     90/5/5 million
    text8             27 characters                  90/5/5 million
    wikitext-103      267,735 words                  training, validation and test files
    one-billion-word  words seen three times or more sentences between <S>; test is held-out shard 0, validation 1
    penn-treebank     10,000 words                   ptb.train.txt, ptb.valid.txt, ptb.test.txt

    wt103, lm1b and ptb are short for the last three. Files are compared with the sizes and hashes that are public before
    they are used.
    """
    name = SHORT.get(name, name)
    with needs("train", "tqdm"):
        from trainer.data.dataset import DATA
        from trainer.data.download import download
        from trainer.data.prepare import prepare

    refuse_existing(out, force=force, marker=DATA, sources=[source])
    if not source.exists() and not fetch:
        raise UserError(
            f"{source} does not exist; give the archive, folder or file of {name}, or --download to fetch it there."
        )
    if not source.exists():
        download(name, source)
    facts = prepare(name, source, out, force=force, unverified=unverified)
    counts = ", ".join(f"{split} {count:,}" for split, count in facts.tokens.items())
    origin = "as published" if facts.published else "not the published files"
    click.echo(f"{out} is ready: {name}, {origin}; tokens {counts}; vocabulary {facts.vocab_size:,}")
    echo_json({"dataset": str(out), "identity": facts.identity, **to_json(facts)}, as_json)
