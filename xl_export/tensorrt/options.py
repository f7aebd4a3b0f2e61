"""How an engine is built, which is also the options of `xl-export build`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from runtimes.base.errors import ConfigError
from runtimes.base.options import Option
from runtimes.base.ranges import POSITIVE, Range
from runtimes.base.records import refuse_out_of_range
from runtimes.contract.engine import NAMES, Attention, Flavour, Hardware, Profile, refuse_unordered
from runtimes.contract.precision import PRESETS, Precision
from runtimes.contract.rule import MemoryRule

# The compute capabilities that TensorRT-RTX builds for ahead of time.
TARGETS = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How an engine is built from an artefact."""

    flavour: Annotated[
        Flavour,
        Option(
            "--flavour",
            "tensorrt is TensorRT, which builds on the GPU that the engine is for. rtx is TensorRT-RTX, "
            "which builds on any machine; the engine is compiled on the device that opens it, and "
            "--compute-capability is needed.",
        ),
    ] = "tensorrt"
    attention: Annotated[
        Attention,
        Option(
            "--attention",
            "What computes attention. native is TensorRT's own kernels. plugin is the project's Triton "
            "kernels, embedded in the plan; it needs --flavour tensorrt and an artefact of `xl-export export "
            "--target tensorrt`.",
        ),
    ] = "native"
    compute_capabilities: tuple[str, ...] = ()
    """Compute capabilities of the GPUs that an rtx engine runs on."""
    batch: tuple[int, ...] = (1, 1, 8)
    """Least, usual and most rows of the segment profile."""
    token_batch: tuple[int, ...] | None = None
    """The same for the single-token profile. None for the batch of the segment profile, or with the plugin
    for its usual size only.
    """
    tokens: Annotated[
        Annotated[int, POSITIVE] | None,
        Option(
            "--tokens",
            "The usual segment length, for which kernels are timed. The default is the artefact's longest.",
        ),
    ] = None
    hardware: Annotated[
        Hardware,
        Option(
            "--hardware",
            "The GPUs that the engine runs on, at some cost in speed: only this model, all of its compute "
            "capability, or all from Ampere on. It needs --flavour tensorrt.",
        ),
    ] = "same-gpu"
    version_compatible: Annotated[
        bool,
        Option(
            "--version-compatible",
            "Let newer releases of the same major version run the engine, at some cost in speed. It needs "
            "--flavour tensorrt.",
        ),
    ] = False
    refit: Annotated[
        bool,
        Option("--refit", "Let the weights of the finished engine be replaced. It needs --flavour tensorrt."),
    ] = False
    workspace_mib: Annotated[
        Annotated[int, Range(1, 1 << 20, whole=True)] | None,
        Option(
            "--workspace-mib",
            "How much scratch memory, in MiB, TensorRT's kernels may use. The default is all of the GPU's "
            "memory.",
        ),
    ] = None
    optimization_level: Annotated[
        Annotated[int, Range(0, 5, whole=True)] | None,
        Option(
            "--optimization-level",
            "How long TensorRT searches for fast kernels: 0 is a quick build, 5 a thorough one. The default "
            "is TensorRT's own.",
        ),
    ] = None
    timing_cache: Annotated[
        Path | None,
        Option(
            "--timing-cache",
            "A file of measured kernels that makes later builds quicker. It is created, or extended. It "
            "needs --flavour tensorrt and --attention native.",
        ),
    ] = None

    def __post_init__(self) -> None:
        refuse_out_of_range(self)
        name = NAMES[self.flavour]
        if self.flavour == "rtx":
            if self.attention == "plugin":
                raise ConfigError(
                    f"--attention is plugin and {name} takes no plugins from Python; give --attention "
                    "native, or --flavour tensorrt."
                )
            unknown = [asked for asked in self.compute_capabilities if asked not in TARGETS]
            if unknown or not self.compute_capabilities:
                fault = (
                    f"has {unknown[0][:40]}, for which {name} builds nothing" if unknown else "is not given"
                )
                raise ConfigError(
                    f"--compute-capability {fault}: give capabilities of the engine's GPUs, out of "
                    f"{', '.join(TARGETS)}, such as 8.6,8.9,12.0."
                )
            for option, chosen in {
                "--hardware": self.hardware != "same-gpu",
                "--timing-cache": self.timing_cache is not None,
                "--version-compatible": self.version_compatible,
                "--refit": self.refit,
            }.items():
                if chosen:
                    raise ConfigError(
                        f"{option} is for --flavour tensorrt, and {name} builds without a GPU; leave it out."
                    )
        elif self.compute_capabilities:
            raise ConfigError(
                f"--compute-capability is for --flavour rtx, and {name} builds for the GPU of this machine; "
                "leave it out."
            )
        if self.attention == "plugin" and self.hardware == "ampere-plus":
            raise ConfigError(
                "--attention plugin embeds a kernel for one kind of GPU, and --hardware is ampere-plus; "
                "leave --hardware out, or give --attention native."
            )
        if self.attention == "plugin" and self.timing_cache is not None:
            # TensorRT names a tactic there by an id, which NVIDIA's template for plugins in Python leaves
            # empty: the number of a tactic from another release or GPU would be used again.
            raise ConfigError(
                "--timing-cache does not tell the kernels of --attention plugin apart between releases and "
                "GPUs; leave --timing-cache out, or give --attention native."
            )

    def profiles(self, rule: MemoryRule) -> tuple[Profile, Profile]:
        """The profile for segments and the one for single tokens; raises ConfigError if sizes do not rise
        or fit.

        With the plugin the token profile has one batch size, since TensorRT leaks a CUDA module at every
        change of its shape (NVIDIA/TensorRT#4849).
        """
        usual = rule.segment if self.tokens is None else self.tokens
        if not 1 <= usual <= rule.segment:
            raise ConfigError(f"--tokens is {usual}; expected 1 to {rule.segment}, the artefact's segment.")
        token_batch = self.token_batch or ((self.batch[1],) * 3 if self.attention == "plugin" else self.batch)
        if self.attention == "plugin" and len(set(token_batch)) > 1:
            raise ConfigError(
                f"--token-batch is {':'.join(map(str, token_batch))}, and --attention plugin takes one size "
                "(NVIDIA/TensorRT#4849); give one number."
            )
        refuse_unordered("--batch", self.batch)
        refuse_unordered("--token-batch", token_batch)
        segment = Profile(name="segment", batch=self.batch, tokens=(1, usual, rule.segment))
        return segment, Profile(name="token", batch=token_batch, tokens=(1, 1, 1))


def refuse_old_gpus(precision: Precision, capabilities: Iterable[str]) -> None:
    """Raises ConfigError if a GPU of one of these compute capabilities has no numbers of the precision."""
    oldest = PRESETS[precision].oldest_gpu
    for capability in capabilities:
        if float(capability) < oldest:
            raise ConfigError(
                f"the artefact has {precision} weights, which TensorRT takes from compute capability "
                f"{oldest} on, and the engine is for {capability}; export it with --precision int8."
            )
