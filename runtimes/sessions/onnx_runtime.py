"""Artefacts on ONNX Runtime. The memory is bound in place, so a step copies none of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import is_
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.base.errors import ArtefactError, ConfigError, MissingPackageError, first_line
from runtimes.base.files import Content, read_bytes
from runtimes.base.machine import available_cpus
from runtimes.base.startup import FATAL, load_onnxruntime
from runtimes.contract.memory import Memory
from runtimes.contract.spec import (
    CUDA_GRAPH,
    FUSED,
    FUSED_ORT,
    GRAPH,
    ORT_GRAPH,
    VOCAB,
    WEIGHTS,
    Spec,
    load_spec,
    open_artefact,
)
from runtimes.contract.tensors import POSITIONS
from runtimes.contract.vocabulary import VOCAB_FILES, Vocab, load_vocab
from runtimes.sessions import fused_cpu
from runtimes.sessions.description import describe_spec
from runtimes.sessions.graph import Arrays, GraphSession
from runtimes.sessions.graph_file import refuse_foreign_graph, refuse_foreign_ort_graph

Kernel = Literal["standard", "fused"]
KernelChoice = Kernel | Literal["auto"]
COMPUTED_BY: dict[Kernel, str] = {
    "standard": "ONNX Runtime, standard operators",
    "fused": "ONNX Runtime, fused operator",
}
ON_THE_CPU: dict[str, Any] = {"providers": ["CPUExecutionProvider"], "enable_fallback": 0}
FROM_MEMORY = "add_external_initializers_from_files_in_memory"
# ONNX Runtime computes with the bytes that it is given for a file; releases before this option copy them.
WITHOUT_COPY = "session.use_external_initializer_file_buffers_directly"
FORMAT = "session.load_model_format"
# ONNX Runtime copies the matrices of each graph into the order in which it multiplies fastest. One token of
# one row needs it least (of 4 rows of a Mamba it halves the time), so that graph uses the bytes of the file.
AS_STORED = "session.disable_prepacking"
# By default one thread copies them all. From 1.31 on the threads of the session can share that work; older
# releases ignore the option.
COPY_ON_ALL_THREADS = "session.prepack.enable_parallel"
# Microseconds that a thread of a step waits awake for work. By default it waits so long that, while other
# processes compute, a step takes longer with two threads than with one.
SPIN = "session.intra_op.spin_duration_us"
SPIN_MICROSECONDS = 50
# Where one node computes a layer: long enough to stay awake until the next token. These nodes do not use the
# threads while other processes need the CPUs: see fused_cpu/load.hpp.
LAYER_SPIN_MICROSECONDS = 200
LAYER = b"RingRelativeLayer"
# ONNX Runtime's name of the folder in which it looks for tensors outside of a graph that is given as bytes.
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
# The first release of ONNX Runtime that computes a graph, and one of opset 24.
OLDEST_RELEASE = (1, 23)
OLDEST_24 = (1, 25)


class OrtSession(GraphSession):
    """The session protocol (see `runtimes.contract.session.Session`) over one artefact's step graph.

    library: the file of the fused operator, if the graph uses it. contents: of the graph and its weights, by
    file name, if they were read and verified already; otherwise this process has just written the files. The
    session keeps the weights and computes with these very bytes.
    """

    def __init__(
        self,
        spec: Spec,
        vocab: Vocab | None,
        graph: Path,
        *,
        threads: int | None = None,
        library: Path | None = None,
        contents: Mapping[str, Content] | None = None,
    ) -> None:
        super().__init__(spec, vocab, spec.identity)
        self._kernel: Kernel = "fused" if library else "standard"
        self._library = library
        self._ort = import_onnxruntime(spec)
        if contents is None:
            weights = (WEIGHTS,) if spec.storage == "external" else ()
            names = {graph.name, *spec.token_graphs.values(), *weights}
            contents = {name: read_bytes(graph.with_name(name)) for name in names}
        graphs: Mapping[Any, str] = spec.token_graphs or {None: graph.name}
        self._sessions = {
            count: self._load(graph.with_name(name), contents, threads, tokens=count)
            for count, name in graphs.items()
        }
        """ONNX Runtime's sessions by number of tokens; a single graph has the key None."""

    @property
    def computed_by(self) -> str:
        return COMPUTED_BY[self._kernel]

    @property
    def kernel(self) -> Kernel:
        return self._kernel

    @classmethod
    def describe(cls, folder: Path) -> dict[str, Any]:
        """The facts of the artefact in a folder; needs no ONNX Runtime.

        fused_graph: whether the artefact has a graph for the fused operator. fused_kernel_built: whether this
        machine has the operator. fused_kernel_variant: what its library was compiled for, `native` or the
        name of the package's variant; null if there is none.
        """
        spec = load_spec(folder)
        return describe_spec(spec, folder) | {
            "computed_by": COMPUTED_BY["fused" if spec.only_fused or chosen_library(spec) else "standard"],
            "fused_graph": spec.fused_graph_file is not None,
            "fused_kernel_built": fused_cpu.built() is not None,
            "fused_kernel_variant": fused_cpu.variant(),
        }

    @classmethod
    def open(cls, folder: Path, *, threads: int | None = None, kernel: KernelChoice = "auto") -> OrtSession:
        """A session over the artefact in a folder, every hash of which was verified.

        All files but the weights are verified before a model is loaded. The weights are hashed while ONNX
        Runtime loads them, and no session is returned before their hash is right.

        kernel: `auto` takes the fused operator where the artefact has a graph for it and this machine has the
        operator: `xl-export fused-kernel` has built it, or the package's wheel holds it. Otherwise it takes
        the standard operators. Raises ConfigError if `fused` cannot be had.
        """
        with read_artefact(folder) as (spec, contents):
            return cls.of(folder, spec, contents, threads=threads, kernel=kernel)

    @classmethod
    def of(
        cls,
        folder: Path,
        spec: Spec,
        contents: Mapping[str, Content],
        *,
        threads: int | None = None,
        kernel: KernelChoice = "auto",
    ) -> OrtSession:
        """The same for an artefact that is being read by `read_artefact`."""
        library = chosen_library(spec, kernel)
        graph = folder / ((library and spec.fused_graph_file) or spec.graph_file)
        for name in {graph.name, *spec.token_graphs.values()}:
            refuse_foreign(spec, folder / name, contents[name])
        return cls(
            spec, vocab_of(spec, folder, contents), graph, threads=threads, library=library, contents=contents
        )

    def scorer(self, logits: np.ndarray, targets: np.ndarray) -> Callable[[], np.ndarray]:
        if self._library is None:
            return super().scorer(logits, targets)
        return fused_cpu.scorer(self._library, logits, targets)

    def run(self, inputs: Arrays, outputs: Arrays, memory: Memory) -> None:
        binding = memory.binding
        if not isinstance(binding, _Binding) or binding.inputs is not inputs:
            session = self._sessions[inputs[POSITIONS].shape[1] if self._token_counts else None]
            if not isinstance(binding, _Binding) or not binding.serves(session, memory):
                memory.binding = binding = _Binding(session, self._ort, self.spec, memory)
            binding.bind(inputs, outputs)
        self.begins()
        try:
            binding.session.run_with_iobinding(binding.ios[0])
        except Exception as error:  # as in `_load`: a graph that loads may still fail when it runs
            raise ArtefactError(
                f"ONNX Runtime {self._ort.__version__} could not run the step ({first_line(error)}); export "
                "the artefact again."
            ) from error
        binding.advance(memory)

    def _load(
        self, graph: Path, contents: Mapping[str, Content], threads: int | None, *, tokens: int | None
    ) -> Any:
        """ONNX Runtime's session over the bytes of a graph and of its weights. tokens: see `load_graph`."""
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = threads or available_cpus()
        options.add_session_config_entry(WITHOUT_COPY, "1")
        options.add_session_config_entry(COPY_ON_ALL_THREADS, "1")
        if self.spec.exporter == "graph" and self.spec.target == "onnxruntime":
            # More would take a third of the time of opening, and make one node of each residual addition and
            # norm, with which a segment takes 10 % longer. Traced graphs have more to gain.
            options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        if self._library:
            self._register(options, self._library)
        if tokens == self.spec.fixed_rows == 1 and self.spec.precision == "fp32":
            options.add_session_config_entry(AS_STORED, "1")
        try:
            session = load_graph(self._ort, self.spec, graph, contents, options, ON_THE_CPU, tokens=tokens)
            session.weights = contents.get(WEIGHTS)  # they must live as long as what computes with them
            return session
        except ArtefactError:
            raise
        except Exception as error:  # ONNX Runtime raises bare classes of its own for every damaged graph
            raise ArtefactError(
                f"{graph} could not be loaded by ONNX Runtime {self._ort.__version__} ({first_line(error)}); "
                "export the artefact again, or install the onnxruntime version that its spec.json names."
            ) from error

    def _register(self, options: Any, library: Path) -> None:
        try:
            options.register_custom_ops_library(str(library))
        except Exception as error:  # as in _load
            raise MissingPackageError(
                f"the fused operator {library} could not be loaded by ONNX Runtime {self._ort.__version__} "
                f"({first_line(error)}); delete it: the standard operators compute the same, and "
                "`xl-export fused-kernel` builds it again."
            ) from error


