"""The commands of the edge: check, generate, info; eval is in `cli_eval.py`. No PyTorch; `xl_export.cli` adds the others."""

from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

import click

from runtimes import fused
from runtimes.describe import describe, describe_lines
from runtimes.errors import UserError
from runtimes.generation import generate
from runtimes.memory import load_memory, save_memory
from runtimes.reference import check
from runtimes.sampling import Sampler
from runtimes.session import open_session


class Refusal(click.ClickException):
    """One sentence on standard error, exit code 2."""

    exit_code = 2


class Group(click.Group):
    """Prints what a user can mend as one sentence; a traceback is a bug of ours.

    Exit codes: 2 for what cannot be used, 130 when interrupted, 143 when terminated; both clean up what was half made.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that temporary folders are removed
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # from printing a help text
            print(f"Error: standard output cannot be written ({error.strerror}); give another place.", file=sys.stderr)
            sys.exit(2)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise Refusal(str(error)) from error
        except MemoryError as error:
            raise Refusal("this machine has too little memory for that; use a smaller batch, segment or model.") from error
        except UnicodeEncodeError as error:
            raise Refusal(
                f"standard output is {error.encoding} and cannot show {error.object[error.start]!r}; set PYTHONIOENCODING=utf-8."
            ) from error
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            raise SystemExit(130) from None
        except BrokenPipeError:  # the reader has had enough, as `head` does
            raise
        except OSError as error:
            what = error.filename or "standard output"
            raise Refusal(f"{what} cannot be used ({error.strerror or error}); give another place.") from error


KERNELS = {"standard": "standard operators", "fused": "fused"}  # of ONNX Runtime, as people are told
folder_argument = click.argument("path", type=click.Path(path_type=Path))
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads; all that this process may use by default."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Last line of standard output: one JSON document.")


@click.command("check")
@folder_argument
@threads_option
@json_option
def check_command(path: Path, threads: int | None, as_json: bool) -> None:
    """Prove that the artefact at PATH computes what was trained.

    Replays the tokens in its reference.npz and compares every log-probability with the answers that PyTorch
    gave at export, or the machine that exported where weights are int8 or int4. Exit code 0 when all are within
    the tolerance of its precision, 1 when not, 2 when the artefact is damaged.
    """
    report = check(path, threads=threads)
    verdict = "passed" if report.passed else "FAILED"
    click.echo(f"{verdict}: {report.sentence}")
    if report.kernel:
        click.echo(f"kernel: {KERNELS[report.kernel]}")
    if report.note:
        click.echo(f"note: {report.note}")
    echo_json(report.to_json(), as_json)
    if not report.passed:
        raise SystemExit(1)


@click.command("generate")
@folder_argument
@click.option("--prompt", "prompts", multiple=True, required=True, help="Text to continue; several make a batch.")
@click.option("--tokens", "max_tokens", default=300, show_default=True, type=click.IntRange(min=1), help="Tokens to generate.")
@click.option("--temperature", default=1.0, show_default=True, help="Below 1 sharper, above 1 flatter, 0 greedy.")
@click.option("--top-k", default=40, show_default=True, type=click.IntRange(min=0), help="Draw from the k likeliest; 0 for all.")
@click.option("--top-p", default=1.0, show_default=True, help="Draw from the likeliest tokens that hold this share.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Same seed, same text.")
@click.option("--stop", multiple=True, help="End where this text would appear.")
@click.option("--save-memory", "save_to", type=click.Path(path_type=Path), help="Keep the streams in this file at the end.")
@click.option("--load-memory", "load_from", type=click.Path(path_type=Path), help="Continue the streams of this file.")
@threads_option
def generate_command(
    path: Path,
    prompts: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: tuple[str, ...],
    save_to: Path | None,
    load_from: Path | None,
    threads: int | None,
) -> None:
    """Continue a text with the artefact or run at PATH.

    The text streams to standard output as it comes. Every token costs the same, however long the text grows. The
    default sampling is the paper's, top-k 40.
    """
    if save_to and (save_to.is_dir() or not save_to.parent.is_dir()):
        raise UserError(f"{save_to} cannot be a file to save memory in; give a file name in a folder that exists.")
    sampler = Sampler(temperature=temperature, top_k=top_k or None, top_p=top_p)
    session = open_session(path, threads=threads)
    memory = load_memory(load_from, session) if load_from else session.start(len(prompts)) if save_to else None
    pieces = generate(session, prompts, max_tokens=max_tokens, sampler=sampler, seed=seed, stop=stop, memory=memory)
    shown = [prompt.rstrip(" ") if session.vocab.kind == "word" else prompt for prompt in prompts]  # words bring their blank
    if len(shown) == 1:
        click.echo(shown[0], nl=False)
        for piece in pieces:
            click.echo(piece.text, nl=False)
        click.echo()
    else:
        texts = shown
        for piece in pieces:
            texts[piece.row] += piece.text
        for row, text in enumerate(texts):
            click.echo(f"--- {row}\n{text}")
    if save_to and memory:
        save_memory(memory, save_to)


@click.command("info")
@folder_argument
@json_option
def info_command(path: Path, as_json: bool) -> None:
    """Print what the artefact or run at PATH is.

    Model and parameters, memory form and bytes per stream, mask rule, precision, kernel, hashes, and every tensor
    of the graph with its shape.
    """
    facts = describe(path)
    for line in describe_lines(facts):
        click.echo(line)
    echo_json(facts, as_json)


def echo_json(document: dict[str, Any], wanted: bool) -> None:
    """The document on one last line; a figure that is not finite becomes null."""
    if wanted:
        click.echo(json.dumps(_finite(document), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@click.command("kernel")
def kernel_command() -> None:
    """Build the fused attention operator for this processor.

    That takes GCC (g++, or what $CXX names). Built once, it is used by every command, for every artefact that has a graph
    for it; `info` says which have. Its file is in the user's cache; without it the standard operators compute the same.
    """
    there = fused.built() is not None
    click.echo(f"the fused kernel {'was there already' if there else 'is built'}: {fused.build()}")


COMMANDS: tuple[click.Command, ...] = (check_command, generate_command, info_command, kernel_command)
