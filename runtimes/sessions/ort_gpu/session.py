"""The session over an artefact on an NVIDIA GPU with ONNX Runtime: the memory stays on the device.

Nothing runs elsewhere without a word: a provider that ONNX Runtime left out, and a node that the provider
does not take, end in an error that names them.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError, first_line
from runtimes.contract.device import Device
from runtimes.contract.memory import Memory
from runtimes.contract.spec import GRAPH, VOCAB, Spec
from runtimes.contract.vocabulary import Vocab, load_vocab
from runtimes.sessions.graph import GraphSession, Positions
from runtimes.sessions.onnx_runtime import import_onnxruntime
from runtimes.sessions.ort_gpu.buffers import DeviceBinding, OrtArray
from runtimes.sessions.ort_gpu.loading import Loader
from runtimes.sessions.ort_gpu.providers import PROVIDERS


class OrtGpuSession(GraphSession):
    """The session protocol (see `runtimes.contract.session.Session`) over an artefact's standard graph.

    Steps of all memories of a session run one after the other: they share the device's scratch memory, which
    is part of the captured graphs. in_place: whether past and present of the memory are one buffer. captures:
    whether single tokens are captured as CUDA graphs.
    """

    logits_while_scoring: ClassVar[Positions] = "last"  # no empty tensors on a device

    def __init__(
        self,
        spec: Spec,
        vocab: Vocab,
        graph: Path,
        contents: Mapping[str, bytes | bytearray],
        *,
        device: Device,
        threads: int | None = None,
    ) -> None:
        super().__init__(spec, vocab, spec.identity)
        self.device, self.provider = device, PROVIDERS[device.kind]
        self._ort = import_onnxruntime(spec.form)
        self._numbers, self._one_at_a_time = itertools.count(1), threading.Lock()
        loader = Loader(
            ort=self._ort,
            provider=self.provider,
            device=device,
            spec=spec,
            graph=graph,
            threads=threads,
        )
        self._session = loader.load(contents)
        self.in_place = spec.form == "ring"
        # The output layer of a large vocabulary picks rows by their values (NonZero), which no capture takes;
        # a traced graph may do the same. Before release 1.31 a graph could not be given back.
        fixed = not spec.model.selective and spec.exporter == "graph"
        releases = hasattr(self._session, "release_captured_graph")
        self.captures = self.provider.captures and fixed and releases

    @property
    def computed_by(self) -> str:
        return f"ONNX Runtime, {self.provider.words} on {self.device}"

    @property
    def kernel(self) -> str:
        return self.provider.kernel

    @classmethod
    def of(
        cls,
        folder: Path,
        spec: Spec,
        contents: Mapping[str, bytearray],
        *,
        device: Device,
        threads: int | None = None,
    ) -> OrtGpuSession:
        """The session over an artefact that was read and verified (`read_artefact`).

        Raises MissingPackageError where the provider of the device is not installed or cannot start here, and
        ArtefactError where the graph cannot be loaded, or a node would run elsewhere.
        """
        vocab = load_vocab(folder / VOCAB, contents[VOCAB], contents)
        return cls(spec, vocab, folder / GRAPH, contents, device=device, threads=threads)

    def start(self, batch: int) -> Memory:
        if self.provider.most_rows is not None and batch > self.provider.most_rows:
            raise StreamError(
                f"batch is {batch}, and {self.device} takes 1 to {self.provider.most_rows} rows; use a "
                "smaller batch, or --device cuda."
            )
        return super().start(batch)

    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        with self._one_at_a_time:
            binding = memory.binding
            if not isinstance(binding, DeviceBinding) or not binding.serves(self, memory):
                memory.binding = binding = DeviceBinding(self, memory)
            binding.run(inputs, outputs, memory)

    # What the buffers of a memory need; see `runtimes.sessions.ort_gpu.buffers.Runner`.

    def empty(self, shape: tuple[int, ...], dtype: str) -> OrtArray:
        return OrtArray(self._ort, shape, dtype, device=self.provider.memory, index=self.device.index)

    def io_binding(self) -> Any:
        return self._session.io_binding()

    def new_graph(self) -> int:
        return next(self._numbers)

    def releaser(self) -> Callable[[int], None]:
        return functools.partial(_release, self._session)

    def launch(self, io: Any, graph: int) -> None:
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        try:
            self._session.run_with_iobinding(io, options)
        except Exception as error:  # ONNX Runtime raises bare classes of its own
            raise ArtefactError(
                f"ONNX Runtime {self._ort.__version__} could not run the step on {self.device} "
                f"({first_line(error):.300}); open the artefact again, or give --device cpu."
            ) from error


def _release(session: Any, number: int) -> None:
    session.release_captured_graph(number)
