"""Precision presets: what each of them promises, and what an export measured it to cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.base.errors import ConfigError
from runtimes.base.ranges import Range
from runtimes.base.records import refuse_out_of_range
from runtimes.base.sealed import Count

# Precisions of weights. int8-stored is in bytes only on disk: a session widens it to fp32 on loading.
Precision = Literal["fp32", "fp16", "int8-stored", "int8", "int4"]
MemoryPrecision = Literal["fp32", "fp16", "int8"]
Float = Literal["float32", "float16"]
MemoryType = Literal[Float, "int8"]  # of keys and values in memory
MIN_TOKENS = 256  # the smallest number of tokens by which a limit is judged
Measurement = Annotated[float, Range(-1, 1e15)]  # measured; a divergence slightly below 0 is rounding


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What is particular to a precision of the weights."""

    bits: int
    """Bits of each value of a large matrix."""
    rounds_activations: bool = False
    """Whether ONNX Runtime multiplies in integers, so activations are rounded to int8 too."""
    tolerance: float
    """The largest difference in log-probability, in nats, that `check` allows."""
    mean_tolerance: float
    """The same for the mean difference; a wrong scale moves the mean."""
    limit: float
    """The most bits per token that it may lose against fp32."""
    oldest_gpu: float = 0.0
    """The compute capability of the oldest GPU for which TensorRT accepts such weights."""


# With fp32 and fp16, answers are compared with PyTorch. Of 620 tokens drawn at random, a sound fp16 model has
# one that differs by 0.02, and 0.001 in the mean. With quantised weights, answers are compared with the same
# weights in fp32. int8-stored adds in fp32, as fp32 itself does. With int8 and int4, trained models differed
# by 0.18 at most and 0.024 in the mean, on tokens drawn at random. Engines round no activations: they have
# the tolerances of fp16 (see `runtimes.contract.spec.tolerances`).
PRESETS: dict[Precision, Preset] = {
    "fp32": Preset(bits=32, tolerance=1e-4, mean_tolerance=1e-4, limit=0.0),
    "fp16": Preset(bits=16, tolerance=5e-2, mean_tolerance=1e-2, limit=0.002),
    "int8-stored": Preset(bits=8, tolerance=1e-4, mean_tolerance=1e-4, limit=0.01),
    "int8": Preset(bits=8, rounds_activations=True, tolerance=0.5, mean_tolerance=5e-2, limit=0.01),
    "int4": Preset(
        bits=4, rounds_activations=True, tolerance=0.5, mean_tolerance=5e-2, limit=0.05, oldest_gpu=8.0
    ),
}
QUANTISED: tuple[Precision, ...] = tuple(name for name, preset in PRESETS.items() if preset.bits < 16)


@dataclass(frozen=True, kw_only=True)
class MemoryPreset:
    """What is particular to a precision of the memory."""

    dtype: MemoryType
    """Element type of keys and values."""
    rounds_like: Precision
    """Precision of weights that rounds as much: `check` has the same tolerances for both."""
    rounded_tolerances: tuple[float, float] | None = None
    """The largest and the mean difference that `check` allows from a reference whose memory is rounded in the
    same way; None if no reference has such memory.
    """
    limit: float
    """The most bits per token that it may lose against fp32."""

    @property
    def scaled(self) -> bool:
        """Whether each key and value has a scale, in a tensor of its own."""
        return ELEMENT_TYPES[self.dtype].scaled

    @property
    def tolerances(self) -> tuple[float, float]:
        """`rounded_tolerances`, or the tolerances of weights that round as much."""
        weights = PRESETS[self.rounds_like]
        return self.rounded_tolerances or (weights.tolerance, weights.mean_tolerance)


