"""`python -m benchmarks CASE`: checks, measures, prints, and appends the result to the history. Cases live in their own files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.configs import checked_minutes, checked_repeats, checked_threads, load_config, parse_lengths
from runtimes.cli import Group, echo_json, json_option
from runtimes.errors import needs

if TYPE_CHECKING:
    from benchmarks.history import Result

OPTIONS = (
    click.option("--config", "config_name", default="small", show_default=True, help="Sizes: small, or enwik8-base (minutes)."),
    click.option("--threads", type=int, help="CPU threads of both sides; all that this process may use by default."),
    click.option("--repeats", type=int, help="Timed calls of each side; the configuration's own by default."),
    click.option("--history", type=click.Path(path_type=Path), help="Append here; benchmarks/history/CASE.jsonl by default."),
    json_option,
)


def case_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every case has."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure what this project claims: correctness first, then both sides in the same run."""


@main.command("sliding-window")
@case_options
@click.option("--attention-lengths", help="Such as 64,128,256; the configuration's own by default.")
@click.option("--plot", "plot_to", type=click.Path(path_type=Path), help="Draw the result into this PNG file.")
def sliding_window_command(
    config_name: str, threads: int | None, repeats: int | None, history: Path | None, as_json: bool,
    attention_lengths: str | None, plot_to: Path | None,
) -> None:  # fmt: skip
    """Segments with memory against recomputing a window for every token."""
    config, threads = load_config(config_name), checked_threads(threads)
    repeats = checked_repeats(repeats, config.repeats)
    lengths = config.attention_lengths if attention_lengths is None else parse_lengths(attention_lengths)
    with needs("cpu,export", "onnxruntime", "onnx_ir", "torch", "safetensors", "tqdm"):
        from benchmarks import sliding_window
        from benchmarks.history import begin
        from benchmarks.plot import check_plot, plot
    if plot_to:
        check_plot(plot_to)
    result = begin("sliding-window", config, threads=threads, file=history)
    rows = sliding_window.run(config, attention_lengths=lengths, threads=threads, repeats=repeats, progress=_progress)
    result = result.remeasured()
    _report(result, sliding_window.table(rows, result.limits), rows, as_json)
    if plot_to:
        plot(plot_to, rows, title=result.title)
        click.echo(f"drawn to {plot_to}", err=True)


@main.command("memory-forms")
@case_options
@click.option("--mem-len", type=int, help="Tokens remembered (M); the configuration's own by default.")
def memory_forms_command(
    config_name: str, threads: int | None, repeats: int | None, history: Path | None, as_json: bool, mem_len: int | None
) -> None:
    """One token with full memory in the forms ring, shift and hidden."""
    config, threads = load_config(config_name), checked_threads(threads)
    repeats = checked_repeats(repeats, config.token_repeats)
    claim = config.ring_claim if mem_len in (None, config.mem_len) else None
    with needs("cpu,export", "onnxruntime", "onnx_ir", "torch", "safetensors", "tqdm"):
        from benchmarks import memory_forms
        from benchmarks.history import begin
    result = begin("memory-forms", config, threads=threads, file=history)
    rows = memory_forms.run(config, mem_len=mem_len, threads=threads, repeats=repeats, progress=_progress)
    result = result.remeasured()
    _report(result, memory_forms.table(rows, result.limits, ring_claim=claim), rows, as_json)


@main.command("architectures")
@click.option("--minutes", default=3.0, show_default=True, help="CPU minutes of all threads together that each model trains for.")
@click.option("--out", type=click.Path(path_type=Path), default="architectures", show_default=True, help="The runs' folder.")
@click.option("--only", multiple=True, help="One of the models, by its name in the table; several may be given.")
@click.option("--threads", type=int, help="CPU threads; all that this process may use by default.")
@click.option(
    "--history", type=click.Path(path_type=Path), help="Append here; benchmarks/history/architectures.jsonl by default."
)
@json_option
def architectures_command(
    minutes: float, out: Path, only: tuple[str, ...], threads: int | None, history: Path | None, as_json: bool
) -> None:
    """Six small models, each trained for the same CPU time: bits per character with and without what the papers add."""
    threads, minutes = checked_threads(threads), checked_minutes(minutes)
    with needs("cpu,train", "onnxruntime", "torch", "safetensors", "tqdm"):
        from benchmarks import architectures
        from benchmarks.history import begin
    architectures.chosen(only)
    result = begin("architectures", architectures.described(), threads=threads, file=history, engine="torch")
    rows = architectures.run(out, minutes=minutes, threads=threads, names=only, progress=_progress)
    _report(result, architectures.table(rows), rows, as_json)


@main.command("kernel")
@click.option("--history", type=click.Path(path_type=Path), help="Append here; benchmarks/history/kernel.jsonl by default.")
@json_option
def kernel_command(history: Path | None, as_json: bool) -> None:
    """Our attention kernel against PyTorch's forms of the same attention, on this machine's GPU."""
    with needs("export,tensorrt", "torch", "triton"):
        from benchmarks import kernel
        from benchmarks.history import HISTORY, append
    kernel.refuse_without_gpu()
    file = history or HISTORY / "kernel.jsonl"
    rows = kernel.run(progress=_progress)
    for line in kernel.table(rows):
        click.echo(line)
    document = kernel.document(rows)
    append(file, document)
    click.echo(f"appended to {file}")
    echo_json(document, as_json)


def _report(result: Result, lines: list[str], rows: Sequence[Any], as_json: bool) -> None:
    """Prints a result, and appends it to its history."""
    for line in (result.title, *result.machine_lines, "", *lines, ""):
        click.echo(line)
    document = result.finish([row.to_json() for row in rows])
    click.echo(f"appended to {result.file}")
    echo_json(document, as_json)


def _progress(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
