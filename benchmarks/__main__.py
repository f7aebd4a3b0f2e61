"""`python -m benchmarks`: lists, measures and compares cases, and writes the tables of the documents."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from benchmarks import history as results
from benchmarks.cases import CASES, DRAWN, load_case
from benchmarks.compare import compare, find_results, lines
from benchmarks.gpu.report import gpu_report_command
from benchmarks.harness import Document, cells, measure_case, option
from benchmarks.machine import BUSY_SHARE, history_file
from benchmarks.plots import check_plot, draw
from runtimes.base.files import refuse_replacing, refuse_unwritable, writing
from runtimes.base.machine import available_cpus
from runtimes.base.progress import working
from runtimes.cli.group import Group, Subgroup
from runtimes.cli.options import json_option, name_of, options_of, show
from runtimes.contract.rule import MemoryRule

ROOT = Path(__file__).parent.parent
PATH = click.Path(path_type=Path)
PICTURES = {  # in docs/images
    "growing-cache": {"config": ["tales"], "busy": ["yes"]},
    "sliding-window": {"config": ["enwik8-base"], "operators": ["fused"]},
}
HISTORY = (
    "Default: benchmarks/history.jsonl in a checkout of this project, and ./benchmark-history.jsonl "
    "elsewhere."
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure what this project claims.

    Each case first checks that every side computes the right answers, and then measures all sides in the same
    run.
    """


@main.command("list")
def list_command() -> None:
    """List the cases, one line each; those with --plot can draw their result."""
    for name, summary in CASES.items():
        click.echo(f"{name:<16}{summary}{' (--plot)' if name in DRAWN else ''}")


class CaseCommands(Mapping[str, click.Command]):
    """A command for each case, which is made when it is needed."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in CASES:
            raise KeyError(name)
        return command_of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(CASES)

    def __len__(self) -> int:
        return len(CASES)


class RunGroup(Subgroup):
    """Its help names the cases without importing them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Cases"):
            formatter.write_dl(list(CASES.items()))


RUN_HELP = "Check and then measure CASE, print its table, and append the result to the history."
run_group = RunGroup("run", help=RUN_HELP, subcommand_metavar="CASE [OPTIONS]")
run_group.commands = CaseCommands()  # type: ignore[assignment]
main.add_command(run_group)


def command_of(name: str) -> click.Command:
    """The command that measures a case, with its own options first."""
    options = [
        *getattr(load_case(name), "OPTIONS", ()),
        option(
            "--config",
            "The model: small, demo, tales, enwik8-base (some minutes), wt103-base, mamba-130m or "
            "enwik8-large with random weights; the folder of a run; or a JSON file, which is a run's "
            "config.json or has the fields of a ModelConfig. --mem-len and --segment replace what it says.",
            default="small",
            show_default=True,
        ),
        option("--repeats", "Timed calls of each side.", type=click.IntRange(1, 1 << 17)),
        option(
            "--threads",
            "CPU threads of every side; by default all that this process may use.",
            type=click.IntRange(1, available_cpus()),
        ),
        option("--history", f"The file that the result is appended to. {HISTORY}", type=PATH),
    ]
    if name in DRAWN:
        options.append(option("--plot", "Also draw the result to this PNG or SVG file.", type=PATH))
        options.append(option("--force", "Replace the file of --plot if it exists.", is_flag=True))
    text = CASES[name]
    run = partial(run_case, name)
    command = click.Command(name, params=options, callback=run, help=f"{text[0].upper()}{text[1:]}.")
    return json_option(options_of(MemoryRule, defaults=False, only=("mem_len", "segment"))(command))


