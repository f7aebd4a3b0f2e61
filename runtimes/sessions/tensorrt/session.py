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

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.records import to_json
from runtimes.base.sealed import read_verified
from runtimes.contract.device import AUTO, Device, Kind, refuse_for_engine
from runtimes.contract.engine import (
    BUILD,
    NAMES,
    PLAN,
    EngineFacts,
    Profile,
    load_engine,
    rebuild_command,
    refuse_elsewhere,
)
from runtimes.contract.memory import Memory, refuse_part
from runtimes.contract.session import Paths
from runtimes.contract.spec import VOCAB, Spec
from runtimes.contract.tensors import TensorFacts
from runtimes.contract.vocabulary import Vocab, load_vocab
from runtimes.sessions.description import describe_spec
from runtimes.sessions.graph import GraphSession, Positions
from runtimes.sessions.tensorrt.device_memory import Cuda, DeviceArray, Graph, PinnedArray
from runtimes.sessions.tensorrt.module import fresh_log, load_tensorrt
from runtimes.sessions.tensorrt.paths import CAPTURED, PLAIN, directions, engine_paths, path_name
from runtimes.sessions.tensorrt.runtime_cache import RuntimeCache

# TensorRT's names of the types that a spec may have.
TYPES = {"FLOAT": "float32", "HALF": "float16", "INT64": "int64"}


class TrtSession(GraphSession):
    """The session protocol (see `runtimes.contract.session.Session`) over one engine."""

    logits_while_scoring: ClassVar[Positions] = "last"  # the profiles have no room for empty tensors

    def __init__(self, facts: EngineFacts, spec: Spec, vocab: Vocab, folder: Path) -> None:
        super().__init__(spec, vocab, facts.identity)
        self.facts, self.folder = facts, folder
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
    def open(cls, folder: Path, *, threads: int | None = None, device: Device = AUTO) -> TrtSession:
        """The session over an engine folder.

        Every hash is verified, and that the engine is for this TensorRT and this GPU, before anything is
        loaded. Raises ArtefactError where one of these does not hold, StreamError for `threads`, which
        engines do not have, and ConfigError for a device that is not the engine's.
        """
        if threads is not None:
            raise StreamError(f"threads is {threads} and {folder} runs on the GPU; leave --threads out.")
        facts, spec = load_engine(folder)
        own: Kind = "tensorrt-rtx" if facts.flavour == "rtx" else "tensorrt"
        refuse_for_engine(device, folder, own=own)
        return cls(facts, spec, load_vocab(folder / VOCAB), folder)

    def start(self, batch: int) -> Memory:
        if batch > self.facts.largest_batch:
            raise StreamError(
                f"batch is {batch}; this engine takes 1 to {self.facts.largest_batch} rows: use a smaller "
                f"batch, or build it with a larger --batch: {rebuild_command(self.folder, self.facts)}."
            )
        return super().start(batch)

    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        context = self._context_for(inputs["input_ids"])
        bound = self._bound(memory)
        io = bound.io(inputs, outputs)
        for name, array in inputs.items():
            io[name].pinned.host[...] = array
        # Within one context the shapes of inputs and state stay set until another step needs others.
        context.shape({name: array.shape for name, array in inputs.items()} | bound.shapes)
        if context.captured and bound.warm == context.serial:
            # The buffers' addresses are in the graph, so new values need only be in the pinned arrays.
            self.cuda.launch(bound.graph(context, io, inputs, outputs))
            how = CAPTURED
        else:
            how = PLAIN
            bound.queue(context, io, inputs, outputs)
            bound.warm = context.serial if context.captured else bound.warm
        self.cuda.synchronize()
        for name, array in outputs.items():
            array[...] = io[name].pinned.host
        self._paths.taken.add(path_name(self.spec, context.profile, how, bound.direction, inputs))
        bound.advance(memory)

    def _bound(self, memory: Memory) -> _Bound:
        bound = memory.binding
        if not isinstance(bound, _Bound) or not bound.serves(self, memory):
            memory.binding = bound = _Bound(self, memory)
        return bound

    def _context_for(self, tokens: np.ndarray) -> _Context:
        """The context of the narrowest profile that takes tokens [B, T]: the last profiles are the
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
        engine, trt = self._engine, self._trt
        modes = {trt.TensorIOMode.INPUT: "input", trt.TensorIOMode.OUTPUT: "output"}
        found = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            dtype = TYPES.get(engine.get_tensor_dtype(name).name, "of another type")
            found[name] = (modes[engine.get_tensor_mode(name)], dtype, tuple(engine.get_tensor_shape(name)))
        promised = {
            fact.name: (mode, fact.dtype, tuple(int(size) if size.isdigit() else -1 for size in fact.shape))
            for mode, facts in (("input", self.spec.graph_inputs), ("output", self.spec.graph_outputs))
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
            wanted = state.past if self.spec.linear_ring else None
            if written != wanted:
                is_so, should = (
                    "in a tensor of its own" if x is None else f"over {x}" for x in (written, wanted)
                )
                raise ArtefactError(
                    f"{self.folder / PLAN} writes {state.present} {is_so}, expected {should} by its spec; "
                    f"build it again: {rebuild_command(self.folder, self.facts)}."
                )

    def _context(self, index: int) -> _Context:
        profile, trt = self.facts.profiles[index], self._trt
        token = profile.name == "token"
        # Each context has one profile, and needs the scratch memory of that profile alone.
        allocation = trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        if self.facts.flavour == "rtx":  # it compiles for this GPU now, and captures CUDA graphs by itself
            runtime_config = self._engine.create_runtime_config()
            runtime_config.set_execution_context_allocation_strategy(allocation)
            if token:
                # Single tokens have one shape for each batch, so its kernels are compiled before the first
                # step and not beside it. A graph is captured again when an address changes: with two sets of
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
        return _Context(context, profile, self._log, captured=token and self.facts.flavour == "tensorrt")


class _Context:
    """An execution context of one profile.

    captured: whether this session captures the context's steps as CUDA graphs. serial: how often the input
    shapes have changed; a graph that was captured before a change may not be launched after it.
    """

    def __init__(self, context: Any, profile: Profile, log: Any, *, captured: bool) -> None:
        self.context, self.profile, self.captured, self._log = context, profile, captured, log
        self.serial, self._shapes = 0, dict[str, tuple[int, ...]]()

    def shape(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Sets the input shapes of the next steps, if they differ from those of the last step."""
        if shapes == self._shapes:
            return
        # A refusal in the middle leaves some shapes set: they count as unknown until all are.
        self._shapes, self.serial = {}, self.serial + 1
        for name, sizes in shapes.items():
            if not self.context.set_input_shape(name, sizes):
                raise StreamError(
                    f"{name} {list(sizes)} does not fit the engine's {self.profile.name} profile "
                    f"({self._log.last_error()}); build the engine with a larger --batch."
                )
        self._shapes = shapes

    def queue(self, addresses: dict[str, int], stream: int) -> None:
        """Queues one step over buffers at these addresses."""
        bound = all([self.context.set_tensor_address(name, address) for name, address in addresses.items()])
        if not bound or not self.context.execute_async_v3(stream):
            raise ArtefactError(
                f"the engine could not run a step ({self._log.last_error()}); build the engine again."
            )


