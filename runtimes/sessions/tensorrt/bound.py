"""What a session keeps on the GPU for one stream of steps: an execution context for each profile, and the
buffers of each memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.contract.engine import Profile
from runtimes.contract.memory import Memory, refuse_part
from runtimes.sessions.graph import GraphSession
from runtimes.sessions.tensorrt.device_memory import Cuda, DeviceArray, Graph, PinnedArray
from runtimes.sessions.tensorrt.padding import History
from runtimes.sessions.tensorrt.paths import directions


class Context:
    """An execution context of one profile.

    captured: whether this session captures the context's steps as CUDA graphs. serial: how often the input
    shapes have changed; a graph that was captured before a change may not be launched after it.
    """

    def __init__(self, context: Any, profile: Profile, log: Any, *, captured: bool) -> None:
        self.context = context
        self.profile = profile
        self.captured = captured
        self._log = log
        self.serial = 0
        self._shapes = dict[str, tuple[int, ...]]()

    def shape(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Sets the input shapes of the next steps, if they differ from the last step's."""
        if shapes == self._shapes:
            return
        # A refusal in the middle leaves some shapes set: they count as unknown until all are.
        self._shapes = {}
        self.serial += 1
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


class Buffer(NamedTuple):
    """Of one graph input or output."""

    device: DeviceArray
    pinned: PinnedArray


class Buffers:
    """The buffers of the inputs and outputs of steps of one shape."""

    def __init__(self, cuda: Cuda, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        self.inputs, self.outputs = (
            {
                name: Buffer(cuda.empty(x.shape, x.dtype.name), cuda.pinned(x.shape, x.dtype.name))
                for name, x in arrays.items()
            }
            for arrays in (inputs, outputs)
        )


class Bound:
    """The buffers of one Memory on the GPU, kept from step to step: state, inputs and outputs.

    A ring has one set of buffers for the state, which a step reads and writes. Shift memory has two: a step
    reads the front set and writes the back set; then they change places, so there are two directions and a
    CUDA graph for each. warm: the `serial` of the context at which a step was run without a graph; TensorRT
    requires such a step after each change of shapes, before one is captured.
    """

    def __init__(self, session: GraphSession, cuda: Cuda, memory: Memory) -> None:
        refuse_part(memory)
        self.session = session
        self.cuda = cuda
        self.warm = 0
        facts = session.state
        batch = memory.batch
        self.history = History(batch, session.rule.segment)
        sets = [
            {f.name: self.cuda.empty(f.sizes(batch=batch), f.dtype) for f in facts}
            for _ in range(len(directions(session.spec)))
        ]
        self._front = sets[0]
        self._back = sets[-1]
        self._turn = 0
        arrays = {name: np.ascontiguousarray(memory.tensors[name]) for name in self._front}
        for name, array in arrays.items():
            self.cuda.upload(self._front[name], array)
        self.cuda.synchronize()
        self.shapes = {name: array.shape for name, array in self._front.items()}
        self._buffers: dict[tuple[int, ...], Buffers] = {}
        self._graphs: dict[tuple[int, int], tuple[int, Graph]] = {}
        memory.tensors.update(self._front)  # from now on the memory's tensors are arrays on the device

    @property
    def direction(self) -> str:
        """Which buffers the next step reads and writes, in words."""
        names = directions(self.session.spec)
        return names[self._turn % len(names)]

    def serves(self, session: GraphSession, memory: Memory) -> bool:
        """Whether the memory's tensors are still these buffers: a caller may have put others in their
        place.
        """
        return self.session is session and all(
            memory.tensors.get(name) is array for name, array in self._front.items()
        )

    def buffers(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> Buffers:
        """The buffers for a step of these shapes. The buffers of single tokens and of the last segment
        are kept.
        """
        key = tuple(size for array in (inputs | outputs).values() for size in array.shape)
        if key not in self._buffers:
            single = inputs["input_ids"].shape[1] == 1
            self._buffers = {kept: each for kept, each in self._buffers.items() if single or kept[1] == 1}
            self._buffers[key] = Buffers(self.cuda, inputs, outputs)
        return self._buffers[key]

    def queue(self, context: Context, buffers: Buffers) -> None:
        """Queues copies in, the step from the front buffers to the back ones, and copies out."""
        for buffer in buffers.inputs.values():
            self.cuda.upload(buffer.device, buffer.pinned)
        both = buffers.inputs | buffers.outputs
        addresses = {name: buffer.device.address for name, buffer in both.items()}
        for state in self.session.spec.state:
            addresses |= {
                state.name: self._front[state.name].address,
                str(state.present): self._back[state.name].address,
            }
        context.queue(addresses, self.cuda.stream)
        for buffer in buffers.outputs.values():
            self.cuda.download(buffer.pinned, buffer.device)

    def graph(self, context: Context, buffers: Buffers) -> Graph:
        """The work of `queue` as a CUDA graph, captured once for each direction as long as the shapes stay
        the same.
        """
        key = (id(self._front), id(buffers))
        serial, graph = self._graphs.get(key, (0, None))
        if graph is None or serial != context.serial:
            graph = self.cuda.capture(lambda: self.queue(context, buffers))
            self._graphs[key] = (context.serial, graph)
        return graph

    def advance(self, memory: Memory) -> None:
        """Makes the buffers that a step has written the memory's tensors; in a ring they are so already."""
        self._front, self._back, self._turn = self._back, self._front, self._turn + 1
        memory.tensors.update(self._front)
