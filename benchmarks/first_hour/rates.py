"""What a GPU can do at best per second, as the step `limits` has measured it, and the limit that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# The names under which the step `limits` keeps its rates.
COPY, HALVES, SINGLES = "bytes per second", "fp16 multiply-adds per second", "fp32 multiply-adds per second"


class HasSeries(Protocol):
    @property
    def series(self) -> dict[str, tuple[float, ...]]: ...


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes read and written by a large copy, and multiply-adds of large products; None if not measured."""

    copy: float | None = None
    halves: float | None = None
    singles: float | None = None

    @classmethod
    def of(cls, result: HasSeries | None) -> Rates:
        """The rates in the result of the step `limits`; unknown rates where that step was not run."""
        series = {} if result is None else result.series
        best = {name: max(series[name]) for name in (COPY, HALVES, SINGLES) if series.get(name)}
        return cls(copy=best.get(COPY), halves=best.get(HALVES), singles=best.get(SINGLES))

    def limit(
        self, num_bytes: float | None, multiply_adds: float | None, *, halves: bool = True
    ) -> tuple[float | None, str]:
        """The least milliseconds of a call, and whether `reading` or `computing` gives it.

        It is None, by `unknown`, where neither can be said.
        """
        products = self.halves if halves else self.singles
        found = []
        if num_bytes is not None and self.copy:
            found.append((num_bytes / self.copy * 1e3, "reading"))
        if multiply_adds is not None and products:
            found.append((multiply_adds / products * 1e3, "computing"))
        return max(found) if found else (None, "unknown")