# A reference whose memory is in int8 too differs only where a value lies between two bytes, which may go
# either way. The trained model of stories differed by 0.0027 at most, and by 0.00006 in the mean.
MEMORY_PRESETS: dict[MemoryPrecision, MemoryPreset] = {
    "fp32": MemoryPreset(dtype="float32", rounds_like="fp32", limit=0.0),
    "fp16": MemoryPreset(dtype="float16", rounds_like="fp16", limit=0.002),
    "int8": MemoryPreset(dtype="int8", rounds_like="int8", rounded_tolerances=(2e-2, 2e-3), limit=0.002),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a preset on a text, and of the same model in fp32 on the same machine."""

    tokens: Annotated[int, Range(1, 2**53 - 1, whole=True)]
    """The number of tokens predicted."""
    bits_per_token: Measurement
    fp32_bits_per_token: Measurement
    kl_nats: Measurement
    """The mean KL(fp32 || preset) of the next token."""
    agreement: Annotated[float, Range(0, 1)]
    """The share of positions at which both find the same token likeliest."""
    num_bytes: Count
    """The size of graph and weights."""
    fp32_num_bytes: Count
    seconds_per_token: Measurement
    """The median of single tokens with full memory in one row."""
    fp32_seconds_per_token: Measurement
    drawn: bool = False
    """Whether the model drew the text itself, because the export was given none."""

    def __post_init__(self) -> None:
        try:
            refuse_out_of_range(self)
        except ConfigError as error:
            raise ConfigError(f"{str(error).rstrip('.')}: take a precision with more bits.") from error

    @property
    def bits_lost(self) -> float:
        return self.bits_per_token - self.fp32_bits_per_token


@dataclass(frozen=True, kw_only=True)
class OutputLoss:
    """How far an output of a step is from the same step in fp32."""

    largest: float = 0.0
    """The largest difference, as a share of the root mean square of the output."""
    rms: float = 0.0
    """The root mean square of the differences, as a share of the same."""
    changed: float | None = None
    """Share of ids that differ, for an output of ids, which has no distance."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """Measurements of a preset for a step that is no language model, and of the step in fp32 on the same
    machine.

    Its inputs are the random inputs of the artefact's reference.
    """

    tokens: Annotated[int, Range(1, 2**53 - 1, whole=True)]
    outputs: dict[str, OutputLoss]
    num_bytes: Count
    """The size of graphs and weights."""
    fp32_num_bytes: Count
    seconds_per_step: Measurement
    """The median of steps that are as short as the shortest of the reference."""
    fp32_seconds_per_step: Measurement


def named(precision: Precision, memory: MemoryPrecision) -> str:
    """The precisions of weights and memory in words, such as "int8 with fp16 memory"."""
    return precision if memory == "fp32" else f"{precision} with {memory} memory"


def verdict(precision: Precision, memory: MemoryPrecision, measured: Measured) -> str:
    """Whether the loss of a preset is within its limit, in words; a few tokens are not enough to judge it."""
    limit = max(PRESETS[precision].limit, MEMORY_PRESETS[memory].limit)
    if measured.tokens < MIN_TOKENS:
        return "too few tokens to judge"
    return f"{'within' if measured.bits_lost <= limit else 'BEYOND'} the limit of {limit}"


def sentence(
    precision: Precision, memory: MemoryPrecision, measured: Measured, *, stream: tuple[int, int]
) -> str:
    """What a preset costs and gains, and whether the loss is within its limit.

    stream: the bytes of a stream, and of the same stream with memory in fp32.
    """
    ms = 1e3 * measured.seconds_per_token
    fp32_ms = 1e3 * measured.fp32_seconds_per_token
    streams = "" if memory == "fp32" else f"{per_stream(*stream)}; "
    text = "tokens that the model drew; give --text FILE for a text of yours"
    return (
        f"{named(precision, memory)}: {measured.bits_per_token:.4f} bits per token, "
        f"{measured.bits_lost:+.4f} against fp32 ({verdict(precision, memory, measured)}); KL "
        f"{measured.kl_nats:.2g} nats, same likeliest token {measured.agreement:.1%}; "
        f"{measured.num_bytes / 1e6:,.2f} MB for {measured.fp32_num_bytes / 1e6:,.2f}; {streams}"
        f"{ms:.2f} ms a token for {fp32_ms:.2f}; {measured.tokens:,} "
        f"{text if measured.drawn else 'held-out tokens'}"
    )


def per_stream(num_bytes: int, fp32_num_bytes: int) -> str:
    """The bytes of a stream, and with its memory in fp32, as a part of a sentence."""
    return f"{num_bytes:,} bytes per stream for {fp32_num_bytes:,}"
