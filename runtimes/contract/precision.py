"""Precision presets: what each promises, and what an export found it to cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from runtimes.base.errors import ConfigError

Precision = Literal["fp32", "fp16", "int8", "int4"]  # of the weights
MemoryPrecision = Literal["fp32", "fp16"]
Float = Literal["float32", "float16"]  # of the memory tensors
ENOUGH = 256  # tokens, to judge a limit by
MOST = 1e15  # of anything measured
QUANTISED: tuple[Precision, ...] = ("int8", "int4")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Largest difference in log-probability, nats, that `check` lets pass: from PyTorch with fp32 and fp16; with int8 and int4 from
# the machine that exported. There activations are rounded to int8 too, so that another order of additions (another processor,
# the fused kernel) moves some by a whole step: measured 0.054 at most and 0.004 in the mean. A wrong scale moves the mean.
TOLERANCES: dict[Precision, float] = {"fp32": 1e-4, "fp16": 2e-2, "int8": 0.5, "int4": 0.5}
MEAN_TOLERANCES: dict[Precision, float] = {
    "fp32": 1e-4,
    "fp16": 2e-2,
    "int8": 2e-2,
    "int4": 2e-2,
}  # of the mean difference
LIMITS: dict[Precision, float] = {
    "fp32": 0.0,
    "fp16": 0.002,
    "int8": 0.01,
    "int4": 0.05,
}  # bits per token above fp32


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a preset does on held-out text, beside the same model in fp32 on the same machine.

    tokens: predicted. bits_per_token, fp32_bits_per_token: of both. kl_nats: mean KL(fp32 || preset) of the next token.
    agreement: share of positions with the same likeliest token. num_bytes, fp32_num_bytes: of graph and weights.
    seconds_per_token, fp32_seconds_per_token: medians of single tokens with full memory, one row.
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
                f"measured on {self.tokens} tokens with agreement {self.agreement}; expected ≥ 1, and 0 to 1."
            )
        for name, figure in self.__dict__.items():  # negative divergences of almost nothing are rounding
            if not -1 <= figure <= MOST:
                raise ConfigError(
                    f"{name} was measured as {figure!s:.20}; expected 0 to {MOST:g}: take more bits."
                )

    @property
    def bits_lost(self) -> float:
        return self.bits_per_token - self.fp32_bits_per_token


def unmeasured(precision: Precision) -> str:
    """What a quantised artefact that was exported without a text does not promise."""
    return f"what {precision} loses was never measured and has no bound; export it again with --text FILE to measure it"


def verdict(precision: Precision, measured: Measured) -> str:
    """Whether what a preset loses is within its limit, where enough tokens were measured to say so."""
    limit = LIMITS[precision] or LIMITS["fp16"]  # fp32 weights with fp16 memory
    if measured.tokens < ENOUGH:
        return "too few tokens to judge"
    return f"{'within' if measured.bits_lost <= limit else 'BEYOND'} the limit of {limit}"


def sentence(precision: Precision, measured: Measured, *, stream: tuple[int, int] | None = None) -> str:
    """What a preset costs and gains, and whether that is within its limit.

    stream: bytes of a stream with memory in fp16, and of the same in fp32; None where memory is in fp32.
    """
    ms, fp32_ms = 1e3 * measured.seconds_per_token, 1e3 * measured.fp32_seconds_per_token
    name, streams = (
        (f"{precision} with fp16 memory", f"{per_stream(*stream)}; ") if stream else (precision, "")
    )
    return (
        f"{name}: {measured.bits_per_token:.4f} bits per token, {measured.bits_lost:+.4f} against fp32 "
        f"({verdict(precision, measured)}); KL {measured.kl_nats:.2g} nats, same likeliest token {measured.agreement:.1%}; "
        f"{measured.num_bytes / 1e6:,.2f} MB for {measured.fp32_num_bytes / 1e6:,.2f}; {streams}"
        f"{ms:.2f} ms a token for {fp32_ms:.2f}; {measured.tokens:,} held-out tokens"
    )


def per_stream(num_bytes: int, fp32_num_bytes: int) -> str:
    """What memory in fp16 makes of a stream's bytes."""
    return f"{num_bytes:,} bytes per stream for {fp32_num_bytes:,}"
