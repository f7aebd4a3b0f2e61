"""The same build as a command line for NVIDIA's own tool: for comparison, and for machines without Python."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path

from runtimes.contract.engine import PLAN, Profile
from runtimes.contract.spec import GRAPH, Spec
from xl_export.tensorrt.options import BuildOptions

LINE = "trtexec.txt"  # the file of the engine folder that holds the command line
TOOLS = {"tensorrt": "trtexec", "rtx": "tensorrt_rtx"}
LEVELS = {"same-capability": "sameComputeCapability", "ampere-plus": "ampere+"}


def trtexec_command(artefact: Path, spec: Spec, options: BuildOptions, layers: Mapping[str, int]) -> str:
    """The command line that builds the same plan from the artefact's graph; layers: those of the network, by
    kind.

    It differs from the build in two ways. The plugin is not in it, since its kernels are registered from
    Python while an engine is built; a plan that holds them needs no Python, and `trtexec --loadEngine` times
    it. And the tool cannot mark attention as decomposable: where the graph has ONNX's own Attention, the
    token profile takes up to 2 tokens, since TensorRT has a fused kernel for one to two tokens and none for
    exactly one.
    """
    words = [TOOLS[options.flavour], f"--onnx={artefact / GRAPH}", f"--saveEngine={PLAN}"]
    if options.flavour == "tensorrt":
        words.append("--stronglyTyped")
    for index, profile in enumerate(options.profiles(spec.rule)):
        if profile.name == "token" and "ATTENTION_INPUT" in layers:
            profile = dataclasses.replace(profile, tokens=(1, 1, 2))
        words.append(f"--profile={index}")
        words += [
            f"--{which}Shapes={shapes(spec, profile, at)}" for at, which in enumerate(("min", "opt", "max"))
        ]
    if spec.precision == "fp32":
        words.append("--noTF32")
    if options.refit:
        words.append("--refit")
    if options.version_compatible:
        words.append("--versionCompatible")
    if options.hardware != "same-gpu":
        words.append(f"--hardwareCompatibilityLevel={LEVELS[options.hardware]}")
    if options.workspace_mib is not None:
        words.append(f"--memPoolSize=workspace:{options.workspace_mib}M")
    if options.optimization_level is not None:
        words.append(f"--builderOptimizationLevel={options.optimization_level}")
    if options.timing_cache:
        words.append(f"--timingCacheFile={options.timing_cache}")
    if options.compute_capabilities:
        words.append(f"--computeCapabilities={','.join(options.compute_capabilities)}")
    return shlex.join(words)


def shapes(spec: Spec, profile: Profile, which: int) -> str:
    """Every input's shape in one profile as trtexec reads it: `name:1x2x3,name:…`. Names may hold dots."""
    axes = profile.axes(which)
    return ",".join(f"{fact.name}:{'x'.join(map(str, fact.sizes(**axes)))}" for fact in spec.inputs)
