"""The session over an artefact on an NVIDIA GPU with ONNX Runtime: the memory stays on the device.

Nothing runs elsewhere silently: a provider that ONNX Runtime left out, and a node that the provider does not
support, raise an error that names them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError, first_line
from runtimes.base.progress import say_once
from runtimes.contract.device import Device
from runtimes.contract.memory import DeviceTensor, Memory, refuse_part
from runtimes.contract.session import Paths
from runtimes.contract.spec import CUDA_GRAPH, GRAPH, Spec, refuse_unless_one_onnx
from runtimes.contract.tensors import POSITIONS
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions import fused_cpu
from runtimes.sessions.graph import GraphSession, Positions
from runtimes.sessions.onnx_runtime import import_onnxruntime, refuse_foreign, vocab_of
from runtimes.sessions.ort_gpu import provider
from runtimes.sessions.ort_gpu.loading import Contents, Loader
from runtimes.sessions.ort_gpu.stream import Stream

# Single tokens that a memory steps before a CUDA graph is captured. A fork in a beam search may live for one.
STEPS_BEFORE_CAPTURE = 2
ALIGNMENT = 256  # bytes, of arrays that share a block
REFERENCE_ROWS = 2
# A run neither waits for the stream nor captures it: the session does both.
ON_OUR_STREAM = {"disable_synchronize_execution_providers": "1", "gpu_graph_id": "-1"}
# The ways to compute a step, which `check` compares: without a graph, and in a graph for each direction.
PLAIN = "without a CUDA graph"
CAPTURED = ("in a CUDA graph", "in a CUDA graph, between the buffers the other way round")


class OrtGpuSession(GraphSession):
    """The session protocol (see `runtimes.contract.session.Session`) over an artefact's standard graph.

    Steps of all memories of a session run one after the other: they share the device's scratch memory, which
    is part of the captured graphs. With `cpu` as the name of the device the same code runs in host memory: so
    it is tested without a GPU.
    """

    logits_while_scoring: ClassVar[Positions] = "last"  # no empty tensors on a device

    def __init__(
        self,
        spec: Spec,
        vocab: Vocab | None,
        graph: Path,
        contents: Contents,
        *,
        device: Device,
        threads: int | None = None,
        library: Path | None = None,
    ) -> None:
        super().__init__(spec, vocab, spec.identity)
        self.device = device
        self._ort = import_onnxruntime(spec)
        self.one_at_a_time = threading.Lock()
        """Held while the stream is used: what another thread enqueued would become part of a captured step.
        """
        loader = Loader(
            ort=self._ort,
            provider=provider.PROVIDER,
            device=device,
            spec=spec,
            graph=graph,
            threads=threads,
            library=library,
        )
        self._with_node = library is not None
        self.stream: Stream
        """What ONNX Runtime computes on."""
        self._session, self.stream = loader.load(contents)
        # The output layer of a large vocabulary picks rows by their values (NonZero), which cannot be
        # captured; a traced graph may do the same. A graph of fixed sizes may take no single token.
        fixed = not spec.model.selective and spec.exporter == "graph" and spec.fixed_rows is None
        # If answers depend on how tokens are cut, no reference is fed one token at a time, and a captured
        # step would be compared with nothing. What cannot be checked is not used.
        checked = spec.rule.cuts_change_nothing
        self.captures = fixed and checked
        """Whether single tokens are captured as CUDA graphs."""
        self.place = {"device_type": provider.PROVIDER.memory, "device_id": device.index}
        """Where arrays are."""
        self._options = self._ort.RunOptions()
        for name, value in ON_OUR_STREAM.items():
            self._options.add_run_config_entry(name, value)
        self._paths: Paths | None = None
        if self.captures:
            ways = (PLAIN, *CAPTURED[: 1 if spec.in_place else 2])
            self._paths = Paths(possible=ways, batches=(REFERENCE_ROWS,))

    @property
    def computed_by(self) -> str:
        node = ", attention as one node" if self._with_node else ""
        return f"ONNX Runtime, CUDA on {self.device}{node}"

    @property
    def kernel(self) -> str:
        return "cuda"

    @property
    def paths(self) -> Paths | None:
        """With and without CUDA graphs, if a reference can be fed in single tokens; otherwise None."""
        return self._paths

    @classmethod
    def of(
        cls,
        folder: Path,
        spec: Spec,
        contents: Contents,
        *,
        device: Device,
        threads: int | None = None,
    ) -> OrtGpuSession:
        """The session over an artefact that was read and verified (`read_artefact`).

        It runs the graph whose attention is one node, if the artefact has it and the library is built.

        Raises MissingPackageError if the provider of the device is not installed or cannot start here, and
        ArtefactError if the graph cannot be loaded, or a node would run elsewhere.
        """
        refuse_unless_one_onnx(spec, folder, what=f"the device {device}")
        library = None
        if CUDA_GRAPH in spec.files:
            library = fused_cpu.built()
            if library is None:
                say_once(f"{CUDA_GRAPH} is not used: its library is not built; run `xl-export fused-kernel`")
        graph = folder / (CUDA_GRAPH if library else GRAPH)
        refuse_foreign(spec, graph, contents[graph.name])
        vocab = vocab_of(spec, folder, contents)
        return cls(spec, vocab, graph, contents, device=device, threads=threads, library=library)

    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        with self.one_at_a_time:
            binding = memory.binding
            if not isinstance(binding, DeviceBinding) or not binding.serves(self, memory):
                memory.binding = binding = DeviceBinding(self, memory)
            self.begins()
            direction = binding.run(inputs, outputs, memory)
            if self._paths:
                self._paths.taken.add(PLAIN if direction is None else CAPTURED[direction])

    def empty(self, shape: tuple[int, ...], dtype: str) -> OrtArray:
        """A new array on the device with undefined content."""
        return OrtArray(self, self._ort, shape, dtype)

    def io_binding(self) -> Any:
        """A new, empty IO binding of ONNX Runtime."""
        return self._session.io_binding()

    def launch(self, io: Any) -> None:
        """Enqueues the bound step on the stream."""
        try:
            self._session.run_with_iobinding(io, self._options)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            raise ArtefactError(
                f"ONNX Runtime {self._ort.__version__} could not run the step on {self.device} "
                f"({first_line(error):.300}); open the artefact again, or give --device cpu."
            ) from error


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
    """An array on the device of a session."""

    def __init__(self, session: OrtGpuSession, ort: Any, shape: tuple[int, ...], dtype: str) -> None:
        self.session = session
        self.shape = shape
        self.dtype = np.dtype(dtype)
        try:
            self.value = ort.OrtValue.ortvalue_from_shape_and_type(shape, self.dtype.type, **session.place)
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
        with _refusals(f"copy an array {list(self.shape)} from the device"):
            return np.array(self.value.numpy())  # in host memory `numpy()` shares the bytes

    def clear(self, rows: np.ndarray) -> None:
        with self._stream() as stream:
            for row in rows.tolist():
                stream.clear(self._address(row), self._row_bytes)

    def rows(self, chosen: Sequence[int]) -> np.ndarray:
        found = np.empty((len(chosen), *self.shape[1:]), self.dtype)
        with self._stream() as stream:
            for place, row in enumerate(chosen):
                stream.download(found[place, None], self._address(row))
        return found

    def write_rows(self, rows: Sequence[int], sources: Sequence[tuple[Any, int]]) -> None:
        with self._stream() as stream:
            for row, (source, place) in zip(rows, sources, strict=True):
                if isinstance(source, OrtArray):
                    stream.copy(self._address(row), source._address(place), self._row_bytes)
                else:
                    stream.upload(self._address(row), np.ascontiguousarray(source[place, None]))

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * int(self.dtype.itemsize)

    def _address(self, row: int) -> int:
        """The address of a row on the device."""
        return int(self.value.data_ptr()) + row * self._row_bytes

    @contextmanager
    def _stream(self) -> Iterator[Stream]:
        """The stream, which does what the block puts on it: others read the array without the stream."""
        with self.session.one_at_a_time:
            self.session.stream.enter()
            yield self.session.stream
            self.session.stream.synchronize()


class DeviceBinding:
    """The buffers of one memory on the device, kept from step to step.

    A ring is written in place: its past and present are one buffer. The other forms are read from one set of
    buffers and written to a second; the two change places after each step, so there are two directions.
    Shapes and addresses of single tokens never change, so each direction is captured as a CUDA graph.
    """

    def __init__(self, session: OrtGpuSession, memory: Memory) -> None:
        refuse_part(memory)
        self.session = session
        self._turn = 0
        self._singles = 0
        arrays = {name: np.asarray(memory.tensors[name]) for name in (fact.name for fact in session.state)}
        sets = 1 if session.spec.in_place else 2
        self._sets = [
            {name: session.empty(array.shape, array.dtype.name) for name, array in arrays.items()}
            for _ in range(sets)
        ]
        for name, array in arrays.items():
            self._sets[0][name].upload(array)
        self._kept: dict[tuple[int, ...], _Buffers] = {}
        memory.tensors.update(self._front)  # from now on the memory's tensors are arrays on the device

    @property
    def _front(self) -> dict[str, OrtArray]:
        return self._sets[self._turn]

    @property
    def _back(self) -> dict[str, OrtArray]:
        return self._sets[(self._turn + 1) % len(self._sets)]

    def serves(self, session: OrtGpuSession, memory: Memory) -> bool:
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
        buffers = self._buffers(inputs, outputs, single=single)
        self._singles = self._singles + 1 if single else self._singles
        capture = single and self._singles >= STEPS_BEFORE_CAPTURE and self.session.captures
        direction = self._turn
        by_graph = buffers.run(inputs, outputs, direction, self._front, self._back, capture=capture)
        self._turn = (direction + 1) % len(self._sets)
        memory.tensors.update(self._front)
        return direction if by_graph else None

    def _buffers(
        self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], *, single: bool
    ) -> _Buffers:
        """The buffers for a step of these shapes. The buffers of single tokens and of the last segment
        are kept.
        """
        arrays = inputs | outputs
        key = tuple(size for array in arrays.values() for size in array.shape)
        if key not in self._kept:
            kept = {shape: each for shape, each in self._kept.items() if single or each.single}
            kept[key] = _Buffers(self.session, inputs, outputs, single=single)
            self._kept = kept
        return self._kept[key]


class _Buffers:
    """The buffers of a step's inputs and outputs on the device, and its binding in each direction.

    All inputs are one block of pinned memory and one on the device, and so are all outputs. A step is one
    upload, the kernels, one download and one wait. A captured step is one launch of all three.
    """

    def __init__(
        self,
        session: OrtGpuSession,
        inputs: dict[str, np.ndarray],
        outputs: dict[str, np.ndarray],
        *,
        single: bool,
    ) -> None:
        self.session = session
        self.single = single
        self._bindings: dict[int, Any] = {}
        self._given = _Block(session, inputs)
        self._answers = _Block(session, outputs)
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
        """Runs the step from `past` to `present`, the buffers of direction `turn`; returns whether a CUDA
        graph did. capture: whether one is made for the next step in that direction.
        """
        stream = self.session.stream
        io = self._bound(turn, past, present)
        for name, array in inputs.items():
            self._given.views[name][...] = array
        stream.enter()
        graph = self._graphs.get(turn)
        if graph is not None:
            graph()
        else:
            self._enqueue(io)
        stream.synchronize()
        for name, array in outputs.items():
            array[...] = self._answers.views[name]
        if capture and graph is None:  # after the step, for which this thread has made its cuBLAS handles
            self._graphs[turn] = stream.capture(lambda: self._enqueue(io))
        return graph is not None

    def _enqueue(self, io: Any) -> None:
        self.session.stream.upload(self._given.address, self._given.host)
        self.session.launch(io)
        self.session.stream.download(self._answers.host, self._answers.address)

    def _bound(self, turn: int, past: dict[str, OrtArray], present: dict[str, OrtArray]) -> Any:
        if turn not in self._bindings:
            with _refusals("bind the arrays of a step"):
                io = self.session.io_binding()
                where = self.session.place["device_type"], self.session.place["device_id"]
                for block, bind in ((self._given, io.bind_input), (self._answers, io.bind_output)):
                    for name, view in block.views.items():
                        address = block.address + block.offsets[name]
                        bind(name, *where, view.dtype.type, view.shape, address)
                for state in self.session.spec.state:
                    io.bind_ortvalue_input(state.name, past[state.name].value)
                    io.bind_ortvalue_output(state.present, present[state.name].value)
                self._bindings[turn] = io
        return self._bindings[turn]


class _Block:
    """Room for some arrays in pinned memory, and as much on the device."""

    def __init__(self, session: OrtGpuSession, arrays: Mapping[str, np.ndarray]) -> None:
        self.offsets: dict[str, int] = {}
        size = 0
        for name, array in arrays.items():
            self.offsets[name] = size
            size += -(-max(array.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        self.host = session.stream.pinned(size)
        self._device = session.empty((size,), "uint8")
        self.address: int = self._device.value.data_ptr()
        self.views = {
            name: self.host[start : start + arrays[name].nbytes]
            .view(arrays[name].dtype)
            .reshape(arrays[name].shape)
            for name, start in self.offsets.items()
        }
