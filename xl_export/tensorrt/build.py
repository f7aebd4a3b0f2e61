"""ARTEFACT → ENGINE: `build(artefact, out, options)` makes a folder with a TensorRT plan and the facts that
prove it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError, ConfigError, UserError
from runtimes.base.files import atomic_file, read_bytes, refuse_unwritable
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.base.kinds import ENGINE
from runtimes.base.machine import driver_version, package_versions
from runtimes.base.sealed import file_facts
from runtimes.contract.engine import (
    NAMES,
    PLAN,
    EngineFacts,
    Gpu,
    Profile,
    TacticFacts,
    save_engine,
    side_files,
)
from runtimes.contract.precision import QUANTISED
from runtimes.contract.reference import load_reference
from runtimes.contract.sampling import read_sampling, write_sampling
from runtimes.contract.spec import GRAPH, Spec, load_language_model, refuse_unless_one_onnx
from runtimes.contract.tensors import TensorSpec
from runtimes.sessions.onnx_runtime import refuse_foreign
from runtimes.sessions.tensorrt.device_memory import Cuda
from runtimes.sessions.tensorrt.module import fresh_log, load_tensorrt
from xl_export.tensorrt.network import Parsed, parse, read_model
from xl_export.tensorrt.options import BuildOptions, refuse_old_gpus
from xl_export.tensorrt.progress import held_interrupt, make_monitor
from xl_export.tensorrt.trtexec import LINE, timing_commands, trtexec_command

LAYERS = "layers.json"  # what became of the network in the plan; only if a GPU built it


def build(
    artefact: Path | str, out: Path | str, options: BuildOptions, *, force: bool = False
) -> EngineFacts:
    """Builds an engine into the folder `out`, and returns its facts, which `build.json` holds.

    Raises UserError when `out` exists (unless it holds an engine and `force` is set), when TensorRT is not
    installed, when the artefact is damaged or of a form that engines do not support, and when TensorRT
    refuses the graph. `out` is then left as it was.
    """
    artefact = Path(artefact)
    out = Path(out)
    refuse_existing(out, ENGINE, force=force, sources=[artefact])
    spec = load_language_model(artefact)
    refuse_artefact(spec, artefact)
    profiles = options.profiles(spec.rule)
    if cache := options.timing_cache:  # a build takes minutes, so this is tested first; any suffix will do
        refuse_unwritable(cache, option="--timing-cache", suffixes=(cache.suffix,))
    trt, log, gpu = start_tensorrt(spec, options)
    began = time.perf_counter()
    tactics = chosen_tactics(artefact, spec, profiles, options)
    with atomic_folder(out, ENGINE, force=force, sources=[artefact]) as folder:
        parsed = parse(trt, log, artefact, attention=options.attention, name=NAMES[options.flavour])
        (folder / PLAN).write_bytes(serialize(trt, log, parsed, spec, profiles, options))
        if gpu:  # inspecting a plan needs a GPU
            (folder / LAYERS).write_text(layer_information(trt, log, (folder / PLAN).read_bytes()))
        for name in side_files(spec):
            shutil.copyfile(artefact / name, folder / name)
        lines = [trtexec_command(artefact, spec, options, parsed.layers)]
        lines += timing_commands(spec, options, load_reference(artefact, spec), folder)
        (folder / LINE).write_text("".join(f"{line}\n" for line in lines))
        facts = EngineFacts(
            artefact=spec.identity,
            flavour=options.flavour,
            version=trt.__version__,
            attention=options.attention,
            compute_capabilities=options.compute_capabilities if gpu is None else (gpu.compute_capability,),
            gpu=gpu,
            hardware=options.hardware if gpu else "same-capability",
            version_compatible=options.version_compatible,
            refit=options.refit,
            profiles=profiles,
            layers=parsed.layers,
            types=parsed.types,
            plugin_layers=parsed.plugin_layers,
            seconds=time.perf_counter() - began,
            producer=package_versions(),
            files={path.name: file_facts(path) for path in sorted(folder.iterdir())},
            driver_version=driver_version() if gpu else None,
            driver_cuda=Cuda().driver_cuda if gpu else None,
            tactics=tactics,
        )
        write_sampling(folder, read_sampling(artefact))
        return save_engine(folder, facts)


def chosen_tactics(
    artefact: Path, spec: Spec, profiles: tuple[Profile, ...], options: BuildOptions
) -> tuple[TacticFacts, ...]:
    """The plugin's kernels that the build offers TensorRT, timed on this GPU; none without the plugin."""
    if options.attention != "plugin":
        return ()
    from xl_export.tensorrt.kernels.driver import Driver
    from xl_export.tensorrt.kernels.timing import attention_shapes, time_shape
    from xl_export.tensorrt.plugin import use_choices

    driver = Driver()
    shapes = attention_shapes(read_model(artefact / GRAPH), spec, profiles)
    choices = [time_shape(driver, shape) for shape in shapes]
    use_choices(choices)
    return tuple(choice.facts for choice in choices)


def layer_information(trt: Any, log: Any, plan: bytes) -> str:
    """TensorRT's report on every layer of a plan that was just built here, as JSON."""
    runtime = trt.Runtime(log)
    runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ArtefactError(
            f"TensorRT {trt.__version__} cannot load the plan that it has built ({log.last_error()}); report "
            "this."
        )
    inspector = engine.create_engine_inspector()
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON)) + "\n"