class _Binding:
    """An IO binding over the arrays of one memory, kept from step to step.

    Past and present of a ring are one buffer, because its only reader, TensorScatter, writes in place. Other
    memory is read from one set of buffers and written to a second set. The two sets change places after
    each step.
    """

    def __init__(self, session: Any, ort: Any, spec: Spec, memory: Memory) -> None:
        self.session = session
        self._in_place = spec.in_place
        # ONNX Runtime would copy an array that is not contiguous.
        self._arrays = {name: np.ascontiguousarray(array) for name, array in memory.tensors.items()}
        memory.tensors.update(self._arrays)
        self._spare = self._arrays
        pairs = [(self._arrays, self._spare)]
        if not self._in_place:
            self._spare = {name: np.empty_like(array) for name, array in self._arrays.items()}
            pairs = [(self._arrays, self._spare), (self._spare, self._arrays)]
        self.ios = [self._bind(ort, spec, past, present) for past, present in pairs]
        """ONNX Runtime's bindings, of the next step first."""
        self.inputs: Arrays | None = None
        """The inputs that are bound. They belong to a step of one session over these arrays."""

    def bind(self, inputs: Arrays, outputs: Arrays) -> None:
        """Binds the arrays of the next steps."""
        self.inputs = inputs
        for io in self.ios:
            for name, array in inputs.items():
                io.bind_cpu_input(name, array)
            for name, array in outputs.items():
                io.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def serves(self, session: Any, memory: Memory) -> bool:
        """Whether this binding is of the session and over the arrays that the memory holds now."""
        tensors = memory.tensors
        return self.session is session and all(
            map(is_, map(tensors.get, self._arrays), self._arrays.values())
        )

    def advance(self, memory: Memory) -> None:
        """Makes the buffers that a step has just written the tensors of the memory."""
        if memory.whole is not None:
            if not self._in_place:
                memory.store(self._spare)
        elif not self._in_place:
            self.ios.reverse()
            self._arrays, self._spare = self._spare, self._arrays
            memory.tensors.update(self._arrays)

    def _bind(self, ort: Any, spec: Spec, past: dict[str, np.ndarray], present: dict[str, np.ndarray]) -> Any:
        io = self.session.io_binding()
        for state in spec.state:
            io.bind_ortvalue_input(state.name, ort.OrtValue.ortvalue_from_numpy(past[state.name]))
            io.bind_ortvalue_output(state.present, ort.OrtValue.ortvalue_from_numpy(present[state.name]))
        return io


