"""`xl-export score`: the log-probability of each of many texts, and the best of each n-best list."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from runtimes.base.progress import Progress
from runtimes.base.records import json_text
from runtimes.base.text import byte_lines
from runtimes.cli.lines import FORMATS, Format, opened, read_texts
from runtimes.cli.options import Number, device_option, folder_argument, threads_option
from runtimes.contract.device import Device
from runtimes.contract.vocabulary import Vocab, token_texts
from runtimes.sessions.open import open_session
from runtimes.tasks.n_best import WEIGHTS, BestText, best_of_groups
from runtimes.tasks.score_texts import WINDOW_TOKENS, TextScore, score_texts

ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


@click.command("score")
@folder_argument
@click.option(
    "--input",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    help="The file of texts, such as lines.txt, or - for standard input.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Whether each line is a text, or JSON. By default the first line that is not empty decides: an "
    "object, a list or a string in quotation marks is JSON.",
)
@click.option("--bos", is_flag=True, help="Predict the first token too, from the token before a text.")
@click.option(
    "--eos", is_flag=True, help="Predict the token that ends a text after it. It has no characters."
)
@click.option("--tokens", "each", is_flag=True, help="Print the log-probability of each token too.")
@click.option(
    "--weight",
    type=Number(WEIGHTS),
    help="Print the text of each group with the largest score + WEIGHT * log-probability. Each line of JSON "
    "then has group and score, and --bos or a context is needed.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, 1 << 12),
    help="The most texts that are computed side by side; by default chosen from memory and speed.",
)
@click.option(
    "--window",
    default=WINDOW_TOKENS,
    show_default=True,
    type=click.IntRange(min=1),
    help="The number of tokens that are read ahead and sorted by length; 1 answers every line at once.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each result as a line of JSON.")
@threads_option()
@device_option
def score_command(
    path: Path,
    source: Path,
    form: Format | None,
    bos: bool,
    eos: bool,
    each: bool,
    weight: float | None,
    batch: int | None,
    window: int,
    as_json: bool,
    threads: int | None,
    device: Device,
) -> None:
    """Score independent texts with the artefact or run at PATH.

    The input has one text a line, or a line of JSON for each: an object with text or ids and, if wanted,
    id, context, group and score; or a string; or a list of token ids. Each text starts with empty memory, or
    after its context.

    A line of output has the log-probability in nats, the number of tokens predicted, the number of unknown
    words, and the text. With --weight it has group, total, log-probability, tokens, unknown words and text of
    the best text of a group. Results come in the order of the input while it is read. Totals are printed on
    standard error.
    """
    session = open_session(path, threads=threads, device=device)
    totals = Totals(session.vocab)
    began = time.perf_counter()
    with ExitStack() as resources:
        stream, name = resources.enter_context(opened(source))
        size = source.stat().st_size if name and not sys.stdout.isatty() else 0  # results are progress too
        shown = resources.enter_context(Progress("scoring", size, "bytes"))
        scores = score_texts(
            session,
            read_texts(byte_lines(stream, name), form=form, name=name),
            bos=bos,
            eos=eos,
            tokens=each,
            batch=batch,
            window=window,
            progress=lambda _: shown(stream.tell()) if size else None,
        )
        counted = map(totals.count, scores)
        results = counted if weight is None else best_of_groups(counted, weight=weight)
        for result in results:
            click.echo(line_of(result, session.vocab, each=each, as_json=as_json))
    click.echo("\n".join(totals.lines(time.perf_counter() - began)), err=True)


class Totals:
    """What was scored so far.

    vocab: None if totals of others are added, which know whether unknown words are counted.
    text_log_prob: of the texts whose size is known; the size of a text given as ids is not.
    """

    def __init__(self, vocab: Vocab | None) -> None:
        self.counts_unknown = vocab is not None and vocab.special.unknown is not None
        self.texts = self.tokens = self.unknown = self.characters = self.num_bytes = 0
        self.log_prob = self.text_log_prob = 0.0

    def count(self, score: TextScore) -> TextScore:
        self.texts += 1
        self.tokens += score.tokens
        self.unknown += score.unknown
        self.log_prob += score.log_prob
        if score.characters is not None and score.num_bytes is not None:
            self.characters += score.characters
            self.num_bytes += score.num_bytes
            self.text_log_prob += score.log_prob
        return score

    def to_json(self) -> dict[str, Any]:
        """The totals, for `add`."""
        return dict(vars(self))

    def add(self, totals: dict[str, Any]) -> None:
        """Adds other totals."""
        for name, own in vars(self).items():
            other = totals[name]
            setattr(self, name, own or other if name == "counts_unknown" else own + other)

    def lines(self, seconds: float) -> Iterator[str]:
        unknown = f", {self.unknown:,} unknown words" if self.counts_unknown else ""
        yield (
            f"{self.texts:,} texts, {self.tokens:,} tokens{unknown} in {seconds:.2f} "
            f"s: {self.tokens / seconds:,.0f} tokens/s"
        )
        if self.tokens == 0:
            return
        scores = [f"log-probability {self.log_prob:.4f}", f"perplexity {self._perplexity():,.3f}"]
        if self.characters > 0 and self.num_bytes > 0:
            bits = -self.text_log_prob / math.log(2)
            scores.append(f"{bits / self.characters:.4f} bits per character")
            scores.append(f"{bits / self.num_bytes:.4f} bits per byte")
        yield ", ".join(scores)

    def _perplexity(self) -> float:
        try:
            return math.exp(-self.log_prob / self.tokens)
        except OverflowError:
            return math.inf


def line_of(result: TextScore | BestText, vocab: Vocab, *, each: bool, as_json: bool) -> str:
    """The lines of output for one result; there are several where tokens are printed and it is no JSON."""
    score, group = (result.best, result) if isinstance(result, BestText) else (result, None)
    tokens = _tokens(score, vocab) if each else None
    if as_json:
        # An id from Parquet may be a date or a decimal number; it becomes a text.
        return json_text(_document(score, group, tokens), ensure_ascii=False, default=str)
    text = score.source.text
    shown = text.translate(ESCAPES) if isinstance(text, str) else " ".join(map(str, text))
    columns = [f"{score.log_prob:.4f}", str(score.tokens), str(score.unknown), shown]
    if group:
        name = group.group if isinstance(group.group, str) else json_text(group.group, ensure_ascii=False)
        columns = [name.translate(ESCAPES), f"{group.total:.4f}", *columns]
    lines = ["\t".join(columns)]
    lines += [f"\t{token['log_prob']:.4f}\t{token['text'].translate(ESCAPES)}" for token in tokens or ()]
    return "\n".join(lines)


def _document(
    score: TextScore, group: BestText | None, tokens: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """One result for JSON. group: the n-best list that the text is the best of."""
    source = score.source
    document = {"id": score.id}
    if source.group is not None:
        document["group"] = source.group
    if group:
        document |= {"total": group.total, "score": source.score, "texts": group.texts}
    return {
        **document,
        "log_prob": score.log_prob,
        "tokens": score.tokens,
        "unknown": score.unknown,
        "characters": score.characters,
        "bytes": score.num_bytes,
        **({"text": source.text} if isinstance(source.text, str) else {"ids": list(source.text)}),
        **({} if tokens is None else {"token_log_probs": tokens}),
    }


def _tokens(score: TextScore, vocab: Vocab) -> list[dict[str, Any]]:
    """Id, text and log-probability of each token that was predicted."""
    assert score.token_log_probs is not None, "the scores were asked for with tokens"
    ids = score.token_ids.tolist()
    log_probs = score.token_log_probs.tolist()
    return [
        {"id": token, "text": text, "log_prob": log_prob}
        for token, text, log_prob in zip(ids, token_texts(vocab, ids), log_probs, strict=True)
    ]