def run_case(
    name: str,
    *,
    config: str,
    mem_len: int | None,
    segment: int | None,
    threads: int | None,
    history: Path | None,
    as_json: bool,
    plot: Path | None = None,
    force: bool = False,
    **given: Any,
) -> None:
    """Measures one case; the result is printed, drawn, and appended to the history."""
    with working("loading PyTorch", log=False):
        from benchmarks.configs import find_config  # imports the trainer

        case = load_case(name)
    if plot:
        check_plot(plot)
        refuse_replacing(plot, option="--plot", force=force)
    if hasattr(case, "unavailable") and (reason := case.unavailable()):
        click.echo(f"{name} is skipped: {reason}")
        return
    size = find_config(config)
    mem_len = size.mem_len if mem_len is None else mem_len
    size = replace(size, mem_len=mem_len, segment=segment or size.segment)
    file = history or history_file()
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    refuse_unwritable(file, option="--history")
    document = measure_case(
        name,
        case,
        size,
        threads=threads,
        options={key: value for key, value in given.items() if value not in (None, (), [])},
        command=_command(),
        say=lambda line: click.echo(line, err=True),
        keep=lambda result: results.append(file, result),
    )
    show(document, list(report(case, document)), as_json=as_json)
    click.echo(f"appended to {file}", err=as_json)
    if plot:
        draw(plot, case, document)
        click.echo(f"drawn to {plot}", err=True)


def _command() -> str:
    """The command that measures this again, without the files that it writes and without folders."""
    context = click.get_current_context()
    words = ["python -m benchmarks run", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        is_given = context.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if is_given and name not in ("history", "plot", "force", "as_json"):
            value = context.params[name]
            if name == "lengths":
                value = ",".join(map(str, value))
            for each in value if isinstance(value, (list, tuple)) else [value]:
                words += [name_of(parameter), Path(str(each)).name]
    return " ".join(words)


def report(case: Any, document: Document) -> Iterator[str]:
    """The result as text: the model, the machine and its limits, and the table."""
    m, machine, limits = document["model"], document["machine"], document["limits"]
    yield (
        f"{document['case']}, {document['config']}: {m['layers']} layers, D {m['d_model']}, H {m['heads']}, "
        f"K {m['head_dim']}, FF {m['d_ff']}, segment {document['segment']}"
    )
    if machine["busy_cpus"] > BUSY_SHARE * machine["cpus"]:
        yield "note: other processes used the CPUs; do not publish the numbers of this run"
    yield f"machine: {results.machine(document)}; all times are medians"
    yield (
        f"limits of the machine: reading memory {limits['read_bytes'] / 1e9:.0f} GB/s, fp32 products "
        f"{limits['multiply_adds'] / 1e9:.0f} G multiply-adds/s"
    )
    titles, body = cells(case.COLUMNS, [(row, document) for row in document["rows"]])
    widths = [max(map(len, column)) for column in zip(titles, *body, strict=True)]
    yield ""
    for row in (titles, *body):
        yield "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
    if hasattr(case, "NOTE"):
        yield case.NOTE


@main.command("compare")
@click.argument("before")
@click.argument("after")
@click.option("--history", type=PATH, help=f"The file with the results. {HISTORY}")
@json_option
def compare_command(before: str, after: str, history: Path | None, as_json: bool) -> None:
    """Compare the medians of the same rows in BEFORE and AFTER.

    Each of the two is a .jsonl file, or the beginning of a commit or of a date.
    """
    file = history or history_file()
    found = compare(find_results(before, file), find_results(after, file))
    show(found, list(lines(found)), as_json=as_json)


@main.command("tables")
@click.option(
    "--check", "only_check", is_flag=True, help="Change nothing; exit with 1 if a document differs."
)
@click.option("--pictures", is_flag=True, help="Draw the pictures in docs/images/ too.")
def tables_command(only_check: bool, pictures: bool) -> None:
    """Write the tables and inline numbers of README.md and docs/ from the history."""
    from benchmarks import tables

    history = results.read_results(ROOT / "benchmarks" / "history.jsonl")
    if pictures:
        for name, filters in PICTURES.items():
            ((_, document), *_) = results.newest(history, name, filters)
            draw(ROOT / "docs" / "images" / f"{name}.svg", load_case(name), document)
    changed = tables.update(ROOT, history, write=not only_check)
    for name in changed:
        click.echo(f"differs from the history: {name}" if only_check else f"written: {name}")
    if only_check and changed:
        click.echo("run `python -m benchmarks tables` to write them again", err=True)
        sys.exit(1)


main.add_command(gpu_report_command)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
