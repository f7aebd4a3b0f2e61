"""`xl-export generate`: continues a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from runtimes.base.errors import UserError
from runtimes.base.files import refuse_unwritable
from runtimes.base.progress import working
from runtimes.base.records import json_text, to_json
from runtimes.cli.group import LongCommand
from runtimes.cli.lines import FORMATS, Format, read_prompts
from runtimes.cli.options import Number, device_option, folder_argument, options_of, threads_option
from runtimes.contract.device import Device
from runtimes.contract.sampling import MOST_TOP_K, SETTINGS, Sampler
from runtimes.contract.saved_streams import holds_streams, load_memory, save_memory
from runtimes.contract.vocabulary import Vocab, decode
from runtimes.sessions.open import open_session
from runtimes.tasks.beams import LENGTH_PENALTIES, Continuation, beam_search, best_of
from runtimes.tasks.generate import Piece, Prompt, encode_prompt, generate
from runtimes.tasks.text_rows import tokens_around

# An option that is not given is None. The --top-k of a command may be 0, for all tokens.
sampling_options = options_of(Sampler, defaults=False, top_k=click.IntRange(0, MOST_TOP_K))


@click.command(
    "generate",
    cls=LongCommand,
    sections={
        "Prompts": "--prompt --prompt-ids --prompts --format --bos",
        "Output": "--tokens --stop --ids --json",
        "Sampling, by default as the model recommends": " ".join(
            [*(each.option.name for each in SETTINGS.values()), "--seed"]
        ),
        "Search": "--best-of --beams --length-penalty",
        "Saved streams": "--save-memory --load-memory --adopt-streams",
    },
)
@folder_argument
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="The text to continue; give the option several times for a batch.",
)
@click.option(
    "--prompt-ids",
    multiple=True,
    metavar="IDS",
    help="The token ids to continue, such as 12,7,99; the option may be given several times.",
)
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    help="Continue each line of this file, or of standard input for -. A line is a text; in a file that "
    'begins with JSON it is a string, a list of ids, {"text": …} or {"ids": […]}.',
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Whether each line of --prompts is a text, or JSON. By default the first line that is not empty "
    "decides: an object, a list or a string in quotation marks is JSON.",
)
@click.option(
    "--bos",
    is_flag=True,
    help="Put the token that goes before a text before each prompt that is a text, as transformers does for "
    "many models.",
)
@click.option(
    "--tokens",
    "max_tokens",
    default=300,
    show_default=True,
    type=click.IntRange(min=1),
    help="The number of tokens to generate.",
)
@sampling_options
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="The seed of the random numbers; the same seed gives the same text.",
)
@click.option(
    "--stop",
    multiple=True,
    help="Stop before this text appears; for a model of ids it is one or several whole ids or names. The "
    "option may be given several times.",
)
@click.option(
    "--beams",
    type=click.IntRange(min=1),
    help="Number of beams of a search for the most probable continuation. Nothing is sampled.",
)
@click.option(
    "--length-penalty",
    default=1.0,
    show_default=True,
    type=Number(LENGTH_PENALTIES),
    help="With --beams: the power of the length that log-probabilities are divided by; 0 compares sums.",
)
@click.option(
    "--best-of",
    "samples",
    type=click.IntRange(min=1),
    help="Number of continuations to sample; the one with the highest mean log-probability is printed.",
)
@click.option(
    "--save-memory",
    "save_to",
    type=click.Path(path_type=Path),
    help="Write the memory of the streams to this file at the end. Other languages read it too.",
)
@click.option(
    "--load-memory",
    "load_from",
    type=click.Path(path_type=Path),
    help="Continue the streams whose memory is in this file, of this model in any precision.",
)
@click.option(
    "--adopt-streams",
    "adopt",
    is_flag=True,
    help="With --load-memory: also continue streams that other weights computed, such as those before the "
    "model was fine-tuned.",
)
@click.option("--ids", "show_ids", is_flag=True, help="Print token ids in place of text.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a JSON object on a line for each token as it comes, and one for each row when it has ended.",
)
@threads_option()
@device_option
def generate_command(
    path: Path,
    prompts: tuple[str, ...],
    prompt_ids: tuple[str, ...],
    prompts_file: Path | None,
    form: Format | None,
    bos: bool,
    max_tokens: int,
    seed: int,
    stop: tuple[str, ...],
    beams: int | None,
    length_penalty: float,
    samples: int | None,
    save_to: Path | None,
    load_from: Path | None,
    adopt: bool,
    show_ids: bool,
    as_json: bool,
    threads: int | None,
    device: Device,
    **sampling: Any,
) -> None:
    """Continue texts or token ids with the model at PATH.

    Each piece of text is printed as soon as it is computed; a batch is printed at the end. Every token costs
    the same, however long the text grows. A row ends early with the vocabulary's token for the end of a
    document, if it has one. A sampling setting that is not given is the model's own: `xl-export info` shows
    it, and `xl-export set` changes it.
    """
    searches = beams is not None or samples is not None
    if searches and (save_to or load_from):
        raise UserError(
            "--beams and --best-of do not keep a stream; leave out --save-memory and --load-memory."
        )
    if beams is not None and (samples is not None or stop):
        raise UserError("--beams takes neither --best-of nor --stop; leave them out, or leave out --beams.")
    if beams is not None and (unused := [name for name in ("seed", *SETTINGS) if _is_given(name)]):
        raise UserError(f"--beams draws nothing at random; leave out --{unused[0].replace('_', '-')}.")
    if beams is None and _is_given("length_penalty"):
        raise UserError("--length-penalty is for --beams; leave it out, or give --beams.")
    if adopt and not load_from:
        raise UserError("--adopt-streams is for --load-memory; leave it out, or give --load-memory.")
    if save_to:
        refuse_unwritable(save_to, option="--save-memory")
        if save_to.exists() and not holds_streams(save_to):
            raise UserError(
                f"{save_to} exists and is no file of saved streams, so it is not replaced; give another "
                "--save-memory, or delete it first."
            )
    if as_json and show_ids:
        raise UserError("--json has the ids of every token already; leave out --ids.")
    session = open_session(path, threads=threads, device=device)
    given = read_prompts(prompts, prompt_ids, prompts_file, form=form, vocab=session.vocab)
    if bos:
        before, _ = tokens_around(session.vocab, bos=True, eos=False)
        given = [
            [before, *session.vocab.encode(prompt).tolist()] if isinstance(prompt, str) else prompt
            for prompt in given
        ]
    sampler = session.sampler.replaced(**sampling)
    if searches:
        search = (
            partial(best_of, count=samples or 1, sampler=sampler, seed=seed, stop=stop)
            if beams is None
            else partial(beam_search, beams=beams, length_penalty=length_penalty)
        )
        with working("searching"):
            found = [search(session, prompt, max_tokens=max_tokens) for prompt in given]
        _print_found(found, given, session.vocab, as_json, show_ids)
        return
    memory = session.start(len(given)) if save_to else None
    if load_from:
        memory = load_memory(load_from, session, adopt=adopt)
    pieces = generate(
        session,
        given,
        max_tokens=max_tokens,
        sampler=sampler,
        seed=seed,
        stop=stop,
        memory=memory,
        text=not show_ids,
    )
    if as_json:
        _print_json(pieces, given, session.vocab)
    else:
        _print_texts(
            ((piece.row, f" {piece.token}" if show_ids else piece.text) for piece in pieces),
            [_shown(session.vocab, prompt, show_ids) for prompt in given],
        )
    if save_to and memory:
        save_memory(memory, save_to)


def _is_given(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _print_found(
    found: Sequence[Sequence[Continuation]],
    prompts: Sequence[Prompt],
    vocab: Vocab,
    as_json: bool,
    show_ids: bool,
) -> None:
    """Prints the best continuation of each prompt, or all as JSON, a line each; `rank` is 0 for the best."""
    if not as_json:
        pieces = (" ".join(["", *map(str, best.ids)]) if show_ids else best.text for best, *_ in found)
        _print_texts(enumerate(pieces), [_shown(vocab, prompt, show_ids) for prompt in prompts])
        return
    for row, (prompt, continuations) in enumerate(zip(prompts, found, strict=True)):
        for rank, each in enumerate(continuations):
            click.echo(json_text({"row": row, "rank": rank, **_given(vocab, prompt), **to_json(each)}))


def _print_texts(pieces: Iterable[tuple[int, str]], texts: list[str]) -> None:
    """Prints prompts with what follows them: one as it comes, several at the end."""
    if len(texts) == 1:
        click.echo(texts[0], nl=False)
        for _, added in pieces:
            click.echo(added, nl=False)
        click.echo()
        return
    parts = [[text] for text in texts]
    for row, added in pieces:
        parts[row].append(added)
    for row, text in enumerate(parts):
        click.echo(f"--- {row}\n{''.join(text)}")


def _print_json(pieces: Iterable[Piece], prompts: Sequence[Prompt], vocab: Vocab) -> None:
    """Prints each token as it comes, and each row when it has ended: its prompt, text, ids and why it
    ended.
    """
    texts: list[list[str]] = [[] for _ in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    for piece in pieces:
        texts[piece.row].append(piece.text)
        ids[piece.row].append(piece.token)
        click.echo(json_text({"row": piece.row, "token": piece.token, "text": piece.text}))
        if piece.ended is not None:
            finished = {
                "row": piece.row,
                **_given(vocab, prompts[piece.row]),
                "text": "".join(texts[piece.row]),
                "ids": ids[piece.row],
                "ended": piece.ended,
            }
            click.echo(json_text(finished))


def _given(vocab: Vocab, prompt: Prompt) -> dict[str, Any]:
    """A prompt for JSON."""
    ids = encode_prompt(vocab, prompt, what="the prompt")
    return {"prompt": prompt if isinstance(prompt, str) else None, "prompt_ids": ids.tolist()}


def _shown(vocab: Vocab, prompt: Prompt, as_ids: bool) -> str:
    """A prompt as text or ids. Each word of a vocabulary of words brings the blank before it."""
    if isinstance(prompt, str) and not as_ids:
        return prompt.rstrip(" ") if vocab.kind in ("word", "ids") else prompt
    ids = encode_prompt(vocab, prompt, what="the prompt")
    return " ".join(map(str, ids.tolist())) if as_ids else decode(vocab, ids)