def read_artefact(
    folder: Path, identity: str | None = None
) -> AbstractContextManager[tuple[Spec, dict[str, Content]]]:
    """The spec of an artefact folder and the content of what a session loads.

    The weights are verified at the end of the `with` statement; see `open_artefact`.
    """
    wanted = (GRAPH, ORT_GRAPH, FUSED, FUSED_ORT, CUDA_GRAPH, WEIGHTS, *VOCAB_FILES)
    return open_artefact(folder, wanted=wanted, identity=identity)


def vocab_of(spec: Spec, folder: Path, contents: Mapping[str, Content]) -> Vocab | None:
    """The vocabulary of an artefact; None unless its step is a language model's.

    contents: of the files of `folder` by name.
    """
    return load_vocab(folder / VOCAB, contents[VOCAB], contents) if spec.language_model else None


def refuse_foreign(spec: Spec, graph: Path, content: Content) -> None:
    """Raises ArtefactError for a graph with loops, compiled code, or tensors in files that are not the
    artefact's.
    """
    if spec.in_ort_format:
        refuse_foreign_ort_graph(content, name=str(graph))
    else:
        files = [WEIGHTS] if spec.storage == "external" else []
        refuse_foreign_graph(content, name=str(graph), files=files)


def load_graph(
    ort: Any,
    spec: Spec,
    graph: Path,
    contents: Mapping[str, Content],
    options: Any,
    providers: Mapping[str, Any],
    *,
    tokens: int | None = None,
) -> Any:
    """ONNX Runtime's session over the bytes of a graph and its weights, checked against the spec's tensors.

    options, providers: of the session; `options` is changed. tokens: of a graph of fixed sizes that is not
    for whole segments. Raises ArtefactError for a graph that is not the spec's, and whatever ONNX Runtime
    raises. `refuse_foreign` comes first for a graph that this process did not write.
    """
    in_layers = tokens is None and LAYER in bytes(contents[graph.name])
    options.add_session_config_entry(SPIN, str(LAYER_SPIN_MICROSECONDS if in_layers else SPIN_MICROSECONDS))
    # Otherwise ONNX Runtime would tell the format from the first bytes.
    options.add_session_config_entry(FORMAT, "ORT" if spec.in_ort_format else "ONNX")
    options.log_severity_level = FATAL  # errors are raised; device discovery warns where there is no GPU
    if spec.target == "tensorrt":
        # Engines multiply by dequantised weights as they are; ONNX Runtime would round activations too.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    external = spec.storage == "external"
    if not hasattr(options, FROM_MEMORY):  # 1.23, the newest for Python 3.10: it maps the file itself
        session = ort.InferenceSession(str(graph), options, **providers)
    else:
        if external:
            weights = contents[WEIGHTS]
            getattr(options, FROM_MEMORY)([WEIGHTS], [weights], [len(weights)])
        # A tensor that ONNX Runtime does not take from these bytes, as in a branch, is looked for in a
        # folder. A path that is no folder keeps it from reading files of the working folder.
        options.add_session_config_entry(EXTERNAL_FOLDER, os.devnull)
        session = ort.InferenceSession(bytes(contents[graph.name]), options, **providers)
    _verify_signature(session, spec, graph, tokens)
    return session