class _Io:
    """The buffers of one graph input or output: one on the device and one in pinned host memory."""

    def __init__(self, cuda: Cuda, fact: TensorFacts, shape: tuple[int, ...]) -> None:
        self.device: DeviceArray = cuda.empty(shape, fact.dtype)
        self.pinned: PinnedArray = cuda.pinned(shape, fact.dtype)


class _Bound:
    """The buffers of one Memory on the GPU, kept from step to step: those of the state, inputs and outputs.

    A ring has one set of buffers for the state, which a step reads and writes. Shift memory has two: a step
    reads the front set and writes the back set; then they change places, so there are two directions and a
    CUDA graph for each. warm: the `serial` of the context at which a step was run without a graph; TensorRT
    demands such a step after each change of shapes, before one is captured.
    """

    def __init__(self, session: TrtSession, memory: Memory) -> None:
        refuse_part(memory)
        self.session, self.cuda, self.warm = session, session.cuda, 0
        facts, batch = session.state, memory.batch
        sets = [
            {f.name: self.cuda.empty(f.sizes(batch=batch), f.dtype) for f in facts}
            for _ in range(len(directions(session.spec)))
        ]
        self._front, self._back = sets[0], sets[-1]
        self._turn = 0
        arrays = {name: np.ascontiguousarray(memory.tensors[name]) for name in self._front}
        for name, array in arrays.items():
            self.cuda.upload(self._front[name], array)
        self.cuda.synchronize()
        self.shapes = {name: array.shape for name, array in self._front.items()}
        self._io: dict[tuple[int, ...], dict[str, _Io]] = {}
        self._graphs: dict[tuple[int, int], tuple[int, Graph]] = {}
        memory.tensors.update(self._front)  # from now on the memory's tensors are arrays on the device

    @property
    def direction(self) -> str:
        """Which buffers the next step reads and writes, in words."""
        names = directions(self.session.spec)
        return names[self._turn % len(names)]

    def serves(self, session: TrtSession, memory: Memory) -> bool:
        """Whether the memory's tensors are still these buffers: a caller may have put others in their
        place.
        """
        return self.session is session and all(
            memory.tensors.get(name) is array for name, array in self._front.items()
        )

    def io(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> dict[str, _Io]:
        """The buffers for a step of these shapes. Those of single tokens are kept, and those of the last
        segment.
        """
        arrays = inputs | outputs
        key = tuple(size for array in arrays.values() for size in array.shape)
        if key not in self._io:
            facts = {
                fact.name: fact
                for fact in (*self.session.spec.graph_inputs, *self.session.spec.graph_outputs)
            }
            single = inputs["input_ids"].shape[1] == 1
            self._io = {kept: io for kept, io in self._io.items() if single or kept[1] == 1}
            self._io[key] = {name: _Io(self.cuda, facts[name], array.shape) for name, array in arrays.items()}
        return self._io[key]

    def queue(
        self,
        context: _Context,
        io: dict[str, _Io],
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
    ) -> None:
        """Queues copies in, the step from the front buffers to the back ones, and copies out."""
        for name in inputs:
            self.cuda.upload(io[name].device, io[name].pinned)
        addresses = {name: buffer.device.address for name, buffer in io.items()}
        for state in self.session.spec.state:
            addresses |= {
                state.past: self._front[state.past].address,
                state.present: self._back[state.past].address,
            }
        context.queue(addresses, self.cuda.stream)
        for name in outputs:
            self.cuda.download(io[name].pinned, io[name].device)

    def graph(
        self,
        context: _Context,
        io: dict[str, _Io],
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
    ) -> Graph:
        """The work of `queue` as a CUDA graph, captured once for each direction as long as the shapes stay
        the same.
        """
        key = (id(self._front), id(io))
        serial, graph = self._graphs.get(key, (0, None))
        if graph is None or serial != context.serial:
            graph = self.cuda.capture(lambda: self.queue(context, io, inputs, outputs))
            self._graphs[key] = (context.serial, graph)
        return graph

    def advance(self, memory: Memory) -> None:
        """Makes the buffers that a step has written the memory's tensors; in a ring they are so already."""
        self._front, self._back, self._turn = self._back, self._front, self._turn + 1
        memory.tensors.update(self._front)