def start_tensorrt(spec: Spec, options: BuildOptions) -> tuple[Any, Any, Gpu | None]:
    """TensorRT's module, its log, and the GPU that it builds on; None for a build without one.

    The plugins are registered if the options want them. Raises UserError if the GPU does not support the
    artefact.
    """
    trt = load_tensorrt(options.flavour)
    cuda = Cuda() if options.flavour == "tensorrt" else None
    gpu = cuda.gpu if cuda else None
    refuse_old_gpus(spec.precision, (gpu.compute_capability,) if gpu else options.compute_capabilities)
    log = fresh_log(trt)
    if options.attention == "plugin":
        from xl_export.tensorrt.plugin import refuse_unfit, register_plugins

        assert cuda is not None, "the plugin is not for engines built ahead of time"
        refuse_unfit(spec, cuda.gpu, version=trt.__version__)
        register_plugins(cuda.gpu, multiprocessors=cuda.multiprocessors)
    return trt, log, gpu


def refuse_artefact(spec: Spec, artefact: Path) -> None:
    """Raises ConfigError for an artefact whose graph has operators that TensorRT does not have, and
    ArtefactError as `refuse_foreign` does: TensorRT would read any file that a graph names.
    """
    refuse_unless_one_onnx(spec, artefact, what="TensorRT")
    refuse_foreign(spec, artefact / GRAPH, read_bytes(artefact / GRAPH))
    reason = None
    if spec.circular and not spec.linear_ring:
        reason = "a ring that is written across its end, and TensorRT has no circular TensorScatter"
    elif spec.precision in QUANTISED and spec.target != "tensorrt":
        reason = f"{spec.precision} weights, whose operators only ONNX Runtime has"
    if reason:
        raise ConfigError(f"{artefact} has {reason}; export it with `xl-export export --target tensorrt`.")


def serialize(
    trt: Any,
    log: Any,
    parsed: Parsed,
    spec: Spec,
    profiles: tuple[Profile, ...],
    options: BuildOptions,
    *,
    inputs: Sequence[TensorSpec] | None = None,
) -> memoryview:
    """The plan of a parsed network; raises ArtefactError with TensorRT's own reason if it fails.

    inputs: of the network, if they differ from the spec's.
    """
    config = parsed.builder.create_builder_config()
    for index, profile in enumerate(profiles):
        number = config.add_optimization_profile(optimization_profile(parsed.builder, spec, profile, inputs))
        assert number == index, f"TensorRT refused the {profile.name} profile: {log.last_error()}"
    configure(trt, config, spec, options)
    cache = read_timing_cache(config, options.timing_cache) if options.timing_cache else None
    with held_interrupt() as held:
        config.progress_monitor = make_monitor(trt, held)
        plan = parsed.builder.build_serialized_network(parsed.network, config)
    if plan is None:
        raise ArtefactError(
            f"{NAMES[options.flavour]} {trt.__version__} could not build the engine ({log.last_error()}); "
            "give a smaller --batch, a larger --workspace-mib or the other --attention."
        )
    if cache is not None and options.timing_cache:
        with atomic_file(options.timing_cache) as temporary:
            temporary.write_bytes(memoryview(config.get_timing_cache().serialize()))
    return memoryview(plan)


def optimization_profile(
    builder: Any, spec: Spec, profile: Profile, inputs: Sequence[TensorSpec] | None = None
) -> Any:
    """A profile as TensorRT's own object, with the least, usual and most shape of every input."""
    made = builder.create_optimization_profile()
    for fact in spec.inputs if inputs is None else inputs:
        made.set_shape(fact.name, *(fact.sizes(**profile.axes(which)) for which in range(3)))
    return made


def configure(trt: Any, config: Any, spec: Spec, options: BuildOptions) -> None:
    """Sets a builder's configuration from the options."""
    flags = {
        trt.BuilderFlag.REFIT: options.refit,
        trt.BuilderFlag.VERSION_COMPATIBLE: options.version_compatible,
        # The products of fp32 artefacts are computed in fp32: with TensorFloat-32 they would miss their
        # tolerance.
        trt.BuilderFlag.TF32: spec.precision != "fp32",
    }
    for flag, wanted in flags.items():
        config.set_flag(flag) if wanted else config.clear_flag(flag)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # so that profilers name every layer
    if options.workspace_mib is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.hardware != "same-gpu":
        level = {"same-capability": "SAME_COMPUTE_CAPABILITY", "ampere-plus": "AMPERE_PLUS"}[options.hardware]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    if options.compute_capabilities:
        config.num_compute_capabilities = len(options.compute_capabilities)
        for index, capability in enumerate(options.compute_capabilities):
            config.set_compute_capability(
                getattr(trt.ComputeCapability, "SM" + capability.replace(".", "")), index
            )


def read_timing_cache(config: Any, path: Path) -> Any:
    """The timing cache of a file, or an empty one if the file does not exist yet.

    Raises UserError for a cache that another TensorRT or another GPU wrote.
    """
    cache = config.create_timing_cache(read_bytes(path) if path.exists() else b"")
    if cache is None or not config.set_timing_cache(cache, False):
        raise UserError(
            f"{path} is not a timing cache of this TensorRT and GPU; remove it, or give another "
            "--timing-cache."
        )
    return cache
