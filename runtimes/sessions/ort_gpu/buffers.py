"""Memory on a device that ONNX Runtime allocates: arrays, and the bindings of a memory's steps.

With `cpu` as the name of the device the same code runs in host memory. So it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from runtimes.base.errors import StreamError, first_line
from runtimes.contract.memory import DeviceTensor, Memory, refuse_part
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import POSITIONS, TensorSpec
from runtimes.sessions.ort_gpu.stream import Stream

# Single tokens that a memory steps before a CUDA graph is captured. A fork in a beam search may live for one.
STEPS_BEFORE_CAPTURE = 2
ALIGNMENT = 256  # bytes, of arrays that share a block


@contextmanager
def _refusals(doing: str) -> Iterator[None]:
    """Turns an error of ONNX Runtime, which have no common base class, into a sentence."""
    try:
        yield
    except Exception as error:
        raise StreamError(
            f"ONNX Runtime could not {doing} ({first_line(error):.300}); open the artefact again, or give "
            "--device cpu."
        ) from error


class OrtArray(DeviceTensor):
    """An array on a device. `np.asarray` and `copy` download its content.

    place: where it is, from `Provider.place`.
    """

    def __init__(self, ort: Any, shape: tuple[int, ...], dtype: str, *, place: Mapping[str, Any]) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        try:
            self.value = ort.OrtValue.ortvalue_from_shape_and_type(shape, self.dtype.type, **place)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            raise StreamError(
                f"the device has no room for an array {list(shape)} ({first_line(error):.200}); use a "
                "smaller batch."
            ) from error

    def upload(self, array: np.ndarray) -> None:
        """Copies an array of the same shape and type to the device, and returns when it is there."""
        assert (array.shape, array.dtype) == (self.shape, self.dtype), (array.shape, array.dtype, self.shape)
        if array.size:
            with _refusals(f"copy an array {list(self.shape)} to the device"):
                self.value.update_inplace(np.ascontiguousarray(array))

    def copy(self) -> np.ndarray:
        """The content as a new array on the host."""
        with _refusals(f"copy an array {list(self.shape)} from the device"):
            return np.array(self.value.numpy())  # in host memory `numpy()` shares the bytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = self.copy()
        return host if dtype is None else host.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory that is pickled holds plain arrays: another process may have no GPU.
        return np.array, (self.copy(),)


class Runner(Protocol):
    """What the buffers of a memory need of the session that runs the steps (see `session.py`)."""

    spec: Spec
    state: tuple[TensorSpec, ...]
    in_place: bool
    """Whether past and present of the memory are one buffer."""
    captures: bool
    """Whether single tokens are captured as CUDA graphs, which needs a stream."""
    stream: Stream | None
    """What ONNX Runtime computes on; None if it has streams of its own."""
    place: Mapping[str, Any]
    """Where arrays are, from `Provider.place`."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> OrtArray:
        """A new array on the device with undefined content."""
        ...

    def io_binding(self) -> Any:
        """A new, empty IO binding of ONNX Runtime."""
        ...

    def launch(self, io: Any) -> None:
        """Runs the bound step. With a stream it is only enqueued there."""
        ...


class DeviceBinding:
    """The buffers of one memory on the device, kept from step to step.

    A ring is written in place: its past and present are one buffer. The other forms are read from one set of
    buffers and written to a second; the two change places after each step, so there are two directions.
    Shapes and addresses of single tokens never change, so each direction is captured as a CUDA graph.
    """

    def __init__(self, session: Runner, memory: Memory) -> None:
        refuse_part(memory)
        self.session = session
        self._turn = 0
        self._singles = 0
        arrays = {name: np.asarray(memory.tensors[name]) for name in (fact.name for fact in session.state)}
        sets = 1 if session.in_place else 2
        self._sets = [
            {name: session.empty(array.shape, array.dtype.name) for name, array in arrays.items()}
            for _ in range(sets)
        ]
        for name, array in arrays.items():
            self._sets[0][name].upload(array)
        self._steps: dict[tuple[int, ...], _Step] = {}
        memory.tensors.update(self._front)  # from now on the memory's tensors are arrays on the device

    @property
    def _front(self) -> dict[str, OrtArray]:
        return self._sets[self._turn]

    @property
    def _back(self) -> dict[str, OrtArray]:
        return self._sets[(self._turn + 1) % len(self._sets)]

    def serves(self, session: Runner, memory: Memory) -> bool:
        """Whether the memory's tensors are still these buffers; a caller may have put others in their
        place.
        """
        return self.session is session and all(memory.tensors.get(n) is a for n, a in self._front.items())

    def run(
        self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory
    ) -> int | None:
        """Runs one step and makes the buffers that it has written the memory's tensors.

        The answer is the direction of the CUDA graph that computed it, 0 or 1; None if no graph did.
        """
        single = inputs[POSITIONS].shape[1] == 1
        step = self._step(inputs, outputs, single=single)
        self._singles = self._singles + 1 if single else self._singles
        capture = single and self._singles >= STEPS_BEFORE_CAPTURE and self.session.captures
        direction = self._turn
        by_graph = step.run(inputs, outputs, direction, self._front, self._back, capture=capture)
        self._turn = (direction + 1) % len(self._sets)
        memory.tensors.update(self._front)
        return direction if by_graph else None

    def _step(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], *, single: bool) -> _Step:
        """The buffers for a step of these shapes. The buffers of single tokens and of the last segment
        are kept.
        """
        arrays = inputs | outputs
        key = tuple(size for array in arrays.values() for size in array.shape)
        if key not in self._steps:
            kept = {shape: step for shape, step in self._steps.items() if single or step.single}
            made = _Step if self.session.stream is None else _StreamStep
            kept[key] = made(self.session, inputs, outputs, single=single)
            self._steps = kept
        return self._steps[key]


