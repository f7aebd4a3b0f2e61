"""The session over an engine of TensorRT or TensorRT-RTX: the memory stays on the GPU, and PyTorch is not
needed.

A ring is written in place: one set of buffers for each stream, bound once as input and output, and one CUDA
graph for single tokens. Shift memory has two sets of buffers that change places after a step, because there
TensorRT does not allow one buffer to be input and output (NVIDIA/TensorRT#4681). All work is queued on one
CUDA stream, and a step returns when its work is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.records import to_json
from runtimes.base.sealed import read_verified, refuse_other_identity
from runtimes.contract.device import AUTO, Device, Kind, refuse_for_engine
from runtimes.contract.engine import (
    NAMES,
    PLAN,
    EngineFacts,
    load_engine,
    rebuild_command,
    refuse_elsewhere,
)
from runtimes.contract.memory import Memory
from runtimes.contract.session import Paths
from runtimes.contract.spec import BUILD, VOCAB, Spec
from runtimes.contract.vocabulary import Vocab, load_vocab
from runtimes.sessions.description import describe_spec
from runtimes.sessions.graph import GraphSession, Positions, Step, in_pieces
from runtimes.sessions.tensorrt.bound import Bound, Context
from runtimes.sessions.tensorrt.device_memory import Cuda
from runtimes.sessions.tensorrt.module import fresh_log, load_tensorrt
from runtimes.sessions.tensorrt.padding import Padding
from runtimes.sessions.tensorrt.paths import CAPTURED, PLAIN, engine_paths, path_name
from runtimes.sessions.tensorrt.runtime_cache import RuntimeCache

TYPES: dict[str, str] = {kind.tensorrt: name for name, kind in ELEMENT_TYPES.items()}


class TrtSession(GraphSession):
    """The session protocol (see `runtimes.contract.session.Session`) over one engine."""

    logits_while_scoring: ClassVar[Positions] = "last"  # the profiles have no room for empty tensors

    def __init__(self, facts: EngineFacts, spec: Spec, vocab: Vocab, folder: Path) -> None:
        super().__init__(spec, vocab, facts.identity)
        self.facts = facts
        self.folder = folder
        self._trt = load_tensorrt(facts.flavour)
        self.cuda = Cuda()
        refuse_elsewhere(facts, folder, version=self._trt.__version__, gpu=self.cuda.gpu)
        self._log = fresh_log(self._trt)
        try:
            self._runtime = self._trt.Runtime(self._log)
        except TypeError as error:  # what the bindings make of a null pointer
            raise ArtefactError(
                f"{NAMES[facts.flavour]} cannot start on this GPU ({self._log.last_error()}); update the "
                "GPU's driver."
            ) from error
        self._engine = self._load(folder / PLAN)
        self._verify_signature()
        self._cache = RuntimeCache(facts.identity, self.cuda.gpu)
        self._contexts = [self._context(index) for index in range(len(facts.profiles))]
        captured = [context.profile.name for context in self._contexts if context.captured]
        self._paths = engine_paths(facts, spec, captured=captured)
        # Only a plugin suffers from a change of shapes, and padding costs the time of a longer segment.
        self._padding = Padding(spec, facts.profiles[0]) if facts.attention == "plugin" else None

    @property
    def computed_by(self) -> str:
        return f"{NAMES[self.facts.flavour]} engine"

    @property
    def paths(self) -> Paths:
        """Each profile, captured and not, in each direction of the buffers, for each number of logits."""
        return self._paths

    @classmethod
    def describe(cls, folder: Path) -> dict[str, Any]:
        """The facts of the engine in a folder; needs no TensorRT."""
        facts, spec = load_engine(folder)
        return describe_spec(spec, folder) | {
            "kind": "engine",
            "identity": facts.identity,
            "computed_by": f"{NAMES[facts.flavour]} engine",
            "files": {name: to_json(file) for name, file in facts.files.items()},
            "engine": to_json(facts),
            "producer": spec.producer | facts.producer,
        }

    @classmethod
    def open(
        cls, folder: Path, *, threads: int | None = None, device: Device = AUTO, identity: str | None = None
    ) -> TrtSession:
        """The session over an engine folder.

        Every hash is verified, and that the engine is for this TensorRT and this GPU, before anything is
        loaded. Raises ArtefactError if one of these does not hold, StreamError for `threads`, which
        engines do not have, and ConfigError for a device that is not the engine's.
        """
        if threads is not None:
            raise StreamError(f"threads is {threads} and {folder} runs on the GPU; leave --threads out.")
        facts, spec = load_engine(folder)
        refuse_other_identity(folder / BUILD, facts.identity, identity)
        own: Kind = "tensorrt-rtx" if facts.flavour == "rtx" else "tensorrt"
        refuse_for_engine(device, folder, own=own)
        return cls(facts, spec, load_vocab(folder / VOCAB), folder)

    def most_rows(self, tokens: int) -> int:
        fitting = [
            profile for profile in self.facts.profiles if profile.tokens[0] <= tokens <= profile.tokens[2]
        ]
        return min(super().most_rows(tokens), max((profile.batch[2] for profile in fitting), default=1))

    def start(self, batch: int) -> Memory:
        memory = super().start(batch)
        if batch > self.facts.largest_batch:
            raise StreamError(
                f"batch is {batch}; this engine takes at most {self.facts.largest_batch}: use a smaller "
                f"batch, or build it with a larger --batch: {rebuild_command(self.folder, self.facts)}."
            )
        return memory

    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        bound = self._bound(memory)
        wide = self._padding.widen(inputs, outputs, bound.history) if self._padding else None
        length = inputs["input_ids"].shape[1]
        if wide is None and self._padding and self._padding.rings and not self._padding.fits(length):
            pieces = [slice(at, at + 1) for at in range(length)]
            for part, answers in in_pieces(self.spec, inputs, outputs, pieces, empty_rows=False):
                self._run(part, answers, memory, bound)
        elif wide is None:
            self._run(inputs, outputs, memory, bound)
        else:
            self._run(wide.inputs, wide.outputs, memory, bound)
            wide.copy_to(outputs)
            # What is not finite in padding stays in the memory.
            if "logit_rows" not in inputs and not np.isfinite(wide.outputs["logits"][:, -1]).all():
                memory.unsure = True
        if self._padding:
            bound.history.note(inputs, widened=wide is not None)

    def _run_whole(self, step: Step, memory: Memory) -> None:
        if self._padding:
            self._bound(memory).history.begin(memory.positions, memory.positions + step.counts)
        super()._run_whole(step, memory)

    def _run(
        self,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
        memory: Memory,
        bound: Bound,
    ) -> None:
        """Runs the graph once over inputs of a shape that a profile has."""
        context = self._context_for(inputs["input_ids"])
        buffers = bound.buffers(inputs, outputs)
        for name, array in inputs.items():
            buffers.inputs[name].pinned.host[...] = array
        # Within one context the shapes of inputs and state stay set until another step needs others.
        context.shape({name: array.shape for name, array in inputs.items()} | bound.shapes)
        if context.captured and bound.warm == context.serial:
            # The buffers' addresses are in the graph, so new values need only be in the pinned arrays.
            self.cuda.launch(bound.graph(context, buffers))
            how = CAPTURED
        else:
            how = PLAIN
            bound.queue(context, buffers)
            bound.warm = context.serial if context.captured else bound.warm
        self.begins()  # the device is already computing
        self.cuda.synchronize()
        for name, array in outputs.items():
            array[...] = buffers.outputs[name].pinned.host
        self._paths.taken.add(path_name(self.spec, context.profile, how, bound.direction, inputs))
        bound.advance(memory)

    def _bound(self, memory: Memory) -> Bound:
        bound = memory.binding
        if not isinstance(bound, Bound) or not bound.serves(self, memory):
            memory.binding = bound = Bound(self, self.cuda, memory)
        return bound

    def _context_for(self, tokens: np.ndarray) -> Context:
        """The context of the narrowest profile that accepts tokens [B, T]: the last profiles are the
        narrowest.
        """
        batch, length = tokens.shape
        for context in reversed(self._contexts):
            if context.profile.takes(batch=batch, tokens=length):
                return context
        raise StreamError(
            f"no profile of this engine takes {batch} rows of {length} tokens; build it with --batch "
            f"1:{batch}:{batch}: {rebuild_command(self.folder, self.facts)}."
        )

    def _load(self, plan: Path) -> Any:
        """The engine of the plan. Its bytes are hashed again as they are read, because a plan is code."""
        again = f"build it again: {rebuild_command(self.folder, self.facts)}"
        content = read_verified(plan, self.facts.files[PLAN], record=BUILD, again=again)
        if self.facts.version_compatible:
            self._runtime.engine_host_code_allowed = True
        engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise ArtefactError(
                f"{plan} could not be loaded by {NAMES[self.facts.flavour]} {self._trt.__version__} "
                f"({self._log.last_error()}); build it again here: "
                f"{rebuild_command(self.folder, self.facts, here=self.cuda.gpu)}."
            )
        return engine

    def _verify_signature(self) -> None:
        """Raises ArtefactError unless the engine has exactly the tensors of the spec, by which buffers are
        sized.
        """
        engine = self._engine
        trt = self._trt
        modes = {trt.TensorIOMode.INPUT: "input", trt.TensorIOMode.OUTPUT: "output"}
        found = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            dtype = TYPES.get(engine.get_tensor_dtype(name).name, "of another type")
            found[name] = (modes[engine.get_tensor_mode(name)], dtype, tuple(engine.get_tensor_shape(name)))
        promised = {
            fact.name: (mode, fact.dtype, tuple(size if isinstance(size, int) else -1 for size in fact.shape))
            for mode, facts in (("input", self.spec.inputs), ("output", self.spec.outputs))
            for fact in facts
        }
        for name in (*promised, *found):
            if found.get(name) != promised.get(name):
                raise ArtefactError(
                    f"{self.folder / PLAN} has {name} {found.get(name)}, expected {promised.get(name)} by "
                    f"its spec; build it again: {rebuild_command(self.folder, self.facts)}."
                )

        for state in self.spec.state:
            written = engine.get_aliased_input_tensor(state.present) or None
            wanted = state.name if self.spec.linear_ring else None
            if written != wanted:
                is_so, should = (
                    "in a tensor of its own" if x is None else f"over {x}" for x in (written, wanted)
                )
                raise ArtefactError(
                    f"{self.folder / PLAN} writes {state.present} {is_so}, expected {should} by its spec; "
                    f"build it again: {rebuild_command(self.folder, self.facts)}."
                )

    def _context(self, index: int) -> Context:
        profile = self.facts.profiles[index]
        trt = self._trt
        token = profile.name == "token"
        # Each context has one profile, and only needs the scratch memory of that profile.
        allocation = trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        if self.facts.flavour == "rtx":  # it compiles for this GPU now, and captures CUDA graphs by itself
            runtime_config = self._engine.create_runtime_config()
            runtime_config.set_execution_context_allocation_strategy(allocation)
            if token:
                # Single tokens have one shape for each batch, so its kernels are compiled before the first
                # step and not next to it. A graph is captured again when an address changes: with two sets of
                # buffers that would be at every token.
                specialisation = trt.DynamicShapesKernelSpecializationStrategy.EAGER
                runtime_config.dynamic_shapes_kernel_specialization_strategy = specialisation
                if self.spec.linear_ring:
                    runtime_config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            self._cache.use(runtime_config)
            context = self._engine.create_execution_context(runtime_config)
        else:
            context = self._engine.create_execution_context(allocation)
        if context is None:
            raise StreamError(
                f"the GPU has no room for the {profile.name} profile ({self._log.last_error()}); build the "
                "engine with a smaller --batch."
            )
        if not context.set_optimization_profile_async(index, self.cuda.stream):
            raise ArtefactError(
                f"{self.folder / PLAN} has no profile {index} ({self._log.last_error()}); build the engine "
                "again."
            )
        self.cuda.synchronize()
        return Context(context, profile, self._log, captured=token and self.facts.flavour == "tensorrt")
