"""`xl-export prepare text`, `tokens` and `vocab`: datasets and vocabularies from a user's own files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from runtimes.base.errors import UserError, needs
from runtimes.base.files import refuse_replacing, refuse_unwritable
from runtimes.base.folders import refuse_existing
from runtimes.base.kinds import DATASET
from runtimes.base.records import to_json
from runtimes.cli.options import json_option, options_of, show
from runtimes.contract.id_files import ID_TYPES
from trainer.run.config import TrainConfig
from xl_export.cli.options import force_option, out_option

if TYPE_CHECKING:
    from trainer.data.own import OwnFiles, Prepared
    from trainer.data.own_text import Documents
    from trainer.data.subwords import VocabChoice

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
documents_option = click.option(
    "--documents",
    "mode",
    type=click.Choice(["file", "line", "jsonl"]),
    default="file",
    show_default=True,
    help="A document is a whole file, a line of a file, or the `text` of each line of JSON.",
)


def _part_options(command: Command) -> Command:
    for split, required, what in (
        ("test", False, "for the final measurement"),
        ("valid", False, "for validation while training"),
        ("train", True, "for training"),
    ):
        missing = "" if required else " Without it, the last 5 % of the training ids are cut off for it."
        option = click.option(
            f"--{split}",
            multiple=True,
            required=required,
            type=PATH,
            help=f"A file {what}; give the option again for more files.{missing}",
        )
        command = option(command)
    return command


def out_options(command: Command) -> Command:
    """The options --out, --force and --json of a command that writes a dataset."""
    return out_option(force_option(json_option(command)))


@click.command("tokens")
@_part_options
@click.option(
    "--vocab-size",
    type=click.IntRange(1, 1 << 24),
    help="The number of different tokens; ids are 0 to one less. With --names it may be left out.",
)
@click.option(
    "--dtype",
    type=click.Choice(ID_TYPES),
    help="What the integers in .bin files are; they are little-endian.",
)
@click.option(
    "--end-of-document",
    type=click.IntRange(min=0),
    metavar="ID",
    help="The token that follows each document: a file, a row, or a line of a .jsonl file. It is added "
    "if a document does not end with it.",
)
@click.option(
    "--names", type=PATH, help="A file with a name for each token: one name a line, or a JSON list of names."
)
@out_options
def tokens_command(
    train: tuple[Path, ...],
    valid: tuple[Path, ...],
    test: tuple[Path, ...],
    vocab_size: int | None,
    dtype: str | None,
    end_of_document: int | None,
    names: Path | None,
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Prepare token ids that you have already.

    They are of another program: music, events, encoded text.

    Files are .npy arrays of integers (one dimension, or two with a document a row), raw .bin files of
    integers, .jsonl files with a list of integers a line, or .txt files of numbers with white space or commas
    between them. They are read block by block, so they may be larger than memory.
    """
    files = _files(train, valid, test, out, force)
    with needs("train", "tqdm"):
        from trainer.data.own_ids import ids_vocab, prepare_ids

    vocab = ids_vocab(vocab_size, names=names, end_of_document=end_of_document)
    _conclude(out, prepare_ids(files, out, vocab=vocab, dtype=dtype, force=force), as_json)


