"""The session over an artefact on an NVIDIA GPU with ONNX Runtime: the memory stays on the device.

Nothing runs elsewhere silently: a provider that ONNX Runtime left out, and a node that the provider does not
support, raise an error that names them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError, first_line
from runtimes.contract.device import Device
from runtimes.contract.memory import Memory
from runtimes.contract.session import Paths
from runtimes.contract.spec import GRAPH, Spec, refuse_ort_format
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.graph import GraphSession, Positions
from runtimes.sessions.onnx_runtime import import_onnxruntime, vocab_of
from runtimes.sessions.ort_gpu.buffers import DeviceBinding, OrtArray
from runtimes.sessions.ort_gpu.loading import Contents, Loader
from runtimes.sessions.ort_gpu.providers import PROVIDERS

REFERENCE_ROWS = 2
# A run neither waits for the stream nor captures it: the session does both.
ON_OUR_STREAM = {"disable_synchronize_execution_providers": "1", "gpu_graph_id": "-1"}
# The ways to compute a step, which `check` compares: without a graph, and in a graph for each direction.
PLAIN = "without a CUDA graph"
CAPTURED = ("in a CUDA graph", "in a CUDA graph, between the buffers the other way round")


class OrtGpuSession(GraphSession):
    """The session protocol (see `runtimes.contract.session.Session`) over an artefact's standard graph.

    Steps of all memories of a session run one after the other: they share the device's scratch memory, which
    is part of the captured graphs. Attributes: see `runtimes.sessions.ort_gpu.buffers.Runner`.
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
    ) -> None:
        super().__init__(spec, vocab, spec.identity)
        self.device = device
        self.provider = PROVIDERS[device.kind]
        self._ort = import_onnxruntime(spec)
        self._one_at_a_time = threading.Lock()
        loader = Loader(
            ort=self._ort,
            provider=self.provider,
            device=device,
            spec=spec,
            graph=graph,
            threads=threads,
        )
        self._session, self.stream = loader.load(contents)
        self.in_place = spec.in_place
        # The output layer of a large vocabulary picks rows by their values (NonZero), which cannot be
        # captured; a traced graph may do the same.
        fixed = not spec.model.selective and spec.exporter == "graph"
        # Under the mask `full` answers depend on how tokens are cut, so no reference is fed singly, and a
        # captured step would be compared with nothing. What cannot be checked is not used.
        checked = spec.rule.mask == "same-length"
        self.captures = self.stream is not None and fixed and checked
        self.place: Mapping[str, Any] = self.provider.place(self._ort, device)
        self._options = self._ort.RunOptions()
        if self.stream is not None:
            for name, value in ON_OUR_STREAM.items():
                self._options.add_run_config_entry(name, value)
        self._paths: Paths | None = None
        if self.captures:
            ways = (PLAIN, *CAPTURED[: 1 if self.in_place else 2])
            self._paths = Paths(possible=ways, batches=(REFERENCE_ROWS,))

    @property
    def computed_by(self) -> str:
        return f"ONNX Runtime, {self.provider.words} on {self.device}"

    @property
    def kernel(self) -> str:
        return self.provider.kernel

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

        Raises MissingPackageError if the provider of the device is not installed or cannot start here, and
        ArtefactError if the graph cannot be loaded, or a node would run elsewhere.
        """
        refuse_ort_format(spec, folder, what=f"the device {device}")
        return cls(
            spec, vocab_of(spec, folder, contents), folder / GRAPH, contents, device=device, threads=threads
        )

    def start(self, batch: int) -> Memory:
        self._refuse_rows(batch)
        return super().start(batch)

    def _refuse_rows(self, batch: int) -> None:
        if self.provider.most_rows is not None and batch > self.provider.most_rows:
            raise StreamError(
                f"batch is {batch}, and {self.device} takes 1 to {self.provider.most_rows} rows; use a "
                "smaller batch, or --device cuda."
            )

    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        self._refuse_rows(memory.batch)  # it may come from a file, or from two memories
        with self._one_at_a_time:
            binding = memory.binding
            if not isinstance(binding, DeviceBinding) or not binding.serves(self, memory):
                memory.binding = binding = DeviceBinding(self, memory)
            self.begins()
            direction = binding.run(inputs, outputs, memory)
            if self._paths:
                self._paths.taken.add(PLAIN if direction is None else CAPTURED[direction])

    # What the buffers of a memory need; see `runtimes.sessions.ort_gpu.buffers.Runner`.

    def empty(self, shape: tuple[int, ...], dtype: str) -> OrtArray:
        return OrtArray(self._ort, shape, dtype, place=self.place)

    def io_binding(self) -> Any:
        return self._session.io_binding()

    def launch(self, io: Any) -> None:
        try:
            self._session.run_with_iobinding(io, self._options)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            raise ArtefactError(
                f"ONNX Runtime {self._ort.__version__} could not run the step on {self.device} "
                f"({first_line(error):.300}); open the artefact again, or give --device cpu."
            ) from error
