"""What can be measured, as data: each case is a module of this folder with `run`, `Row` and `table`.

`run` checks first that what it will time computes what it should, then measures every side in the same run. A new case is a
module and a line here.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Case:
    """name: of the case; its module has underscores. what: one line about it. keys: the fields of a row that name it.

    takes: what `run` may be given besides threads. claims: figures of a `BenchmarkConfig` that `table` judges, at that
    configuration's own sizes only. plots: whether `benchmarks.plot` has a picture of it. may_skip: whether the module has
    `unavailable`, which says why this machine cannot measure it. engine: the package that computes.
    """

    name: str
    what: str
    keys: tuple[str, ...]
    takes: tuple[str, ...] = ("config", "repeats")
    claims: tuple[str, ...] = ()
    plots: bool = False
    may_skip: bool = False
    engine: str = "onnxruntime"

    @property
    def module(self) -> str:
        return "benchmarks.cases." + self.name.replace("-", "_")


STEP = ("mem_len", "batch", "tokens", "kernel")
STEPS = ("config", "repeats", "mem_len", "kernel")
CASES = {
    case.name: case
    for case in (
        Case(
            name="decode", what="one token against memory length: ONNX Runtime and PyTorch, with the same memory",
            keys=STEP, takes=("config", "repeats", "attention_lengths", "kernel"), plots=True,
        ),
        Case(name="segment", what="a whole segment, per token: ONNX Runtime and PyTorch", keys=STEP, takes=STEPS),
        Case(name="batch", what="one token of 1, 8 and 32 independent streams: ONNX Runtime and PyTorch", keys=STEP, takes=STEPS),
        Case(
            name="latency", what="1,000 consecutive tokens: percentiles and jitter, against a cache that grows", keys=("side",),
            takes=("config", "repeats", "mem_len"), claims=("latency_claim",), plots=True,
        ),
        Case(
            name="gpu", what="one token and one segment on an NVIDIA GPU: CUDA provider and PyTorch (not run yet by anybody)",
            keys=("tokens", "mem_len"), may_skip=True,
        ),
        Case(
            name="sliding-window", what="segments with memory against a window recomputed for each token (Table 9)",
            keys=("attention_length", "kernel"), takes=("config", "repeats", "attention_lengths", "kernel"), plots=True,
        ),
        Case(
            name="memory-forms", what="one token in the three forms of memory", keys=("form", "mem_len", "kernel"),
            takes=STEPS, claims=("ring_claim",),
        ),
        Case(
            name="precision", what="one token with weights in fp32, fp16, int8 and int4, and memory in fp16",
            keys=("precision", "memory_precision", "mem_len", "kernel"), takes=(*STEPS, "trained"),
        ),
        Case(name="load", what="from opening to the first token, and resident memory: artefact and run", keys=("side",)),
        Case(name="export", what="time and peak memory of an export, validation included", keys=("form",), takes=("config",)),
        Case(name="training", what="a training step with memory and without", keys=("mem_len",), engine="torch"),
        Case(
            name="architectures", what="six small models trained for the same CPU time: bits per character",
            keys=("name",), takes=("minutes", "out", "names"), engine="torch",
        ),
    )
}  # fmt: skip


def find_case(name: str) -> Case:
    """The case of that name; raises ConfigError for any other."""
    if name not in CASES:
        raise ConfigError(f"{name} is not a case; give one of {', '.join(CASES)}.")
    return CASES[name]


def refuse_foreign_options(case: Case, given: dict[str, object]) -> None:
    """Raises ConfigError for an option that the case has no use for, and for two that contradict each other."""
    if "trained" in given and "config" in given:
        raise ConfigError("--run is measured at its own size; leave out --config, or leave out --run.")
    for option in given:
        if option not in case.takes:
            flag = {"names": "only", "trained": "run"}.get(option, option).replace("_", "-")
            raise ConfigError(
                f"{case.name} takes no --{flag}; leave it out, or measure the cases in runs of their own."
            )
