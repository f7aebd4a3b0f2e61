"""`python -m benchmarks list | run CASE… | compare A B`: correctness first, then every side in the same run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from benchmarks.cases.registry import CASES, Case, find_case, refuse_foreign_options
from benchmarks.compare import compare, find_results
from benchmarks.configs import checked_minutes, checked_repeats, checked_threads, load_config, parse_lengths
from benchmarks.csv_file import check_csv, write_csv
from runtimes.base.errors import ConfigError, needs
from runtimes.cli.group import Group
from runtimes.cli.options import echo_json, json_option

PACKAGES = ("onnxruntime", "onnx_ir", "torch", "safetensors", "tqdm")
SMALL = "small"


class Cases(Group):
    """A case's name alone runs it."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, ["run", *args] if args and args[0] in CASES else args)


@click.group(cls=Cases, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure what this project claims: correctness first, then both sides in the same run."""


@main.command("list")
def list_command() -> None:
    """The cases, a line each."""
    for case in CASES.values():
        click.echo(f"{case.name:<16}{case.what}{' (--plot)' if case.plots else ''}")


@main.command("run")
@click.argument("cases", nargs=-1, required=True, metavar="CASE...")
@click.option("--config", help=f"Sizes: {SMALL} (default), enwik8-base (minutes), or enwik8-large.")
@click.option(
    "--threads", type=int, help="CPU threads of every side; all that this process may use by default."
)
@click.option(
    "--repeats", type=int, help="Timed calls of each side; the case's or configuration's own by default."
)
@click.option("--attention-lengths", help="Such as 64,128,256; the configuration's own by default.")
@click.option("--mem-len", type=int, help="Tokens remembered (M); the configuration's own by default.")
@click.option(
    "--kernel",
    type=click.Choice(["standard", "fused"]),
    help="Operators of ONNX Runtime, or the fused one, built first.",
)
@click.option(
    "--run",
    "trained",
    type=click.Path(path_type=Path),
    help="precision: a trained run for random weights: quality too.",
)
@click.option(
    "--minutes",
    type=float,
    help="architectures: CPU minutes of all threads together for each model; 3 by default.",
)
@click.option("--out", type=click.Path(path_type=Path), help="architectures: the runs' folder.")
@click.option(
    "--only", "names", multiple=True, help="architectures: one of the models; several may be given."
)
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    help="Append here; benchmarks/history/CASE.jsonl by default.",
)
@click.option(
    "--csv",
    "csv_to",
    type=click.Path(path_type=Path),
    help="Write the rows of all cases into this CSV file too.",
)
@click.option(
    "--plot",
    "plot_to",
    type=click.Path(path_type=Path),
    help="Draw the result of one case into this PNG file.",
)
@json_option
def run_command(
    cases: tuple[str, ...], threads: int | None, history: Path | None, csv_to: Path | None, plot_to: Path | None,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Check, then measure, the CASEs; print them with the machine's limits beside them, and append to the history.

    A case's name alone does the same: python -m benchmarks decode. With --json each case ends with its document on one line.
    """
    chosen, threads = [find_case(name) for name in dict.fromkeys(cases)], checked_threads(threads)
    given = {name: _checked(name, value) for name, value in options.items() if value not in (None, ())}
    for case in chosen:
        refuse_foreign_options(case, given)
    if plot_to:
        _check_plot(plot_to, chosen)
    if csv_to:
        check_csv(csv_to)
    documents = [
        _measure(case, given, threads, history, plot_to, as_json) for case in chosen if not _skipped(case)
    ]
    if csv_to and documents:
        write_csv(csv_to, documents)
        click.echo(f"written to {csv_to}", err=True)


@main.command("compare")
@click.argument("before")
@click.argument("after")
@click.option(
    "--history", type=click.Path(path_type=Path), help="Folder of results; benchmarks/history by default."
)
@json_option
def compare_command(before: str, after: str, history: Path | None, as_json: bool) -> None:
    """Medians of the same rows at BEFORE and AFTER: two commits, two dates, or two .jsonl files."""
    report = compare(find_results(before, history), find_results(after, history))
    for line in report.lines:
        click.echo(line)
    echo_json(report.to_json(), as_json)


@main.command("kernel")
@click.option(
    "--history",
    type=click.Path(path_type=Path),
    help="Append here; benchmarks/history/kernel.jsonl by default.",
)
@json_option
def kernel_command(history: Path | None, as_json: bool) -> None:
    """TensorRT's attention kernel against PyTorch's forms of the same attention, on this machine's GPU."""
    with needs("export,tensorrt", "torch", "triton"):
        from benchmarks.cases import triton_kernel
        from benchmarks.history import HISTORY, append
    triton_kernel.refuse_without_gpu()
    file = history or HISTORY / "kernel.jsonl"
    rows = triton_kernel.run(progress=lambda line: click.echo(line, err=True))
    for line in triton_kernel.table(rows):
        click.echo(line)
    document = triton_kernel.document(rows)
    append(file, document)
    click.echo(f"appended to {file}")
    echo_json(document, as_json)


@main.command("tables")
@click.option(
    "--check", "only_check", is_flag=True, help="Change nothing; exit with 1 where a document differs."
)
@click.option("--list", "only_list", is_flag=True, help="Print the names that markers may have.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="The folder with README.md, docs/ and benchmarks/history/; this checkout by default.",
)
def tables_command(only_check: bool, only_list: bool, folder: Path | None) -> None:
    """Write the tables of README.md and docs/ from the history of measurements.

    A document contains a table between `<!-- table: NAME -->` and `<!-- end of table -->`.
    """
    from benchmarks.tables import markers, registry
    from benchmarks.tables.runs import History

    if only_list:
        for name in registry.TABLES:
            click.echo(f"table   {name}")
        for name in registry.FIGURES:
            click.echo(f"figure  {name}")
        return
    folder = folder or Path(__file__).parent.parent
    history = History.load(folder / "benchmarks" / "history")
    if only_check:
        differing = markers.differing(folder, history)
        for name in differing:
            click.echo(f"differs from the history: {name}")
        if differing:
            click.echo("run `python -m benchmarks tables` to write them again", err=True)
            raise SystemExit(1)
        return
    for name in markers.write_tables(folder, history):
        click.echo(f"written: {name}")


def _checked(name: str, value: Any) -> Any:
    checks: dict[str, Callable[[Any], Any]] = {
        "config": load_config, "repeats": lambda given: checked_repeats(given, 1), "minutes": checked_minutes,
        "attention_lengths": parse_lengths,
        "names": lambda given: import_module("benchmarks.cases.architectures").chosen(given),
    }  # fmt: skip
    return checks[name](value) if name in checks else value


def _check_plot(path: Path, chosen: list[Case]) -> None:
    drawn = [case.name for case in CASES.values() if case.plots]
    if len(chosen) != 1 or chosen[0].name not in drawn:
        raise ConfigError(
            f"--plot draws one case, and there are pictures of {', '.join(drawn)}; run one of these by itself."
        )
    from benchmarks.plot import check_plot

    check_plot(path)


def _skipped(case: Case) -> bool:
    """Whether the case cannot be measured on this machine; says why."""
    if not case.may_skip:
        return False
    with needs("cpu,export", *PACKAGES):
        reason = import_module(case.module).unavailable()
    if reason:
        click.echo(f"{case.name} is skipped: {reason}")
    return reason is not None


def _measure(
    case: Case, given: dict[str, Any], threads: int, history: Path | None, plot_to: Path | None, as_json: bool
) -> dict[str, Any]:
    """One case from check to history; returns its document."""
    with needs("cpu,export", *PACKAGES):
        module = import_module(case.module)
        from benchmarks.history import begin
    given = dict(given)
    if "trained" in given:
        given["config"] = module.size_of(given["trained"])
    config = given.pop("config", load_config(SMALL)) if "config" in case.takes else module.described()
    others = {
        name: value
        for name, value in given.items()
        if value != getattr(config, name, None) and name != "repeats"
    }
    claims = {} if others else {name: getattr(config, name) for name in case.claims}
    sizes = (config,) if "config" in case.takes else ()
    result = begin(case.name, config, threads=threads, file=history, engine=case.engine)
    rows = module.run(*sizes, threads=threads, progress=lambda line: click.echo(line, err=True), **given)
    result = result.remeasured()
    title = result.title + (", fused kernel" if given.get("kernel") == "fused" else "")
    for line in (title, *result.machine_lines, "", *module.table(rows, result.limits, **claims), ""):
        click.echo(line)
    document = result.finish([row.to_json() for row in rows])
    click.echo(f"appended to {result.file}")
    if plot_to:
        from benchmarks.plot import plot

        plot(plot_to, case.name, rows, title=title)
        click.echo(f"drawn to {plot_to}", err=True)
    echo_json(document, as_json)
    return document


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
