"""`python -m benchmarks`: lists, measures and compares cases, and writes the tables of the documents."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from benchmarks.cases.registry import CASES, Case, find_case, refuse_unsuitable_options
from benchmarks.compare import compare, find_results, read_results
from benchmarks.configs import checked_minutes, checked_repeats, checked_threads, load_config, parse_lengths
from benchmarks.gpu_report import gpu_report_command
from benchmarks.machine import history_folder
from benchmarks.output import check_csv, write_csv
from runtimes.base.errors import ConfigError, needs
from runtimes.cli.group import Group
from runtimes.cli.options import json_option, show, text_as_progress

PACKAGES = ("onnxruntime", "onnx_ir", "torch", "safetensors", "tqdm")
SMALL = "small"
FILE = click.Path(path_type=Path)


class Cases(Group):
    """A group in which the name of a case is a command too: `decode` means `run decode`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_case = bool(args) and args[0] in CASES
        return super().resolve_command(ctx, ["run", *args] if is_case else args)


@click.group(cls=Cases, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure what this project claims.

    Each case first checks that every side computes the right answers, and then measures all sides in the same
    run.
    """


@main.command("list")
def list_command() -> None:
    """List the cases, one line each; --plot can draw those marked so."""
    for case in CASES.values():
        click.echo(f"{case.name:<16}{case.summary}{' (--plot)' if case.plots else ''}")


@main.command("run")
@click.argument("cases", nargs=-1, required=True, metavar="CASE...")
@click.option(
    "--config",
    help=f"The size of the model: {SMALL} (default), enwik8-base (some minutes), wt103-base or enwik8-large.",
)
@click.option(
    "--threads", type=int, help="CPU threads of every side; by default all CPUs that this process may use."
)
@click.option("--repeats", type=int, help="Timed calls of each side; the default depends on case and size.")
@click.option(
    "--attention-lengths", help="Lengths in tokens, such as 64,128,256; the default depends on the size."
)
@click.option(
    "--mem-len", type=int, help="Length of the memory in tokens (M); the default depends on the size."
)
@click.option(
    "--operators",
    type=click.Choice(["standard", "fused"]),
    help="What computes a step: ONNX Runtime's own operators (default), or the fused operator for the CPU, "
    "which is built first.",
)
@click.option("--kernel", "old_operators", type=click.Choice(["standard", "fused"]), hidden=True)
@click.option(
    "--run",
    "trained",
    type=FILE,
    help="precision: a trained run, whose quality is measured too; by default the weights are random.",
)
@click.option(
    "--minutes",
    type=float,
    help="architectures, recipes: CPU minutes for the steps of each model, of all threads together; 3 by "
    "default. serve: minutes of mixed load; 2 by default.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1000, 1 << 24),
    help="serve: the tokens of its longest stream; 20,000 by default.",
)
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="serve: another checkout of this project, which the part stall measures in turns with this one.",
)
@click.option(
    "--corpora",
    type=FILE,
    help="recipes: the folder with enwik8, text8 and Penn Treebank, or pieces of them.",
)
@click.option("--out", type=FILE, help="recipes: the folder for datasets and runs.")
@click.option(
    "--text",
    type=FILE,
    help="architectures, autocast-loss: the text to train on, plain or compressed with gzip; the built-in "
    "one by default.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    help="architectures: runs of each model; autocast-loss: pairs of runs; 2 by default.",
)
@click.option(
    "--reference",
    "references",
    multiple=True,
    type=FILE,
    help="architectures, training: a folder with the public code of Transformer-XL or adaptive-span, which "
    "is trained too; may be repeated.",
)
@click.option(
    "--only",
    "--rows",
    "names",
    multiple=True,
    help="architectures, recipes, validation: this model only; serve: this part only; gpu: this side only, "
    "with * for any text; may be repeated.",
)
@click.option(
    "--parts",
    type=FILE,
    help="text-quality: the folder that examples/stories/prepare.py has written. music-memory: the one that "
    "examples/music/prepare.py keeps beside its dataset.",
)
@click.option(
    "--artefact",
    type=FILE,
    help="text-quality, music-memory: the artefact; README.md in examples/stories or examples/music says how "
    "it is made. By default the one in that folder of this checkout, if it is there.",
)
@click.option(
    "--history",
    type=FILE,
    help="The file that results are appended to. Default: CASE.jsonl in benchmarks/history/ of a checkout "
    "of this project, and in ./benchmark-history/ elsewhere.",
)
@click.option("--csv", "csv_to", type=FILE, help="Also write the rows of all cases to this CSV file.")
@click.option("--plot", "plot_to", type=FILE, help="Also draw the result to this PNG file; for one case.")
@click.option(
    "--force", is_flag=True, help="Let --csv and --plot replace a file that this command did not write."
)
@json_option
def run_command(
    cases: tuple[str, ...],
    threads: int | None,
    old_operators: str | None,
    history: Path | None,
    csv_to: Path | None,
    plot_to: Path | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check and then measure each CASE, print its table, and append the result to the history.

    The table shows the limits of the machine too. The name of a case alone does the same: python -m
    benchmarks decode. With --json, each case ends with its result on one line.
    """
    chosen, given = [find_case(name) for name in dict.fromkeys(cases)], threads
    threads = checked_threads(given)
    options["operators"] = options["operators"] or old_operators
    options = {name: _checked(name, value) for name, value in options.items() if value not in (None, ())}
    for case in chosen:
        refuse_unsuitable_options(case, options)
        _refuse_unknown_names(case, options)
    if plot_to:
        _check_plot(plot_to, chosen, force=force)
    if csv_to:
        check_csv(csv_to, force=force)
    own = {"default_threads": given is None}  # which not every case takes
    documents = [
        _measure(
            case,
            options | {name: value for name, value in own.items() if name in case.takes},
            threads,
            history,
            plot_to,
            as_json,
        )
        for case in chosen
        if not _skipped(case)
    ]
    if csv_to and documents:
        write_csv(csv_to, documents)
        click.echo(f"written to {csv_to}", err=True)


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
    show(report.to_json(), report.lines, as_json=as_json)


@main.command("tables")
@click.option(
    "--check", "only_check", is_flag=True, help="Change nothing; exit with 1 where a document differs."
)
@click.option("--list", "only_list", is_flag=True, help="Print the names that markers may have.")
@click.option(
    "--folder",
    type=FILE,
    help="The folder with README.md, docs/ and benchmarks/history/; this checkout by default.",
)
def tables_command(only_check: bool, only_list: bool, folder: Path | None) -> None:
    """Write the tables of README.md and docs/ from the history of measurements.

    A document contains a table between `<!-- table: NAME -->` and `<!-- end of table -->`.
    """
    from benchmarks.tables import markers, registry
    from benchmarks.tables.runs import History

    if only_list:
        for kind, names in (("table", registry.TABLES), ("figure", registry.FIGURES)):
            for name in names:
                click.echo(f"{kind:<8}{name}")
        return
    folder = folder or Path(__file__).parent.parent
    history = History.load(folder / "benchmarks" / "history")
    if not only_check:
        for name in markers.write_tables(folder, history):
            click.echo(f"written: {name}")
        return
    differing = markers.differing(folder, history)
    for name in differing:
        click.echo(f"differs from the history: {name}")
    if differing:
        click.echo("run `python -m benchmarks tables` to write them again", err=True)
        raise SystemExit(1)


main.add_command(gpu_report_command)


def _checked(name: str, value: Any) -> Any:
    """The value of an option as the cases take it; raises ConfigError where it cannot be measured."""
    checks: dict[str, Callable[[Any], Any]] = {
        "config": load_config,
        "repeats": lambda repeats: checked_repeats(repeats, 1),
        "minutes": checked_minutes,
        "attention_lengths": parse_lengths,
    }
    return checks[name](value) if name in checks else value


def _refuse_unknown_names(case: Case, options: dict[str, Any]) -> None:
    """Raises ConfigError for a name that is none of this case; each case has names of its own."""
    if "names" in options:
        with needs("cpu,export", *PACKAGES):
            import_module(case.module).chosen(options["names"])


def _check_plot(path: Path, chosen: list[Case], *, force: bool) -> None:
    drawn = [case.name for case in CASES.values() if case.plots]
    if len(chosen) != 1 or chosen[0].name not in drawn:
        raise ConfigError(
            f"--plot draws one case, and can draw {', '.join(drawn)}; measure one of these alone."
        )
    from benchmarks.plot import check_plot

    check_plot(path, force=force)


def _skipped(case: Case) -> bool:
    """Whether the case cannot be measured on this machine; the reason is printed."""
    if not case.may_skip:
        return False
    with needs("cpu,export", *PACKAGES):
        reason = import_module(case.module).unavailable()
    if reason:
        click.echo(f"{case.name} is skipped: {reason}")
    return reason is not None


def _measure(
    case: Case,
    options: dict[str, Any],
    threads: int,
    history: Path | None,
    plot_to: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """The result of one case, which is also printed, drawn and appended to the history."""
    with needs("cpu,export", *PACKAGES):
        module = import_module(case.module)
        from benchmarks.history import begin
    options = dict(options)
    if "trained" in options:
        options["config"] = module.size_of(options["trained"])
    takes_config = "config" in case.takes
    config = options.pop("config", load_config(SMALL)) if takes_config else module.described()
    # A claim is about a configuration as it is. It is not judged where an option changes more than repeats.
    changed = any(
        name != "repeats" and value != getattr(config, name, None) for name, value in options.items()
    )
    claims = {} if changed else {name: getattr(config, name) for name in case.claims}
    result = begin(
        case.name, config, threads=threads, file=history, engine=case.engine, precision=case.precision
    )
    if case.resumable:
        earlier = read_results(result.file) if result.file.is_file() else []
        options["before"] = [row for document in earlier for row in document["rows"]]
        options["keep"] = lambda row: result.finish([row.to_json()])
    rows = module.run(
        *([config] if takes_config else []),
        threads=threads,
        progress=lambda line: click.echo(line, err=True),
        **options,
    )
    result = result.remeasured()
    title = result.title + (", fused operator" if options.get("operators") == "fused" else "")
    with text_as_progress(as_json):
        for line in (title, *result.machine_lines, "", *module.table(rows, result.limits, **claims), ""):
            click.echo(line)
    document = (result.document if case.resumable else result.finish)([row.to_json() for row in rows])
    click.echo(f"appended to {result.file}", err=as_json)
    if plot_to:
        from benchmarks.plot import plot

        plot(plot_to, case.name, rows, title=title)
        click.echo(f"drawn to {plot_to}", err=True)
    show(document, [], as_json=as_json)
    return document


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
