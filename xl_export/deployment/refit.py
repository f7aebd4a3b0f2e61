"""ENGINE + ARTEFACT → ENGINE: the weights of another artefact in the plan of an engine.

The engine must have been built with --refit, and the artefact must have the same step: the same model, rule,
form of memory and precision. TensorRT keeps the kernels that it has chosen, so no kernel is timed again.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.base.files import read_bytes
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.base.kinds import ENGINE
from runtimes.base.machine import driver_version, package_versions
from runtimes.base.sealed import file_facts
from runtimes.contract.engine import (
    NAMES,
    PLAN,
    EngineFacts,
    load_engine,
    rebuild_command,
    refuse_elsewhere,
    save_engine,
    side_files,
)
from runtimes.contract.sampling import read_sampling, write_sampling
from runtimes.contract.spec import GRAPH, Spec, load_spec, refuse_unless_one_onnx
from runtimes.sessions.onnx_runtime import refuse_foreign
from runtimes.sessions.tensorrt.device_memory import Cuda
from runtimes.sessions.tensorrt.module import fresh_log, load_tensorrt
from xl_export.tensorrt.network import native_attention, parser_errors, read_model, take_plugins

# Fields of a spec in which two artefacts of one step may differ. Whose answers a reference holds, and in
# which files the graph is, are not part of the step.
FREE = {
    *("source", "producer", "measured", "concern", "files", "answers", "storage", "identity"),
    *("memory_identity", "tolerance", "mean_tolerance", "drifts_from", "rounding", "mean_rounding"),
    *("original_difference", "trained_tokens"),
}


def refit(engine: Path, artefact: Path, out: Path, *, force: bool = False) -> EngineFacts:
    """Writes the plan of `engine` with other weights to `out`, and returns the facts of that engine.

    All hashes of both are verified first. Raises UserError if `out` exists (unless it holds an engine and
    `force` is set), if the engine was not built with --refit or does not run here, if the artefact has
    another step, and if TensorRT refuses the weights. `out` is then left as it was.
    """
    refuse_existing(out, ENGINE, force=force, sources=[engine, artefact])
    facts, before = load_engine(engine)
    spec = load_spec(artefact)
    refuse_unless_one_onnx(spec, artefact, what="a refit")
    refuse_other_steps(before, spec, engine, artefact)
    refuse_foreign(spec, artefact / GRAPH, read_bytes(artefact / GRAPH))
    if facts.flavour == "rtx" and not facts.refit:
        raise ConfigError(
            f"{engine} is an engine for {NAMES[facts.flavour]}, which is built ahead of time and cannot be "
            f"refitted; build one from {artefact} with `xl-export build`."
        )
    if not facts.refit:
        again = rebuild_command(engine, dataclasses.replace(facts, refit=True))
        raise ConfigError(
            f"{engine} was built without --refit, so its weights are fixed; build it again: {again}."
        )
    trt = load_tensorrt(facts.flavour)
    cuda = Cuda()
    refuse_elsewhere(facts, engine, version=trt.__version__, gpu=cuda.gpu)
    began = time.perf_counter()
    with atomic_folder(out, ENGINE, force=force, sources=[engine, artefact]) as folder:
        plan = refitted_plan(trt, fresh_log(trt), facts, engine / PLAN, artefact / GRAPH)
        (folder / PLAN).write_bytes(plan)
        for name in side_files(spec):
            shutil.copyfile(artefact / name, folder / name)
        made = dataclasses.replace(
            facts,
            artefact=spec.identity,
            seconds=time.perf_counter() - began,
            producer=package_versions(),
            driver_version=driver_version(),
            driver_cuda=cuda.driver_cuda,
            files={path.name: file_facts(path) for path in sorted(folder.iterdir())},
        )
        write_sampling(folder, read_sampling(artefact))
        return save_engine(folder, made)


def refuse_other_steps(before: Spec, after: Spec, engine: Path, artefact: Path) -> None:
    """Raises ConfigError unless two artefacts differ only in their weights, and names what differs."""
    mine = before.to_json()
    theirs = after.to_json()
    for name in sorted((mine.keys() | theirs.keys()) - FREE):
        if mine.get(name) != theirs.get(name):
            what = _difference(name, mine.get(name), theirs.get(name))
            raise ConfigError(
                f"{artefact} has another step than {engine}: {what}; build an engine of it with `xl-export "
                f"build {artefact} --out ENGINE --refit`."
            )


def _difference(name: str, mine: Any, theirs: Any) -> str:
    """The first field in which two JSON values differ, with both values, in words."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                return _difference(f"{name}.{key}", mine.get(key), theirs.get(key))
    return f"{name} is {theirs!s:.60}, and the engine's is {mine!s:.60}"


def refitted_plan(trt: Any, log: Any, facts: EngineFacts, plan: Path, graph: Path) -> bytes:
    """The bytes of a plan with the weights of a graph; raises ArtefactError with TensorRT's own reason."""
    name = NAMES[facts.flavour]
    runtime = trt.Runtime(log)
    # The plan of a version-compatible engine holds code for the host. Its hash was verified.
    runtime.engine_host_code_allowed = facts.version_compatible
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        raise ArtefactError(f"{name} cannot load {plan} ({log.last_error()}); build the engine again.")
    model = read_model(graph)
    if facts.attention == "plugin":
        take_plugins(model)
    else:
        model = native_attention(model, name, trt.__version__)
    refitter = trt.Refitter(engine, log)
    weights_parser = trt.OnnxParserRefitter(refitter, log)
    taken = weights_parser.refit_from_bytes(model.SerializeToString(), str(graph.resolve()))
    if not taken or not refitter.refit_cuda_engine():
        missing = ", ".join(sorted(refitter.get_missing_weights())[:3])
        reason = parser_errors(weights_parser) or (f"missing: {missing}" if missing else log.last_error())
        raise ArtefactError(
            f"{name} {trt.__version__} did not take the weights of {graph} ({reason}); build an engine "
            "of that artefact."
        )
    return bytes(memoryview(engine.serialize()))
