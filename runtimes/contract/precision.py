"""Precision presets: what each of them promises, and what an export measured it to cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from runtimes.base.errors import ConfigError

# Of the weights. int8-stored is in bytes on disk alone: a session widens it to fp32 as it loads the graph.
# fp8 is for engines alone.
Precision = Literal["fp32", "fp16", "int8-stored", "int8", "int4", "fp8"]
MemoryPrecision = Literal["fp32", "fp16"]
Float = Literal["float32", "float16"]  # of the memory tensors
MIN_TOKENS = 256  # the smallest number of tokens by which a limit is judged
MAX_FIGURE = 1e15  # of anything measured
QUANTISED: tuple[Precision, ...] = ("int8-stored", "int8", "int4", "fp8")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# The largest difference in log-probability, in nats, that `check` lets pass. With fp32 and fp16 it is the
# difference from PyTorch. Of 620 tokens drawn at random, a sound fp16 model has one that differs by 0.02, and
# 0.001 in the mean. With quantised weights it is the difference from the same weights in fp32. int8-stored
# adds in fp32, as fp32 itself does. With int8 and int4 activations are rounded to int8 too: trained models
# differed by 0.18 at most and 0.024 in the mean, on tokens drawn at random. A wrong scale moves the mean,
# which has a tolerance of its own. Engines round no activations: they have the limits of fp16 (see `Spec`).
TOLERANCES: dict[Precision, float] = {
    "fp32": 1e-4,
    "fp16": 5e-2,
    "int8-stored": 1e-4,
    "int8": 0.5,
    "int4": 0.5,
    "fp8": 0.5,
}
MEAN_TOLERANCES: dict[Precision, float] = {
    "fp32": 1e-4,
    "fp16": 1e-2,
    "int8-stored": 1e-4,
    "int8": 5e-2,
    "int4": 5e-2,
    "fp8": 5e-2,
}
# Of older artefacts, whose reference holds answers of the machine that exported. Another machine, or the
# fused operator, rounds some activations otherwise. The most that was measured is 0.0186 in the mean.
OLDER_MEAN_TOLERANCES = MEAN_TOLERANCES | {"int8": 2e-2, "int4": 2e-2, "fp8": 2e-2}
# The largest number of bits per token that a preset may lose against fp32.
LIMITS: dict[Precision, float] = {
    "fp32": 0.0,
    "fp16": 0.002,
    "int8-stored": 0.01,
    "int8": 0.01,
    "int4": 0.05,
    "fp8": 0.02,
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures of a preset on held-out text, and of the same model in fp32 on the same machine.

    tokens: the number of tokens predicted. kl_nats: the mean KL(fp32 || preset) of the next token. agreement:
    the share of positions at which both find the same token likeliest. num_bytes: the size of graph and
    weights. seconds_per_token: the median of single tokens with full memory in one row.
    """

    tokens: int
    bits_per_token: float
    fp32_bits_per_token: float
    kl_nats: float
    agreement: float
    num_bytes: int
    fp32_num_bytes: int
    seconds_per_token: float
    fp32_seconds_per_token: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.agreement <= 1:
            raise ConfigError(
                f"measured on {self.tokens} tokens with agreement {self.agreement}; expected at least 1 "
                "token and an agreement from 0 to 1."
            )
        for name, figure in self.__dict__.items():  # a divergence slightly below 0 is rounding
            if not -1 <= figure <= MAX_FIGURE:
                raise ConfigError(
                    f"{name} was measured as {figure!s:.20}; expected 0 to {MAX_FIGURE:g}: take a precision "
                    "with more bits."
                )

    @property
    def bits_lost(self) -> float:
        return self.bits_per_token - self.fp32_bits_per_token


def unmeasured(precision: Precision) -> str:
    """What is not known of a quantised artefact that was exported without a text, as a part of a sentence."""
    return (
        f"what {precision} loses was never measured and has no bound; "
        "export it again with --text FILE to measure it"
    )


def verdict(precision: Precision, measured: Measured) -> str:
    """Whether the loss of a preset is within its limit, in words; a few tokens are not enough to judge it."""
    limit = LIMITS[precision] or LIMITS["fp16"]  # fp32 weights are measured only with fp16 memory
    if measured.tokens < MIN_TOKENS:
        return "too few tokens to judge"
    return f"{'within' if measured.bits_lost <= limit else 'BEYOND'} the limit of {limit}"


def sentence(precision: Precision, measured: Measured, *, stream: tuple[int, int] | None = None) -> str:
    """What a preset costs and gains, and whether the loss is within its limit.

    stream: the bytes of a stream with memory in fp16, and those of the same stream in fp32; None where memory
    is in fp32.
    """
    ms, fp32_ms = 1e3 * measured.seconds_per_token, 1e3 * measured.fp32_seconds_per_token
    name, streams = (
        (f"{precision} with fp16 memory", f"{per_stream(*stream)}; ") if stream else (precision, "")
    )
    return (
        f"{name}: {measured.bits_per_token:.4f} bits per token, {measured.bits_lost:+.4f} against fp32 "
        f"({verdict(precision, measured)}); KL {measured.kl_nats:.2g} nats, same likeliest token "
        f"{measured.agreement:.1%}; {measured.num_bytes / 1e6:,.2f} MB for "
        f"{measured.fp32_num_bytes / 1e6:,.2f}; {streams}"
        f"{ms:.2f} ms a token for {fp32_ms:.2f}; {measured.tokens:,} held-out tokens"
    )


def per_stream(num_bytes: int, fp32_num_bytes: int) -> str:
    """The bytes of a stream with memory in fp16 and in fp32, as a part of a sentence."""
    return f"{num_bytes:,} bytes per stream for {fp32_num_bytes:,}"
