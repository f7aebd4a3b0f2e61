"""`python -m benchmarks`: lists, measures and compares cases, and writes the tables of the documents."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks import documents
from benchmarks.case import FILE, OPTIONS, Case, file_option, option
from benchmarks.cases import CASES, ENTRIES
from benchmarks.compare import compare, find_results, lines
from benchmarks.gpu_report import gpu_report_command
from benchmarks.machine import history_folder
from benchmarks.pictures import write_pictures
from benchmarks.plot import plot
from benchmarks.render import terminal
from benchmarks.runs import History, Run, read_results
from benchmarks.summaries import FIGURES
from runtimes.base.files import atomic_file, refuse_replacing, refuse_unwritable
from runtimes.base.machine import available_cpus
from runtimes.cli.group import Group, Subgroup
from runtimes.cli.options import json_option, show
from xl_export.figures.canvas import check_picture

ROOT = Path(__file__).parent.parent
FACTS = ("case", "config", "threads", "precision", "time", "commit")  # the first columns of a CSV file


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure what this project claims.

    Each case first checks that every side computes the right answers, and then measures all sides in the same
    run.
    """


@main.command("list")
def list_command() -> None:
    """List the cases, one line each; --plot can draw those marked so."""
    for name, entry in ENTRIES.items():
        click.echo(f"{name:<16}{entry.summary}{' (--plot)' if entry.draws else ''}")


class CaseCommands(Mapping[str, click.Command]):
    """A command for each case, made when it is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        return command_of(CASES[name])

    def __iter__(self) -> Any:
        return iter(CASES)

    def __len__(self) -> int:
        return len(CASES)


class RunGroup(Subgroup):
    """Its help names the cases without importing them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Cases"):
            formatter.write_dl([(name, entry.summary) for name, entry in ENTRIES.items()])


RUN_HELP = """Check and then measure CASE, print its table, and append the result to the history.

The table shows the limits of the machine too.
"""
run_group = RunGroup("run", help=RUN_HELP, subcommand_metavar="CASE [OPTIONS]")
run_group.commands = CaseCommands()  # type: ignore[assignment]
main.add_command(run_group)


def command_of(case: Case) -> click.Command:
    """The command that measures a case, with its own options first."""
    replaced = "files of --csv and --plot if they exist" if case.draw else "file of --csv if it exists"
    options = [
        *(OPTIONS[each] if isinstance(each, str) else each for each in case.options),
        option(
            "--threads",
            "CPU threads of every side; by default all that this process may use.",
            type=click.IntRange(1, available_cpus()),
        ),
        file_option(
            "--history",
            f"The file that the result is appended to. Default: {case.name}.jsonl in benchmarks/history/ of "
            "a checkout of this project, and in ./benchmark-history/ elsewhere.",
        ),
        file_option("--csv csv_to", "Also write the rows to this CSV file."),
        *([file_option("--plot plot_to", "Also draw the result to this PNG file.")] if case.draw else []),
        option("--force", f"Replace the {replaced}.", is_flag=True),
    ]
    summary = ENTRIES[case.name].summary
    command = click.Command(
        case.name,
        params=[*options],
        callback=lambda **given: measure(case, **given),
        help=f"{summary[:1].upper()}{summary[1:]}.",
    )
    return json_option(command)


