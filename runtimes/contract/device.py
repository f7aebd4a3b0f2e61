"""The names of devices: what `--device` accepts, and what a session computes on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from runtimes.base.errors import ConfigError

Kind = Literal["auto", "cpu", "cuda", "tensorrt", "tensorrt-rtx", "mps"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_INDEX = 63
# What each kind of folder computes on; `auto` is for all of them.
OF_ARTEFACTS: tuple[Kind, ...] = ("cpu", "cuda")
OF_RUNS: tuple[Kind, ...] = ("cpu", "cuda", "mps")
# Other words for a device that people use, and the name that it has here.
MEANT: dict[str, Kind] = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "trt": "tensorrt",
    "rtx": "tensorrt-rtx",
    "metal": "mps",
    "default": "auto",
}


@dataclass(frozen=True)
class Device:
    """A device by its kind, and the number of the GPU if a machine has several."""

    kind: Kind
    index: int = 0
    tf32: bool = False
    """Whether products of float32 round their factors to float16's 10 bits; only `cuda` with an artefact."""

    @classmethod
    def parse(cls, text: str | Device) -> Device:
        """The device of a name such as `cpu`, `cuda`, `cuda:1` or `cuda+tf32`; raises ConfigError for any
        other text.
        """
        if isinstance(text, Device):
            return text
        text = str(text)
        found = re.fullmatch(r"([a-z-]+)(?::(\d{1,4}))?(\+tf32)?", text, re.ASCII)
        name, number, tf32 = found.groups() if found else (text, None, None)
        kind = next((kind for kind in KINDS if kind == name), None)
        if kind is None:
            raise ConfigError(
                f"device is {text!r:.40}; {_meant(text)}expected one of {', '.join(KINDS)}, and a number "
                "after a colon for another GPU than the first, such as cuda:1."
            )
        if number is not None and kind != "cuda":
            raise ConfigError(
                f"device is {text!r:.40}, and only cuda has numbers; expected {kind}, or cuda:{number}."
            )
        if tf32 and kind != "cuda":
            raise ConfigError(f"device is {text!r:.40}, and +tf32 is for cuda; expected {kind} or cuda+tf32.")
        if int(number or 0) > MAX_INDEX:
            raise ConfigError(f"device is {text!r:.40}; expected a number of 0 to {MAX_INDEX}.")
        return cls(kind, int(number or 0), tf32=tf32 is not None)

    def __str__(self) -> str:
        name = f"{self.kind}:{self.index}" if self.index else self.kind
        return f"{name}+tf32" if self.tf32 else name


AUTO = Device("auto")
CPU = Device("cpu")


def _meant(text: str) -> str:
    from difflib import get_close_matches  # only a mistake needs it, and importing it takes time

    word = text.strip().lower().partition(":")[0]
    close = [MEANT[word]] if word in MEANT else get_close_matches(word, KINDS, n=1)
    return f"{close[0]} was probably meant; " if close else ""


def refuse_for_run(device: Device, folder: Path) -> None:
    """Raises ConfigError if PyTorch cannot compute a run on a device."""
    if device.tf32:
        raise ConfigError(
            f"device is {device} and {folder} is a run, and +tf32 is for artefacts; give "
            f"{str(device).partition('+')[0]}, or export the run."
        )
    if device.kind in (*OF_RUNS, "auto"):
        return
    raise ConfigError(
        f"device is {device} and {folder} is a run, which PyTorch computes on {_listed(OF_RUNS)}; give one "
        "of these, or export the run and give the artefact."
    )


def refuse_for_artefact(device: Device, folder: Path) -> None:
    """Raises ConfigError if ONNX Runtime has no such device for an artefact."""
    if device.kind in (*OF_ARTEFACTS, "auto"):
        return
    fix = f"give {_listed(OF_ARTEFACTS)}"
    if device.kind in ("tensorrt", "tensorrt-rtx"):
        fix += ", or build an engine of it with `xl-export build`"
    raise ConfigError(f"device is {device} and {folder} is an artefact, which ONNX Runtime computes; {fix}.")


def refuse_for_engine(device: Device, folder: Path, *, own: Kind) -> None:
    """Raises ConfigError unless a device is the one that an engine was built for, or `auto`."""
    if device.kind in (own, "auto"):
        return
    raise ConfigError(
        f"device is {device} and {folder} is an engine, which runs only with {own}; leave --device out, or "
        "give the artefact that it was built from."
    )


def _listed(kinds: tuple[Kind, ...]) -> str:
    return f"{', '.join(kinds[:-1])} or {kinds[-1]}"
