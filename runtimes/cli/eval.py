"""`xl-export eval`: the loss of a model on a text, for one setting or for each setting of a sweep."""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np

from runtimes.base.errors import UserError, fields_as_options
from runtimes.base.files import atomic_file, refuse_replacing, refuse_unwritable
from runtimes.base.logits import IMPOSSIBLE
from runtimes.base.progress import Progress
from runtimes.base.ranges import counted
from runtimes.base.records import json_text
from runtimes.cli.options import (
    device_option,
    folder_argument,
    json_option,
    show,
    text_as_progress,
    threads_option,
)
from runtimes.contract.device import Device
from runtimes.contract.id_files import ID_TYPES
from runtimes.contract.session import Session
from runtimes.contract.tokens import ReadText, TextSize, predicted_size, read_text, unknown_share
from runtimes.contract.vocabulary import Vocab, token_texts
from runtimes.sessions.open import open_session
from runtimes.tasks.evaluate import Score, evaluate
from runtimes.tasks.sweep import parse_values, refuse_if_too_large, sweep

text_option = click.option(
    "--text",
    required=True,
    type=click.Path(path_type=Path),
    help="The text to score: a text file such as RUN/test.txt, - for standard input, a file of token ids "
    "(see --ids), or a prepared dataset, of which the test part is scored.",
)
ids_option = click.option(
    "--ids",
    is_flag=True,
    help="The file of --text holds token ids of this model: a .npy file, a raw .bin file, a .jsonl file with "
    "a list of ids on each line, or a .txt file of numbers.",
)
dtype_option = click.option(
    "--dtype", type=click.Choice(ID_TYPES), help="The type of the ids in a .bin file, little-endian."
)


@click.command("eval")
@folder_argument
@text_option
@ids_option
@dtype_option
@click.option(
    "--lanes",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="The number of parts that the text is cut into; they are scored side by side.",
)
@click.option(
    "--mem-len",
    metavar="N,N,…",
    help="How many tokens the memory of a run holds; by default as in its configuration.",
)
@click.option(
    "--segment",
    metavar="N,N,…",
    help="The number of tokens per step; by default the largest that the model takes.",
)
@click.option(
    "--clamp-len",
    metavar="N,N,…",
    help="The distance from which on all positions of a run count as equal; 0 means no clamp.",
)
@click.option(
    "--no-memory",
    is_flag=True,
    help="Start every segment with empty memory; the difference shows what memory is worth.",
)
@click.option(
    "--losses",
    type=click.Path(path_type=Path),
    help="Write the loss of each token to this .npz or .csv file.",
)
@click.option("--force", is_flag=True, help="Replace the file of --losses if it exists.")
@threads_option()
@device_option
@json_option
def eval_command(**options: Any) -> None:
    """Score a text with the artefact or run at PATH.

    The text is read segment by segment, and the memory is carried from one segment to the next. Every token
    but the first is predicted exactly once. Papers on enwik8 call the bits per byte, which are printed for a
    model of bytes, bits per character.

    The options --mem-len, --segment and --clamp-len take several values: 64,128,256, or 100:1000:100 for
    first, last and step. Then every combination is scored. The memory and the clamp of an artefact are fixed
    when it is exported.
    """
    score_text(**options)


