"""The same build as a command line for NVIDIA's own tool: for comparison, and for machines without Python.

Two more lines time the plan, one for each profile, on tokens of the reference in the middle of a stream. By
itself the tool fills integer inputs with numbers from -128 to 127 and times the first profile: tokens outside
the vocabulary, and positions at which nothing is visible.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from runtimes.contract.engine import PLAN, Profile
from runtimes.contract.reference import Reference
from runtimes.contract.spec import GRAPH, Spec
from xl_export.tensorrt.options import BuildOptions

LINE = "trtexec.txt"  # the file of the engine folder that holds the command line
TOOLS = {"tensorrt": "trtexec", "rtx": "tensorrt_rtx"}
LONGEST_STREAM = 1 << 40  # tokens
LEVELS = {"same-capability": "sameComputeCapability", "ampere-plus": "ampere+"}


def trtexec_command(artefact: Path, spec: Spec, options: BuildOptions, layers: Mapping[str, int]) -> str:
    """The command line that builds the same plan from the artefact's graph; layers: of the network, by kind.

    It differs from the build in three ways. It does not have the plugin, since its kernels are registered
    from Python while an engine is built; a plan that holds them needs no Python, and `trtexec --loadEngine`
    times it. It reads the graph without the changes of `expose_casts`. And the tool cannot mark attention as
    decomposable: if the graph has ONNX's own Attention, the token profile is up to 2 tokens, since TensorRT
    has a fused kernel for one to two tokens and none for exactly one.
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


def timing_commands(spec: Spec, options: BuildOptions, reference: Reference, folder: Path) -> list[str]:
    """The command lines that time a plan, run in the folder of the engine: one for each profile, at its usual
    size.

    Writes the integer inputs of each into the folder, as raw files. The memory is left to the tool, which
    fills it with random numbers: it has no influence on what is computed.
    """
    lines = []
    for index, profile in enumerate(options.profiles(spec.rule)):
        given = []
        for name, array in usual_inputs(spec, profile, reference).items():
            file = folder / f"{profile.name}.{name}.bin"
            array.tofile(file)
            given.append(f"{name}:{file.name}")
        words = [TOOLS[options.flavour], f"--loadEngine={PLAN}", f"--useProfile={index}"]
        words += [f"--shapes={shapes(spec, profile, 1)}", f"--loadInputs={','.join(given)}"]
        if profile.name == "token" and options.flavour == "tensorrt":
            words.append("--useCudaGraph")
        lines.append(shlex.join(words))
    return lines


def usual_inputs(spec: Spec, profile: Profile, reference: Reference) -> dict[str, np.ndarray]:
    """Integer inputs of a step of a profile's usual size, by name, at the position of `full_position`."""
    batch = profile.batch[1]
    length = profile.tokens[1]
    columns = np.arange(length + 1) % reference.tokens.shape[1]
    tokens = reference.tokens[np.arange(batch) % len(reference.tokens)][:, columns]
    rings = {state.row[1] for state in spec.state} if spec.linear_ring else set[int]()
    position = full_position(spec.rule.slots, rings)
    inputs = {
        "input_ids": tokens[:, :-1],
        "position_ids": np.tile(position + np.arange(length), (batch, 1)),
        "targets": tokens[:, 1:],
        "logit_rows": np.arange(1, batch + 1) * length - 1,
    }
    names = {fact.name for fact in spec.inputs}
    return {name: np.ascontiguousarray(x, np.int64) for name, x in inputs.items() if name in names}


def full_position(slots: int, rings: Collection[int]) -> int:
    """A position, at least `slots`, at which each ring begins again, so that none ends within the step.

    rings: their numbers of slots. If rings of many sizes begin together only at the start of a stream, or
    again beyond the longest one, it is 0. Native attention takes the same time there. The kernels of a plugin
    skip what is not visible, so their times are less meaningful for such models.
    """
    turn = math.lcm(*rings)
    return 0 if turn > LONGEST_STREAM else -(-slots // turn) * turn