@click.command("text")
@_part_options
@click.option(
    "--vocab",
    required=True,
    help="The vocabulary: byte, char, word or subword, or a file (vocab.json, tokenizer.json, or a "
    "SentencePiece .model).",
)
@documents_option
@options_of(TrainConfig, only=("min_count", "max_size"))
@out_options
def text_command(
    train: tuple[Path, ...],
    valid: tuple[Path, ...],
    test: tuple[Path, ...],
    vocab: str,
    mode: Documents,
    min_count: int,
    max_size: int | None,
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Prepare UTF-8 texts of your own, of any size.

    They are read block by block. The end-of-document token follows each document, if the vocabulary has
    one. Otherwise files are kept as they are, and lines and JSON texts end with a newline.
    """
    files = _files(train, valid, test, out, force)
    with needs("train", "tqdm"):
        from trainer.data.own_text import prepare_text

    prepared = prepare_text(
        files, out, vocab=vocab, documents=mode, min_count=min_count, max_size=max_size, force=force
    )
    _conclude(out, prepared, as_json)


@click.command("vocab")
@click.option(
    "--kind",
    required=True,
    type=click.Choice(["bpe", "unigram", "wordpiece", "byte-bpe", "sentencepiece", "word"]),
    help="The kind of vocabulary. All kinds of subwords but wordpiece give back a text with its white space; "
    "byte-bpe and sentencepiece have no unknown text.",
)
@click.option(
    "--size",
    "--max-size",
    "size",
    type=click.IntRange(2, 1 << 24),
    help="The number of tokens, special tokens included. For words it is the largest number, and may be "
    "left out; --max-size is another name for it.",
)
@click.option(
    "--text",
    "text",
    multiple=True,
    required=True,
    type=PATH,
    help="A UTF-8 text to learn from, such as book.txt; give the option again for more files.",
)
@documents_option
@options_of(TrainConfig, only=("min_count",))
@click.option(
    "--out",
    required=True,
    type=PATH,
    help="The file of the vocabulary to write: .model for sentencepiece, .json for the others.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@json_option
def vocab_command(
    kind: VocabChoice,
    size: int | None,
    text: tuple[Path, ...],
    mode: Documents,
    min_count: int,
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Learn a vocabulary of subwords or words.

    Of words, it is the most frequent ones of the texts. Subwords are learned by the library that will use
    them, `tokenizers` or SentencePiece, and the file is that library's own. Four tokens are special: <unk>
    for what is unknown, <s> for the beginning of a text, </s> for the end of a document, and <pad>. The same
    texts give the same file.
    """
    refuse_unwritable(out, option="--out", suffixes=(".model" if kind == "sentencepiece" else ".json",))
    refuse_replacing(out, option="--out", force=force)
    if kind != "word" and min_count > 1:
        raise UserError(f"--min-count is for vocabularies of words, and --kind is {kind}; leave it out.")
    if kind != "word" and size is None:
        raise UserError(
            f"a vocabulary of the kind {kind} needs its number of tokens; give --size, such as 8192."
        )
    with needs("train", "tqdm"):
        from trainer.data.own_text import learn_vocab

    vocab = learn_vocab(kind, text, out, size=size, mode=mode, min_count=min_count)
    special = vocab.special.to_json()
    named = ", ".join(f"{name.replace('_', ' ')} {token}" for name, token in special.items())
    lines = [f"{out} is ready: {kind}, {vocab.size:,} tokens; special tokens: {named}"]
    if kind != "word" and size is not None and vocab.size < size:
        lines.append(f"note: the text has {vocab.size:,} tokens, fewer than --size {size:,}")
    document = {"vocabulary": str(out), "kind": kind, "size": vocab.size, "special": special}
    show(document, lines, as_json=as_json)


def _files(
    train: tuple[Path, ...], valid: tuple[Path, ...], test: tuple[Path, ...], out: Path, force: bool
) -> OwnFiles:
    """The files of each part. Raises UserError if one is missing, before any work."""
    with needs("train", "tqdm"):
        from trainer.data.own import OwnFiles

    refuse_existing(out, DATASET, force=force, sources=[*train, *valid, *test])
    for option, paths in (("train", train), ("valid", valid), ("test", test)):
        for path in paths:
            if not path.exists():
                raise UserError(f"--{option} is {path}, which does not exist; give a file.")
    return OwnFiles(train=train, valid=valid, test=test)


def _conclude(out: Path, prepared: Prepared, as_json: bool) -> None:
    facts = prepared.facts
    counts = ", ".join(f"{split} {count:,}" for split, count in facts.tokens.items())
    lines = [
        f"{out} is ready: {facts.corpus}; tokens {counts}; vocabulary {facts.vocab_size:,}",
        *(f"note: {note}" for note in prepared.notes),
    ]
    document = {"dataset": str(out), "identity": facts.identity, **to_json(facts), "notes": prepared.notes}
    show(document, lines, as_json=as_json)