@fields_as_options("lanes", "segment")
def score_text(
    *,
    path: Path,
    text: Path,
    ids: bool,
    dtype: str | None,
    lanes: int,
    mem_len: str | None,
    segment: str | None,
    clamp_len: str | None,
    no_memory: bool,
    losses: Path | None,
    force: bool,
    threads: int | None,
    device: Device,
    as_json: bool,
    measure: Callable[..., Score] = evaluate,
) -> None:
    """Does what the command does. measure: called as `evaluate`, for each setting."""
    mem_lens = parse_values(mem_len, "--mem-len") if mem_len else None
    segments = parse_values(segment, "--segment", least=1) if segment else None
    clamp_lens = parse_values(clamp_len, "--clamp-len") if clamp_len else None
    if losses:
        refuse_unwritable(losses, option="--losses", suffixes=(".npz", ".csv"))
        refuse_replacing(losses, option="--losses", force=force)
    own = open_session(path, threads=threads, device=device)
    if losses and losses.suffix == ".csv":
        own.vocab.decoder()(0)  # a library that is not installed is named before the text is scored
    pairs = sweep(own.rule, mem_lens=mem_lens, segments=segments, clamp_lens=clamp_lens)
    if losses and len(pairs) > 1:
        raise UserError(
            f"--losses writes the tokens of one setting and these options make {len(pairs)}; "
            "give one value of each."
        )
    settings = [(own.with_rule(rule), tokens_per_step) for rule, tokens_per_step in pairs]
    read = read_text(text, own.vocab, ids=ids, dtype=dtype)
    tokens = read.tokens
    for session, tokens_per_step in settings:
        refuse_if_too_large(session, rows=lanes, segment=min(tokens_per_step, -(-len(tokens) // lanes)))
    measure = functools.partial(measure, tokens=tokens, lanes=lanes, carry_memory=not no_memory)

    def scored(session: Session, tokens_per_step: int) -> Score:
        what = f"scoring with memory {session.rule.mem_len} in segments of {tokens_per_step}"
        with Progress(what, len(tokens) - 1, "tokens") as progress:
            return measure(session, segment=tokens_per_step, progress=progress)

    scores = itertools.starmap(scored, settings)
    if len(settings) > 1:
        with text_as_progress(as_json):
            document, lines = _sweep(scores, own.vocab, predicted_size(read, own.vocab))
    else:
        score = next(scores)
        if losses:
            write_losses(losses, score, tokens, own.vocab)
        document, lines = _result(score, own.vocab, read)
    document |= {"computed_by": own.computed_by, "kernel": own.kernel}
    show(document, [*lines, _line("computed by", own.computed_by)], as_json=as_json)


def write_losses(path: Path, score: Score, tokens: np.ndarray, vocab: Vocab) -> None:
    """Writes the loss of every token of `tokens` [N] after the first, with the settings, atomically.

    `.npz` holds nats float32 [N - 1], tokens int64 [N - 1] and settings, a JSON text. `.csv` has a first line
    of `# ` and the settings as JSON. Its columns are position (of the token in the text), token (its id),
    text (what the token adds to the decoded text) and nats. The text is a JSON string, so that no symbol can
    break a line, a cell or a spreadsheet.
    """
    settings = json_text(score.to_json())
    if path.suffix == ".npz":
        nats = score.token_nats.astype(np.float32)
        targets = np.asarray(tokens[1:], np.int64)
        with atomic_file(path) as temporary, open(temporary, "wb") as binary:
            np.savez(binary, nats=nats, tokens=targets, settings=np.array(settings))
        return
    texts = token_texts(vocab, tokens)
    # UTF-8 cannot hold half a surrogate pair; it becomes the escape that JSON has for it.
    with (
        atomic_file(path) as temporary,
        open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="") as stream,
    ):
        stream.write(f"# {settings}\n")
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(("position", "token", "text", "nats"))
        for position, nats in enumerate(score.token_nats, start=1):
            text = json_text(texts[position], ensure_ascii=False)
            rows.writerow((position, int(tokens[position]), text, f"{nats:.6f}"))


def _result(score: Score, vocab: Vocab, text: ReadText) -> tuple[dict[str, Any], list[str]]:
    """One score as JSON and as text."""
    document = score.to_json()
    lines = []
    unit = _unit(vocab)
    bits = f"{score.bits_per_token:.4f}"
    nats = f"{score.nats_per_token:.4f} nats"
    if vocab.kind in ("byte", "char"):
        lines.append(_line(unit, f"{bits}  ({nats}, perplexity {score.perplexity:.3f})"))
    else:
        lines.append(_line("perplexity", f"{score.perplexity:.3f}  ({nats}, {bits} {unit})"))
    per_text = _per_text(score, predicted_size(text, vocab))
    document |= per_text
    if per_text and vocab.kind != "char" and not per_text["characters"] == per_text["bytes"] == score.tokens:
        per_character = per_text["bits_per_character"]
        per_byte = per_text["bits_per_byte"]
        value = f"{per_character:.4f} bits, and {per_byte:.4f} bits per byte of UTF-8"
        lines.append(_line("per character", value))
    unknown = unknown_share(vocab, text.tokens[1:])
    if unknown is not None:
        document["unknown_share"] = unknown
        lines.append(_line("unknown words", f"{unknown:.2%} of the tokens scored"))
    if score.impossible:
        counted = f"{score.impossible:,} of the tokens, each counted as {-IMPOSSIBLE:,.0f} nats"
        lines.append(_line("impossible", counted))
    speed = f"{score.tokens:,} tokens in {score.seconds:.2f} s: {score.tokens_per_second:,.0f} tokens/s"
    rule = f"memory {score.rule.mem_len}, segment {score.segment}, {_feeding(score)}"
    return document, [*lines, _line("speed", speed), _line("settings", rule)]


def _per_text(score: Score, size: TextSize | None) -> dict[str, Any]:
    """Scores with which models of different vocabularies can be compared."""
    if size is None or size.characters < 1:
        return {}
    bits = score.nats / math.log(2)
    return {
        "characters": size.characters,
        "bytes": size.num_bytes,
        "bits_per_character": bits / size.characters,
        "bits_per_byte": bits / size.num_bytes,
    }


def _sweep(scores: Iterable[Score], vocab: Vocab, size: TextSize | None) -> tuple[dict[str, Any], list[str]]:
    """Prints a row for each score when it is computed; returns all of them, and the first of the best."""
    click.echo(
        f"{'mem_len':>9}{'segment':>9}{'clamp_len':>11}{_unit(vocab):>20}{'perplexity':>14}{'tokens/s':>12}"
    )
    done = []
    for score in scores:
        done.append(score)
        click.echo(
            f"{score.rule.mem_len:>9}{score.segment:>9}{score.rule.clamp_len or 'none':>11}"
            f"{score.bits_per_token:>20.4f}{score.perplexity:>14,.3f}{score.tokens_per_second:>12,.0f}"
        )
    best = min(range(len(done)), key=lambda index: done[index].nats)
    rule = done[best].rule
    setting = f"mem_len {rule.mem_len}, segment {done[best].segment}, clamp_len {rule.clamp_len or 'none'}"
    document = {"rows": [score.to_json() | _per_text(score, size) for score in done], "best": best}
    return document, [_line("best", setting), _line("settings", _feeding(done[best]))]


def _unit(vocab: Vocab) -> str:
    return {"byte": "bits per byte", "char": "bits per character"}.get(vocab.kind, "bits per token")


def _feeding(score: Score) -> str:
    """What of the settings is not the default of most models."""
    mask = [] if score.rule.cuts_change_nothing else [f"{score.rule.mask} mask"]
    memory = [] if score.memory_carried else ["empty memory in every segment"]
    return ", ".join([counted(score.lanes, "lane"), *mask, *memory])


def _line(label: str, value: str) -> str:
    return f"{label:<20}{value}"