def chosen_library(spec: Spec, kernel: KernelChoice = "auto") -> Path | None:
    """The file of the fused operator where an artefact runs with it on this machine; see
    `OrtSession.open`.
    """
    if kernel == "standard":
        if spec.only_fused:
            raise ConfigError(
                f"this artefact has only {FUSED_ORT}, which needs the fused operator; export the run again "
                "without --fused-ort for the standard operators."
            )
        return None
    library = fused_cpu.built() if spec.fused_graph_file else None
    if library is None and (kernel == "fused" or spec.only_fused):
        unserved = "does not serve this artefact's model and memory"
        missing = "is not built on this machine" if spec.fused_graph_file else unserved
        other = "export without --fused-ort" if spec.only_fused else "use the standard operators"
        raise ConfigError(
            f"the fused operator {missing}; build it with `xl-export fused-kernel`, or {other}."
        )
    return library


def import_onnxruntime(spec: Spec) -> Any:
    """The module `onnxruntime`; raises MissingPackageError unless it computes the artefact's operators."""
    onnxruntime = load_onnxruntime()
    major, minor, *_ = onnxruntime.__version__.split(".")
    oldest = OLDEST_24 if spec.opset >= 24 else OLDEST_RELEASE
    if (int(major), int(minor)) < oldest:
        raise MissingPackageError(
            f"{spec.form} memory needs ONNX Runtime {'.'.join(map(str, oldest))} or newer, and this is "
            f"{onnxruntime.__version__}; run `pip install -U onnxruntime`, or export with --memory shift."
        )
    return onnxruntime


def _verify_signature(session: Any, spec: Spec, graph: Path, tokens: int | None) -> None:
    """Raises ArtefactError unless the graph has exactly the tensors of the spec, by which buffers are
    sized.
    """
    kinds: dict[str, str] = {kind.onnx_runtime: name for name, kind in ELEMENT_TYPES.items()}
    for what, promised, found in (
        ("inputs", spec.inputs, session.get_inputs()),
        ("outputs", spec.outputs, session.get_outputs()),
    ):
        expected = [
            (tensor.name, tensor.dtype, list(spec.graph_shape(tensor, tokens))) for tensor in promised
        ]
        actual = [(node.name, kinds.get(node.type, node.type), node.shape) for node in found]
        for want, have in zip(expected, actual, strict=False):
            if want != have:
                raise ArtefactError(
                    f"{graph} has {what} {have}, and spec.json promises {want}; export the artefact again."
                )
        if len(expected) != len(actual):
            raise ArtefactError(
                f"{graph} has {len(actual)} {what}, and spec.json promises {len(expected)}; export the "
                "artefact again."
            )