def measure(
    case: Case,
    *,
    threads: int | None,
    history: Path | None,
    csv_to: Path | None,
    force: bool,
    as_json: bool,
    plot_to: Path | None = None,
    **given: Any,
) -> None:
    """Measures one case; the result is printed, drawn, and appended to the history."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    used = threads or available_cpus()
    if plot_to:
        check_picture(plot_to, "--plot")
        refuse_replacing(plot_to, option="--plot", force=force)
    if csv_to:
        refuse_unwritable(csv_to, option="--csv", suffixes=(".csv",))
        refuse_replacing(csv_to, option="--csv", force=force)
    if reason := case.unavailable():
        click.echo(f"{case.name} is skipped: {reason}")
        return
    from benchmarks import history as results  # needs ONNX Runtime

    config = case.size(options)
    file = results.history_file(case, history)
    result = results.begin(case, config, threads=used)
    more: dict[str, Any] = {"progress": lambda line: click.echo(line, err=True)}
    if case.resumable:
        earlier = read_results(file) if file.is_file() else []
        more["earlier"] = [row for document in earlier for row in document["rows"]]
        more["keep"] = lambda row: results.append(file, results.with_rows(result, [row]))
    rows = case.measure(config, threads=threads, options=options, **more)
    document = results.with_rows(results.measured_again(result), rows)
    if not case.resumable:
        results.append(file, document)
    title = results.title(document) + (", fused operator" if options.get("operators") == "fused" else "")
    # A claim is about a size as it is.
    table = terminal(case, Run(document), judged=options.keys() <= {"config", "repeats"})
    show(document, [title, *results.machine_lines(document), "", *table], as_json=as_json)
    click.echo(f"appended to {file}", err=as_json)
    if csv_to:
        write_csv(csv_to, document)
        click.echo(f"written to {csv_to}", err=True)
    if plot_to:
        assert case.draw is not None
        plot(plot_to, case.draw, document["rows"], title=title)
        click.echo(f"drawn to {plot_to}", err=True)


def write_csv(path: Path, document: dict[str, Any]) -> None:
    """A line for each row of a result, and a column for each figure.

    The column of a nested figure is named as in `token.median`. A figure that a row does not have is empty.
    """
    facts = {name: document[name] for name in FACTS} | {"cpu": document["machine"]["cpu"]}
    lines = [{**facts, **dict(_flat(row))} for row in document["rows"]]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(lines)


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The figures of a row, with the names of nested ones joined by dots; lists have no column."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value


@main.command("compare")
@click.argument("before")
@click.argument("after")
@click.option(
    "--history",
    type=FILE,
    help="The folder with the results. Default: benchmarks/history/ of a checkout of this project, and "
    "./benchmark-history/ elsewhere.",
)
@json_option
def compare_command(before: str, after: str, history: Path | None, as_json: bool) -> None:
    """Compare the medians of the same rows in BEFORE and AFTER.

    Each of the two is a .jsonl file, or the beginning of a commit or of a date. Rows without a counterpart
    are listed.
    """
    folder = history or history_folder()
    report = compare(find_results(before, folder), find_results(after, folder))
    show(report, lines(report), as_json=as_json)


@main.command("tables")
@click.option(
    "--check", "only_check", is_flag=True, help="Change nothing; exit with 1 if a document differs."
)
@click.option("--list", "only_list", is_flag=True, help="Print the names that markers may have.")
def tables_command(only_check: bool, only_list: bool) -> None:
    """Write the tables of README.md and docs/ from the history of measurements.

    A document contains a table between `<!-- table: NAME -->` and `<!-- end of table -->`.
    """
    if only_list:
        for kind, names in (("table", documents.table_names()), ("figure", FIGURES)):
            for name in names:
                click.echo(f"{kind:<8}{name}")
        return
    history = History.load(ROOT / "benchmarks" / "history")
    changed = documents.update(ROOT, history, write=not only_check)
    for name in changed:
        click.echo(f"differs from the history: {name}" if only_check else f"written: {name}")
    if only_check and changed:
        click.echo("run `python -m benchmarks tables` to write them again", err=True)
        raise SystemExit(1)


@main.command("pictures")
def pictures_command() -> None:
    """Draw the pictures of the documents from the history, each for light and for dark pages."""
    history = History.load(ROOT / "benchmarks" / "history")
    for path in write_pictures(ROOT / "docs" / "images", history):
        click.echo(f"drawn: {path.relative_to(ROOT)}")


main.add_command(gpu_report_command)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
