"""The cases that can be measured, as data. Each is a module of this folder with `run`, `Row` and `table`.

`run` first checks that what it will time computes what it should, and then measures every side in the same
run. A new case is a module, and an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtimes.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case. Its module has the same name with underscores, and stands in `folder` of this folder if any.

    summary: one line about it. keys: the fields of a row that tell it from other rows. takes: the options of
    `run` besides threads. claims: the fields of a `BenchmarkConfig` that `table` judges, at the sizes of that
    configuration only. plots: whether `benchmarks.plot` can draw it. may_skip: whether the module has
    `unavailable`, which says why this machine cannot measure the case. resumable: each row is a result of its
    own that is appended as soon as it is known; `run` gets the earlier ones to leave them out. engine: the
    package that computes. precision: of the weights and the arithmetic, for the history.
    """

    name: str
    summary: str
    keys: tuple[str, ...]
    takes: tuple[str, ...] = ("config", "repeats")
    claims: tuple[str, ...] = ()
    plots: bool = False
    may_skip: bool = False
    resumable: bool = False
    engine: str = "onnxruntime"
    precision: str = "fp32"
    folder: str = ""

    @property
    def module(self) -> str:
        """The full name of the module."""
        parts = ("benchmarks", "cases", self.folder, self.name.replace("-", "_"))
        return ".".join(part for part in parts if part)


