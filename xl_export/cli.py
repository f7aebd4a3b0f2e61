"""`xl-export`: every step from text to a verified artefact as one command. Heavy packages load only in their command."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from runtimes.cli import COMMANDS, Group, echo_json, json_option
from runtimes.cli_eval import eval_command
from runtimes.errors import UserError, needs
from runtimes.precision import QUANTISED, per_stream, sentence
from runtimes.reference import check
from runtimes.spec import load_spec
from xl_export.cli_attention import attention_command, spans_command
from xl_export.cli_data import data
from xl_export.cli_import import import_command
from xl_export.cli_recl import recl_command
from xl_export.cli_tensorrt import tensorrt_command


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="xl-export")
def main() -> None:
    """Take a language model with segment recurrence from text to a device that has no PyTorch.

    \b
    xl-export data text8 --from zip --out text8  public corpus → dataset; any text will do without
    xl-export train --out run                    text → run
    xl-export import model.pt --out run          checkpoint of another project → run
    xl-export onnx run --out artefact            run → artefact: ONNX graph, weights, proof
    xl-export check artefact                     the same numbers as PyTorch, on this device?
    xl-export tensorrt artefact --out engine     artefact → TensorRT engine, for NVIDIA GPUs
    xl-export eval artefact --text run/test.txt  bits per token, with memory
    xl-export generate artefact --prompt "The "  text, at the same cost for every token
    """


for command in (*COMMANDS, eval_command, import_command, recl_command, attention_command, spans_command, data, tensorrt_command):
    main.add_command(command)

PACKAGES = ("torch", "safetensors", "tqdm", "onnx", "onnx_ir", "onnxruntime")  # that the steps here load when they run
out_option = click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to write.")
force_option = click.option("--force", is_flag=True, help="Replace the folder if it holds an earlier one of its kind.")


@main.command()
@click.argument("config", required=False)
@click.option("--out", type=click.Path(path_type=Path), help="The run folder to write.")
@click.option("--resume", "resume_run", type=click.Path(path_type=Path), help="Continue this run instead of starting one.")
@click.option("--list", "list_", is_flag=True, help="Print the built-in configurations and end.")
@click.option("--text", type=click.Path(path_type=Path), help="A UTF-8 text; the built-in English corpus by default.")
@click.option("--data", "data_", type=click.Path(path_type=Path), help="A dataset that `xl-export data` prepared.")
@click.option("--vocab", type=click.Choice(["byte", "char", "word"]), help="What a token is.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps.")
@click.option("--seed", type=click.IntRange(min=0), help="Random seed.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What trains.")
@click.option("--tensorboard/--no-tensorboard", default=None, help="Metrics also as TensorBoard events, in RUN/tensorboard.")
@force_option
def train(config: str | None, out: Path | None, resume_run: Path | None, list_: bool, force: bool, **changes: Any) -> None:
    """Train a model, or continue training one.

    CONFIG is a JSON file, or the name of a built-in configuration: `demo` by default; `--list` shows all. Options
    replace what the configuration says. The run folder holds model.safetensors (the best weights by validation),
    config.json, vocab.json, metrics.jsonl and the held-out texts. A run that was stopped continues with --resume, bit
    for bit as if it had not been. Several processes: torchrun --nproc-per-node 2 -m xl_export train …
    """
    if list_:
        with needs("train", *PACKAGES):
            from trainer.catalogue import catalogue
        click.echo("\n".join(catalogue()))
        return
    changes["data"] = changes.pop("data_")
    changes = {key: str(value) if key in ("text", "data") else value for key, value in changes.items() if value is not None}
    if (out is None) == (resume_run is None):
        raise UserError("give either --out RUN to start a run, or --resume RUN to continue one.")
    if resume_run and (config or force):
        raise UserError("--resume continues a run as it was configured; leave out CONFIG and --force, or start a new run.")
    if resume_run and changes:
        raise UserError(f"--resume continues a run as it was configured; leave out --{next(iter(changes))}, or start a new run.")
    with needs("train", *PACKAGES):
        from trainer.config import TrainConfig
        from trainer.loop import resume
        from trainer.loop import train as start
    if resume_run:
        run = _interruptible(lambda: resume(resume_run), resume_run)
    else:
        assert out is not None
        settings = TrainConfig.load(config or "demo")
        settings = dataclasses.replace(settings.with_steps(changes.pop("steps", settings.steps)), **changes)
        run = _interruptible(lambda: start(settings, out, force=force), out)
    if os.environ.get("RANK", "0") == "0":  # the first process of torchrun speaks for all
        click.echo(f"{run} is trained; next: xl-export onnx {run} --out artefact")


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--memory",
    type=click.Choice(["ring", "shift", "hidden"]),
    help="Memory tensors: keys and values in a ring written in place (fastest, the default), the same shifted by concatenation "
    "(TensorRT, older opsets), or the paper's hidden states (slow, for parity).",
)
@click.option("--mem-len", type=click.IntRange(min=0), help="Tokens remembered (M); the run's own by default.")
@click.option("--segment", type=click.IntRange(min=1), help="The largest segment of one step (T); the run's own by default.")
@click.option(
    "--mask", type=click.Choice(["same-length", "full"]), help="Every token sees M before it, or all that memory still holds."
)
@click.option("--clamp-len", type=click.IntRange(min=0), help="Largest distance with a position of its own; 0 for no clamp.")
@click.option(
    "--initial-memory", type=click.Choice(["masked", "zeros"]), help="What precedes a text: nothing, or zeros that are seen."
)
@click.option(
    "--target", type=click.Choice(["onnxruntime", "tensorrt"]), default="onnxruntime", show_default=True,
    help="What the graph is for: tensorrt has shift memory and float16; ONNX Runtime runs it too.",
)  # fmt: skip
@click.option(
    "--attention", type=click.Choice(["plugin", "native"]),
    help="For tensorrt: one node that our fused kernel takes (the default), or the engine's own kernels for standard operators.",
)  # fmt: skip
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "int8", "int4"]),
    help="Of the weights: fp16 is a smaller file; int8 and int4 make large models faster, and lose a little; fp32 by default.",
)  # fmt: skip
@click.option(
    "--memory-precision", type=click.Choice(["fp32", "fp16"]), show_default="fp32",
    help="Of the memory tensors: fp16 halves the bytes of a stream (`info` prints both), and pays with the fused kernel.",
)  # fmt: skip
@click.option(
    "--text", type=click.Path(path_type=Path), help="Held-out text to measure a precision on; the run's own test text by default."
)
@force_option
def onnx(
    run: Path, out: Path, memory: str | None, target: str, attention: str | None, precision: str | None,
    memory_precision: str | None, text: Path | None, force: bool, **changes: Any,
) -> None:  # fmt: skip
    """Export RUN to an artefact, a folder that needs no PyTorch.

    It runs with NumPy and ONNX Runtime alone. The graph is compared with PyTorch at several shapes, and over chained
    segments through several wraps of the memory, before the folder appears. Rules that are not given are those that the
    run was evaluated with.
    """
    with needs("cpu,export", *PACKAGES):
        from trainer.checkpoint import load_run
        from xl_export.artefact import export
    rule = load_run(run).config.evaluation
    given = {key: value for key, value in changes.items() if value is not None}
    if given.get("clamp_len") == 0:
        given["clamp_len"] = None
    if attention and target != "tensorrt":
        raise UserError("--attention is for --target tensorrt; leave it out, or give both.")
    rule = dataclasses.replace(rule, **given)
    export(
        run, out, memory=memory, rule=rule, target=target, attention=attention or "plugin", precision=precision,  # type: ignore[arg-type]
        memory_precision=memory_precision, text=text, force=force,  # type: ignore[arg-type]
    )  # fmt: skip
    report, spec = check(out), load_spec(out)
    verdict = "is ready" if report.passed else "is written, but its check FAILED on this machine"
    proof = "compared with PyTorch in fp32 before its weights were quantised" if spec.precision in QUANTISED else report.sentence
    click.echo(f"{out} {verdict}: {spec.form} memory, {spec.rule}; {proof if report.passed else report.sentence}")
    stream = (spec.bytes_per_stream, spec.fp32_bytes_per_stream) if spec.state_dtype == "float16" else None
    if spec.measured is not None:
        click.echo(sentence(spec.precision, spec.measured, stream=stream))
    elif spec.lossy:
        name = f"{spec.precision} with fp16 memory ({per_stream(*stream)})" if stream else spec.precision
        click.echo(f"{name} is not measured: {run} kept no test text; give one with --text FILE")


@main.command()
@click.option(
    "--out", default="demo", show_default=True, type=click.Path(path_type=Path), help="The folder for run and artefact."
)
@click.option("--steps", type=click.IntRange(min=1), help="Training steps; the demo configuration's by default.")
@force_option
@json_option
def demo(out: Path, steps: int | None, force: bool, as_json: bool) -> None:
    """The whole path in one command, in a few minutes on two cores.

    On a built-in corpus: trains a small character model, exports it, checks it, scores it with and without memory in
    PyTorch and in ONNX Runtime, generates text, and measures it against a sliding window.
    """
    with needs("cpu,train,export", *PACKAGES):
        from xl_export.demo import run_demo
    figures = run_demo(out, steps=steps, force=force)
    echo_json(figures, as_json)
    if not figures["check"]["passed"]:
        raise SystemExit(1)


def _interruptible(work: Callable[[], Path], run: Path) -> Path:
    try:
        return work()
    except KeyboardInterrupt:
        kept = f"the last checkpoint is kept: continue with `xl-export train --resume {run}`"
        click.echo(f"\nstopped; {kept if run.is_dir() else 'nothing was written'}", err=True)
        raise SystemExit(130) from None