class _Step:
    """The buffers of a step's inputs and outputs on the device, and its binding in each direction."""

    def __init__(
        self,
        session: Runner,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
        *,
        single: bool,
    ) -> None:
        self.session = session
        self.single = single
        self._bindings: dict[int, Any] = {}
        self._allocate(inputs, outputs)

    def _allocate(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        self._inputs, self._outputs = (
            {name: self.session.empty(array.shape, array.dtype.name) for name, array in arrays.items()}
            for arrays in (inputs, outputs)
        )

    def run(
        self,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
        turn: int,
        past: dict[str, OrtArray],
        present: dict[str, OrtArray],
        *,
        capture: bool,
    ) -> bool:
        """Runs the step from `past` to `present`, the buffers of direction `turn`; returns whether a CUDA
        graph did. capture: whether one is made for the next step in that direction.
        """
        assert not capture
        for name, array in inputs.items():
            self._inputs[name].upload(array)
        self.session.launch(self._bound(turn, past, present))
        for name, array in outputs.items():
            array[...] = self._outputs[name].copy()
        return False

    def _bound(self, turn: int, past: dict[str, OrtArray], present: dict[str, OrtArray]) -> Any:
        if turn not in self._bindings:
            with _refusals("bind the arrays of a step"):
                io = self.session.io_binding()
                self._bind(io)
                for state in self.session.spec.state:
                    io.bind_ortvalue_input(state.name, past[state.name].value)
                    io.bind_ortvalue_output(state.present, present[state.name].value)
                self._bindings[turn] = io
        return self._bindings[turn]

    def _bind(self, io: Any) -> None:
        for name, array in self._inputs.items():
            io.bind_ortvalue_input(name, array.value)
        for name, array in self._outputs.items():
            io.bind_ortvalue_output(name, array.value)


class _StreamStep(_Step):
    """The same on a stream. All inputs are one block of pinned memory and one on the device, and so are all
    outputs.

    A step is one upload, the kernels, one download and one wait. A captured step is one launch of all three.
    """

    def _allocate(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
        assert self.session.stream is not None
        self.stream = self.session.stream
        self._given = _Block(self.session, self.stream, inputs)
        self._answers = _Block(self.session, self.stream, outputs)
        self._graphs: dict[int, Callable[[], None]] = {}

    def run(
        self,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
        turn: int,
        past: dict[str, OrtArray],
        present: dict[str, OrtArray],
        *,
        capture: bool,
    ) -> bool:
        io = self._bound(turn, past, present)
        for name, array in inputs.items():
            self._given.views[name][...] = array
        self.stream.enter()
        graph = self._graphs.get(turn)
        if graph is not None:
            graph()
        else:
            self._enqueue(io)
        self.stream.synchronize()
        for name, array in outputs.items():
            array[...] = self._answers.views[name]
        if capture and graph is None:  # after the step, for which this thread has made its cuBLAS handles
            self._graphs[turn] = self.stream.capture(lambda: self._enqueue(io))
        return graph is not None

    def _enqueue(self, io: Any) -> None:
        self.stream.upload(self._given.address, self._given.host)
        self.session.launch(io)
        self.stream.download(self._answers.host, self._answers.address)

    def _bind(self, io: Any) -> None:
        where = self.session.place["device_type"], self.session.place["device_id"]
        for block, bind in ((self._given, io.bind_input), (self._answers, io.bind_output)):
            for name, view in block.views.items():
                bind(name, *where, view.dtype.type, view.shape, block.address + block.offsets[name])


class _Block:
    """Room for some arrays in pinned memory, and as much on the device."""

    def __init__(self, session: Runner, stream: Stream, arrays: Mapping[str, np.ndarray]) -> None:
        self.offsets: dict[str, int] = {}
        size = 0
        for name, array in arrays.items():
            self.offsets[name] = size
            size += -(-max(array.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.host = stream.pinned(size)
        self._device = session.empty((size,), "uint8")
        self.address: int = self._device.value.data_ptr()
        self.views = {
            name: self.host[start : start + arrays[name].nbytes]
            .view(arrays[name].dtype)
            .reshape(arrays[name].shape)
            for name, start in self.offsets.items()
        }