STEP_KEYS = ("mem_len", "batch", "tokens", "operators")
STEP_OPTIONS = ("config", "repeats", "mem_len", "operators")
LENGTH_OPTIONS = ("config", "repeats", "attention_lengths", "operators")
CASES = {
    case.name: case
    for case in (
        Case(
            name="decode",
            summary="one token at several memory lengths: ONNX Runtime against PyTorch with the same memory",
            keys=STEP_KEYS,
            takes=LENGTH_OPTIONS,
            plots=True,
        ),
        Case(
            name="segment",
            summary="one whole segment: ONNX Runtime against PyTorch",
            keys=STEP_KEYS,
            takes=STEP_OPTIONS,
        ),
        Case(
            name="batch",
            summary="one token of each of 1, 8 and 32 independent streams: ONNX Runtime against PyTorch",
            keys=STEP_KEYS,
            takes=STEP_OPTIONS,
        ),
        Case(
            name="score",
            summary="many short texts side by side against one stream of as many tokens, and one by one",
            keys=("side", "mem_len", "operators"),
            takes=STEP_OPTIONS,
            claims=("score_claim",),
        ),
        Case(
            name="ray",
            summary="many short texts by one process, by one actor of Ray Data and by two, with the cores",
            keys=("actors",),
            folder="serving",
            takes=("config", "repeats", "mem_len"),
            may_skip=True,
        ),
        Case(
            name="latency",
            summary="1,000 consecutive tokens with fixed memory against a key/value cache that grows",
            keys=("side",),
            takes=("config", "repeats", "mem_len"),
            claims=("latency_claim",),
            plots=True,
        ),
        Case(
            name="web",
            summary="one token in WebAssembly, in place and with copies, against Node, Python and C++",
            keys=("side", "mem_len"),
            takes=("config", "repeats", "mem_len"),
            claims=("web_claim",),
            may_skip=True,
        ),
        Case(
            name="serve",
            folder="serving",
            summary="a server of many streams beside the steps of its model: CPU, tokens/s, gaps, memory",
            keys=("part", "side", "streams", "threads"),
            takes=("config", "repeats", "names", "minutes", "tokens", "default_threads", "before"),
            may_skip=True,
        ),
        Case(
            name="gpu",
            summary="steps on an NVIDIA GPU: engines, providers, PyTorch and training (never run)",
            keys=("side", "batch", "tokens"),
            takes=("config", "repeats", "names"),
            folder="on_gpu",
            may_skip=True,
            resumable=True,
            precision="mixed",
        ),
        Case(
            name="triton-kernel",
            summary="TensorRT's attention kernel against PyTorch's on an NVIDIA GPU (never run)",
            keys=("shape", "side"),
            takes=(),
            folder="on_gpu",
            may_skip=True,
            engine="torch",
            precision="fp16",
        ),
        Case(
            name="sliding-window",
            summary="segments with memory against a window recomputed for each token (Table 9 of Dai et al.)",
            keys=("attention_length", "operators"),
            takes=LENGTH_OPTIONS,
            plots=True,
        ),
        Case(
            name="memory-forms",
            summary="one token in each of the three forms of memory",
            keys=("form", "mem_len", "operators"),
            takes=STEP_OPTIONS,
            claims=("ring_claim",),
        ),
        Case(
            name="precision",
            summary="one token with weights in each precision, and with memory in fp16 and in int8",
            keys=("precision", "memory_precision", "mem_len", "operators"),
            takes=(*STEP_OPTIONS, "trained"),
        ),
        Case(
            name="load",
            summary="from opening to the first token, and the memory that stays taken: artefact against run",
            keys=("side",),
        ),
        Case(
            name="export",
            summary="time and peak memory of an export, which includes the comparison with PyTorch",
            keys=("form",),
            takes=("config",),
        ),
        Case(
            name="traced",
            summary="the graph that is written against the one that PyTorch traces: nodes, export, one token",
            keys=("form", "exporter"),
            takes=("config", "repeats", "mem_len"),
        ),
        Case(
            name="training",
            summary="a training step with memory and without, in bf16, with spans, and of the public code",
            keys=("side", "mem_len"),
            takes=("config", "repeats", "references"),
            engine="torch",
        ),
        Case(
            name="text-quality",
            summary="held-out bits per byte of the stories: an artefact, n-grams and compressors",
            keys=("name",),
            folder="learning",
            takes=("parts", "artefact"),
            precision="int8",
        ),
        Case(
            name="music-memory",
            summary="held-out bits per event of the chorales: memory, no memory, windows, n-grams",
            keys=("name",),
            folder="learning",
            takes=("parts", "artefact", "repeats"),
            precision="int8-stored",
        ),
        Case(
            name="architectures",
            folder="learning",
            summary="six small models trained for the same CPU time: bits per byte",
            keys=("name", "side", "seed", "budget_seconds"),
            takes=("minutes", "text", "seeds", "references", "names"),
            engine="torch",
            resumable=True,
        ),
        Case(
            name="autocast-loss",
            folder="learning",
            summary="pairs of short trainings in fp32 and in bf16 from the same weights: their held-out bits",
            keys=("seed", "steps"),
            takes=("text", "seeds"),
            engine="torch",
            resumable=True,
        ),
        Case(
            name="validation",
            folder="learning",
            summary="what validations cost: a validated token against a trained one, and the share of a run",
            keys=("name",),
            takes=("repeats", "names"),
            engine="torch",
        ),
        Case(
            name="recipes",
            folder="learning",
            summary="published recipes, reduced or as they are, trained for a stated CPU time: their curves",
            keys=("name", "budget_seconds", "threads", "protocol"),
            takes=("minutes", "corpora", "out", "names"),
            plots=True,
            engine="torch",
            resumable=True,
        ),
    )
}
FLAGS = {
    "names": "only",
    "references": "reference",
    "trained": "run",
}  # options whose name on the command line is not that of the argument


def find_case(name: str) -> Case:
    """The case of that name; raises ConfigError for any other."""
    if name not in CASES:
        raise ConfigError(f"{name} is not a case; give one of {', '.join(CASES)}.")
    return CASES[name]


def refuse_unsuitable_options(case: Case, options: dict[str, object]) -> None:
    """Raises ConfigError for an option that the case does not take, and for two that exclude each other."""
    if "trained" in options and "config" in options:
        raise ConfigError("--run has a size of its own; leave out --config, or leave out --run.")
    for option in options:
        if option not in case.takes:
            flag = FLAGS.get(option, option).replace("_", "-")
            raise ConfigError(
                f"{case.name} does not take --{flag}; leave the option out, or measure the other cases "
                "without this one."
            )
