"""What a user may choose about an engine; the command line has an option for each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtimes.base.errors import ConfigError
from runtimes.contract.engine import NAMES, Attention, Flavour, Hardware, Profile, refuse_unordered
from runtimes.contract.rule import MemoryRule

TARGETS = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")  # that TensorRT-RTX builds for ahead of time


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """How an engine is built from an artefact.

    flavour: `tensorrt` builds and tunes on this machine's GPU; `rtx` builds anywhere, and compiles for the GPU on first use.
    attention: TensorRT's own kernels, or ours embedded in the plan. compute_capabilities: of the GPUs that an rtx engine
    runs on. batch, token_batch: least, usual and most rows of the segment and of the single-token profile; a token_batch of
    None is that of the segment, and with the plugin the usual one alone. tokens: the usual segment; the artefact's largest
    when None. hardware, version_compatible: run on more GPUs and on newer releases, at some cost in speed. refit: weights can
    be replaced. workspace_mib: scratch memory that tactics may use; all of the GPU's when None. optimization_level: 0 (quick)
    to 5 (thorough); TensorRT's own default when None. timing_cache: a file that makes later builds quicker.
    """

    flavour: Flavour = "tensorrt"
    attention: Attention = "native"
    compute_capabilities: tuple[str, ...] = ()
    batch: tuple[int, ...] = (1, 1, 8)
    token_batch: tuple[int, ...] | None = None
    tokens: int | None = None
    hardware: Hardware = "same-gpu"
    version_compatible: bool = False
    refit: bool = False
    workspace_mib: int | None = None
    optimization_level: int | None = None
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        name = NAMES[self.flavour]
        if self.flavour == "rtx":
            if self.attention == "plugin":
                raise ConfigError(
                    f"{name} takes no plugins from Python; give --attention native, or --flavour tensorrt."
                )
            if not self.compute_capabilities or not set(self.compute_capabilities) <= set(TARGETS):
                raise ConfigError(
                    f"--compute-capability is {','.join(self.compute_capabilities)[:40] or 'not given'}, and --flavour rtx "
                    f"needs it: give those of the GPUs that the engine is for, out of {', '.join(TARGETS)}, such as 8.6,8.9,12.0."
                )
            choices = (
                ("--hardware", self.hardware != "same-gpu"), ("--timing-cache", self.timing_cache is not None),
                ("--version-compatible", self.version_compatible),
            )  # fmt: skip
            if given := [option for option, chosen in choices if chosen]:
                raise ConfigError(
                    f"{given[0]} is for --flavour tensorrt; {name} compiles on the device: leave it out."
                )
            if self.refit:
                raise ConfigError(
                    f"--refit needs a GPU while {name} builds, and this builds ahead of time; leave it out."
                )
        elif self.compute_capabilities:
            raise ConfigError(
                f"--compute-capability is for --flavour rtx; {name} builds for the GPU of this machine: leave it out."
            )
        if self.attention == "plugin" and self.hardware == "ampere-plus":
            raise ConfigError(
                "--attention plugin embeds a kernel for one kind of GPU; leave --hardware out, or use native attention."
            )

    def profiles(self, rule: MemoryRule) -> tuple[Profile, Profile]:
        """One profile tuned for scoring segments, one for single tokens.

        The plugin's token profile has one batch size: TensorRT leaks a CUDA module at every change of shape
        (NVIDIA/TensorRT#4849).
        """
        usual = rule.segment if self.tokens is None else self.tokens
        if not 1 <= usual <= rule.segment:
            raise ConfigError(f"--tokens is {usual}; expected 1 to {rule.segment}, the artefact's segment.")
        token_batch = self.token_batch or ((self.batch[1],) * 3 if self.attention == "plugin" else self.batch)
        if self.attention == "plugin" and len(set(token_batch)) > 1:
            raise ConfigError(
                "--token-batch has a range and --attention plugin takes one size (NVIDIA/TensorRT#4849); give one number."
            )
        refuse_unordered("--batch", self.batch)
        refuse_unordered("--token-batch", token_batch)
        segment = Profile(name="segment", batch=self.batch, tokens=(1, usual, rule.segment))
        return segment, Profile(name="token", batch=token_batch, tokens=(1, 1, 1))
