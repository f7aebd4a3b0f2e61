"""`xl-export prepare`: from a public corpus or from own files to a dataset for `xl-export train`."""

from __future__ import annotations

from pathlib import Path

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.folders import refuse_existing
from runtimes.base.kinds import DATASET
from runtimes.base.records import to_json
from runtimes.cli.group import Subgroup
from runtimes.cli.options import show
from trainer.run.choices import SHORT_NAMES, CorpusName
from xl_export.cli.prepare.own import out_options, text_command, tokens_command, vocab_command

# What a user reads of each corpus.
ABOUT: dict[CorpusName, str] = {
    "enwik8": "90, 5 and 5 million bytes; a newline is a token too.",
    "text8": "90, 5 and 5 million characters; 27 different ones.",
    "wikitext-103": "267,735 words; the files for training, validation and test.",
    "one-billion-word": "Words that appear three times or more; `<S>` separates sentences. Held-out "
    "shard 0 is the test part, and shard 1 is for validation.",
    "penn-treebank": "10,000 words; ptb.train.txt, ptb.valid.txt and ptb.test.txt.",
}


@click.group("prepare", cls=Subgroup)
def prepare_command() -> None:
    """Prepare a dataset for training.

    A dataset is a folder with memory-mapped token ids, cut into three parts, and their vocabulary. It comes
    from a public corpus, from texts of your own, or from token ids that another program has made.

    \b
    xl-export prepare text8 --from text8.zip --out DATASET
    xl-export prepare text --train a.txt --valid b.txt --test c.txt --vocab tokenizer.json --out DATASET
    xl-export prepare tokens --train a.npy --vocab-size 512 --out DATASET
    xl-export prepare vocab --kind bpe --size 8192 --text a.txt --out tokenizer.json
    """


def corpus_command(name: CorpusName) -> click.Command:
    """The command that prepares one public corpus."""
    about = f"""Prepare {name}.

    {ABOUT[name]}

    All files are compared with the published sizes and hashes before they are used.
    """

    @click.command(name, help=about, short_help=ABOUT[name])
    @click.option(
        "--from",
        "source",
        required=True,
        type=click.Path(path_type=Path),
        help="The corpus: an archive (zip, tar, tar.gz, tar.bz2 or tar.xz) such as enwik8.zip, a folder or a "
        "single file. A single file may be compressed with gzip, bz2 or xz.",
    )
    @click.option(
        "--download",
        "fetch",
        is_flag=True,
        help="Download the published archive to the path given as --from, if there is no file yet.",
    )
    @click.option("--unverified", is_flag=True, help="Accept files that differ from the published ones.")
    @out_options
    def command(source: Path, out: Path, fetch: bool, unverified: bool, force: bool, as_json: bool) -> None:
        with needs("train", "tqdm"):
            from trainer.data.corpora import CORPORA
            from trainer.data.download import download
            from trainer.data.prepare import prepare

        refuse_existing(out, DATASET, force=force, sources=[source])
        if not source.exists() and not fetch:
            raise UserError(
                f"{source} does not exist; give the archive, folder or file of {name}, or download it to "
                "there with --download."
            )
        if not source.exists():
            corpus = CORPORA[name]
            download(corpus.urls, source, corpus.archive, max_bytes=corpus.max_bytes)
        facts = prepare(name, source, out, force=force, unverified=unverified)
        counts = ", ".join(f"{split} {count:,}" for split, count in facts.tokens.items())
        origin = "as published" if facts.published else "not the published files"
        line = f"{out} is ready: {name}, {origin}; tokens {counts}; vocabulary {facts.vocab_size:,}"
        document = {"dataset": str(out), "identity": facts.identity, **to_json(facts)}
        show(document, [line], as_json=as_json)

    return command


for command in (text_command, tokens_command, vocab_command):
    prepare_command.add_command(command)
for corpus in ABOUT:
    prepare_command.add_command(corpus_command(corpus))
for short, corpus in SHORT_NAMES.items():
    alias = corpus_command(corpus)
    alias.hidden = True
    prepare_command.add_command(alias, short)
