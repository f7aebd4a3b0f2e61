"""What a user chooses for an artefact: arguments of `export`, most of them of `trace` too, and the options of
`xl-export export`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from runtimes.base.errors import ConfigError
from runtimes.base.options import Option
from runtimes.base.ranges import Range
from runtimes.base.records import refuse_out_of_range
from runtimes.contract.engine import Attention
from runtimes.contract.memory import MAX_BATCH
from runtimes.contract.precision import MEMORY_PRESETS, QUANTISED, MemoryPrecision, Precision
from runtimes.contract.spec import Exporter, Spec, Storage, Target
from runtimes.contract.tensors import Form


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The choices, each within its range, and all fitting together; raises ConfigError for others."""

    exporter: Annotated[
        Exporter,
        Option(
            "--exporter",
            "graph writes the ONNX graph node by node. trace lets PyTorch trace the step, as xl_export.trace "
            "does; it needs onnxscript, and heads with learned spans keep the whole memory.",
        ),
    ] = "graph"
    memory: Annotated[
        Form | None,
        Option(
            "--memory",
            "Form of the memory. ring writes keys and values in place: the fastest, and the default. shift "
            "moves them at each step, for older opsets and for engines of models that cannot use a ring. "
            "hidden keeps the hidden states, as in the paper; it is slow.",
        ),
    ] = None
    target: Annotated[
        Target,
        Option(
            "--target",
            "The runtime of the graph. tensorrt: a float16 graph; sessions cut a segment at the end of the "
            "ring. web: only operators that browsers compute on the GPU (WebGPU). ONNX Runtime runs all "
            "three.",
        ),
    ] = "onnxruntime"
    attention: Annotated[
        Attention | None,
        Option(
            "--attention-as",
            "node: one operator for the attention of a layer. With --target tensorrt (the default there) "
            "`xl-export build` replaces it by standard operators or by the Triton kernels; otherwise a "
            "second graph, cuda.onnx, launches one kernel for each attention on the device cuda. operators: "
            "ONNX Attention, with --target tensorrt only; from 11.3 on, TensorRT has fused kernels for it "
            "that add in float32.",
        ),
    ] = None
    precision: Annotated[
        Precision | None,
        Option(
            "--precision",
            "Precision of the weights. fp16 and int8-stored make the file smaller; int8-stored is loaded as "
            "fp32 if the runtime has no fast int8. int8 and int4 also make large models faster and lose some "
            "accuracy. With --attention-as node, the device cuda computes in fp16 if the weights are in "
            "fp16. Default: fp32, or fp16 with --target tensorrt.",
        ),
    ] = None
    memory_precision: Annotated[
        MemoryPrecision | None,
        Option(
            "--memory-precision",
            "Precision of the memory. fp16 halves the bytes of a stream at no cost in speed with the fused "
            "CPU operator. int8 halves them again; it needs ring memory, and is slow without the fused CPU "
            "operator. Default: fp32, or fp16 with --precision fp16 and --attention-as node. With --target "
            "tensorrt it follows from --precision.",
        ),
    ] = None
    text: Annotated[
        Path | None,
        Option(
            "--text",
            "Held-out text on which the loss of a lower precision is measured. By default the test text of "
            "the run, or one that the model draws.",
        ),
    ] = None
    storage: Storage = "external"
    rows: Annotated[
        Annotated[int, Range(1, MAX_BATCH, whole=True)] | None,
        Option(
            "--rows",
            "Fix all sizes, for phones and runtimes such as MNN: each step has exactly this many rows, of "
            "--segment tokens unless --tokens is given. The memory is then shift.",
        ),
    ] = None
    tokens: Annotated[
        Collection[int] | None,
        Option(
            "--tokens",
            "Write a graph for each of these numbers of tokens, such as 1,16, over one file of "
            "weights. The largest is --segment. A step may then have any number of tokens up to it.",
        ),
    ] = None

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        if self.exporter == "trace":
            self._refuse_untraceable()
        elif self.rows is not None:
            self._refuse_unfixable()
        elif self.tokens is not None:
            raise ConfigError("--tokens is for a graph whose sizes are fixed; give --rows, or leave it out.")
        if self.attention and self.target == "web":
            raise ConfigError("--attention-as is not for --target web; leave one of them out.")
        if self.attention == "native" and self.target == "onnxruntime":
            raise ConfigError(
                "--attention-as operators is for --target tensorrt; leave it out, or give both."
            )
        if self.storage != "external" and self.target != "onnxruntime":
            raise ConfigError(
                f"--{self.storage} is for --target onnxruntime, and --target is {self.target}; leave out one "
                "of them."
            )
        if self.storage in ("ort", "fused-ort") and self.precision == "int8-stored":
            raise ConfigError(
                f"--{self.storage} writes int8-stored weights as fp32, because its converter computes what "
                f"loading would; give --precision int8, or leave out --{self.storage}."
            )
        if self.target == "web" and self.has_scaled_memory:
            raise ConfigError(
                f"WebGPU has no numbers of 8 bits, as a memory in {self.memory_precision} needs; give it in "
                "fp16, or another target than web: browsers compute other graphs in WebAssembly."
            )
        if self.target == "tensorrt" and self.precision == "int8-stored":
            raise ConfigError(
                "int8-stored weights are widened when ONNX Runtime loads the graph, and TensorRT keeps "
                "weights as they are stored; give int8, or another target than tensorrt."
            )
        if self.target == "tensorrt" and self.memory_precision is not None:
            raise ConfigError(
                f"a precision of the memory was given, {self.memory_precision}, and a graph for TensorRT has "
                "memory in fp16, or in fp32 with weights in fp32; leave it out."
            )

    @property
    def precisions(self) -> tuple[Precision, MemoryPrecision]:
        """The precisions of weights and memory."""
        if self.target != "tensorrt":
            # A graph for `cuda` that computes in fp16 has memory in fp16.
            halves = self.attention == "plugin" and self.precision == "fp16"
            return self.precision or "fp32", self.memory_precision or ("fp16" if halves else "fp32")
        precision = self.precision or "fp16"
        return precision, "fp32" if precision == "fp32" else "fp16"

    @property
    def has_scaled_memory(self) -> bool:
        """Whether each key and value in the memory has a scale."""
        return MEMORY_PRESETS[self.memory_precision or "fp32"].scaled

    def _refuse_unfixable(self) -> None:
        """Raises ConfigError for what a written graph of fixed sizes cannot have."""
        if self.target != "onnxruntime":
            raise ConfigError(
                f"--rows fixes the sizes of a graph, and --target {self.target} needs sizes that vary; leave "
                "out one of them."
            )
        if self.memory not in (None, "shift"):
            raise ConfigError(
                f"--rows is for memory that moves at each step, and --memory is {self.memory}; give --memory "
                "shift, or leave one of them out."
            )

    def _refuse_untraceable(self) -> None:
        """Raises ConfigError for what a traced step cannot have. Its memory has no scales, and quantised
        weights in a graph for engines need the names of the layers' matrices, which a trace lacks.
        """
        if self.target == "web":
            raise ConfigError(
                "target is web, whose graph has operators of WebGPU, and a traced step has PyTorch's own; "
                "give another target, which browsers compute in WebAssembly."
            )
        if self.attention:
            raise ConfigError(
                "--attention-as is for a graph that is written, and --exporter trace takes PyTorch's own "
                "attention; leave one of them out."
            )
        if self.storage == "fused-ort":
            raise ConfigError(
                "--fused-ort writes the graph for the fused operator, which --exporter trace does not write; "
                "leave one of them out."
            )
        if self.target == "tensorrt" and self.precision in QUANTISED:
            raise ConfigError(
                f"a traced step for TensorRT has its weights in fp16 or fp32, and {self.precision} was "
                "given; give one of the two."
            )
        if self.has_scaled_memory:
            raise ConfigError(
                f"a traced step has no scales for memory in {self.memory_precision}; give memory in fp16."
            )


def fixed_tokens(
    spec: Spec, rows: int | None, tokens: Collection[int] | None, step_tokens: int | None = None
) -> tuple[int, ...]:
    """The numbers of tokens that get a graph of their own; empty if there is one graph.

    step_tokens: as in a module. Raises ConfigError if a step of the spec cannot have so many rows, or be cut
    into steps of these numbers of tokens.
    """
    T = spec.rule.segment
    if rows is not None and spec.model.selective:
        raise ConfigError(
            f"rows is {rows}, and a vocabulary of {spec.model.vocab_size} tokens needs a graph whose sizes "
            "vary; leave rows out."
        )
    fix = "leave tokens out"
    if tokens is None:
        if step_tokens is None or step_tokens >= T:
            return ()
        tokens = (1, T)
        fix = f"give a rule with segment={step_tokens}"
    given = tokens if isinstance(tokens, Collection) else [tokens]
    if set(given) == {T} and (rows is not None or T == 1):
        return ()
    if not all(isinstance(count, int) and 1 <= count <= T for count in given) or not {1, T} <= set(given):
        raise ConfigError(
            f"tokens is {listed(given)} and segment is {T}; expected 1, {T} and perhaps numbers between them"
            f"{'' if rows is None else f', or only {T}'}."
        )
    counts = tuple(sorted(set(given)))
    if step_tokens and (uneven := [n for n in counts if n > step_tokens and n % step_tokens]):
        raise ConfigError(
            f"the module has step_tokens={step_tokens}, of which {uneven[-1]} is no multiple; give a segment "
            "that is."
        )
    if not spec.rule.cuts_change_nothing:
        raise ConfigError(
            f"tokens is {listed(counts)}, so a session cuts steps, and under the mask {spec.rule.mask} the "
            f"answers depend on the cuts; give the mask same-length, or {fix}."
        )
    if spec.target == "tensorrt" or spec.storage != "external":
        other = "target is tensorrt" if spec.target == "tensorrt" else f"storage is {spec.storage}"
        raise ConfigError(
            f"tokens is {listed(counts)} and {other}, which has one graph; leave one of them out, or {fix}."
        )
    return counts


def listed(counts: Collection[int]) -> str:
    return ", ".join(map(str, counts))
