"""Loads a graph on ONNX Runtime's CUDA provider and on no other, or says why that is impossible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError, MissingPackageError, first_line
from runtimes.base.files import Content
from runtimes.base.machine import available_cpus
from runtimes.base.progress import say_once
from runtimes.contract.device import Device
from runtimes.contract.spec import Spec
from runtimes.sessions.onnx_runtime import load_graph
from runtimes.sessions.ort_gpu.provider import CudaProvider, kernels_missing
from runtimes.sessions.ort_gpu.stream import Stream

Contents = Mapping[str, Content]
RECORD = "session.record_ep_graph_assignment_info"  # the option of a session that keeps the placement
TELLS_PLACEMENT = "get_provider_graph_assignment_info"  # the method of a session, from release 1.24 on
# ONNX Runtime keeps arithmetic on shapes on the CPU by design: it has a few integers, which other nodes want
# there. Of these operators it is not known whether a node computes a shape, so they are named only next to
# others.
OF_SHAPES = {"Shape", "Size", "Add", "Sub", "Mul", "Div", "Concat", "Squeeze", "Unsqueeze", "Gather", "Slice"}
# A part of ONNX Runtime's message for a graph if some nodes compute elsewhere.
CAPTURE_REFUSED = "have not been partitioned"


@dataclass(frozen=True, kw_only=True)
class Loader:
    """What is loaded, and on which device."""

    ort: Any
    provider: CudaProvider
    device: Device
    spec: Spec
    graph: Path  # its file, for messages; its content is in the `contents` of `load`
    threads: int | None
    library: Path | None = None  # with the operators of the graph that are not ONNX Runtime's

    def load(self, contents: Contents) -> tuple[Any, Stream]:
        """ONNX Runtime's session, and the stream on which it computes.

        Every node that computes runs on the device. A message says once which nodes compute shapes on the
        CPU.

        Raises MissingPackageError if the provider is not installed or does not start here, and
        ArtefactError if the graph cannot be loaded or a node would run elsewhere.
        """
        self.provider.refuse_missing(self.ort, self.device)
        self.provider.preload(self.ort)
        try:
            stream = self.provider.stream(self.device)
            session = self._kernels(contents, stream)
            if found := of_shapes_elsewhere(session, self.provider.name):
                say_once(f"ONNX Runtime computes {found} on the CPU, and all others on {self.device}")
            return session, stream
        except (ArtefactError, MissingPackageError):
            raise
        except Exception as error:  # ONNX Runtime's errors have no common base class
            if self.provider.fault(self.ort):
                raise self.provider.not_started(self.ort, self.device) from error
            raise ArtefactError(
                f"{self.graph} could not be loaded by ONNX Runtime {self.ort.__version__} on {self.device} "
                f"({first_line(error):.300}); give --device cpu, or export the artefact again."
            ) from error

    def _kernels(self, contents: Contents, stream: Stream) -> Any:
        chosen = self.provider.options(self.device)
        try:
            session = self._create(contents, chosen | self.provider.on_stream(stream, captured=True))
        except (ArtefactError, MissingPackageError):
            raise
        except Exception as error:
            # With CUDA graphs, ONNX Runtime refuses a graph if a node computes elsewhere. Without them it
            # loads and reports which nodes these are.
            try:
                session = self._create(contents, chosen | self.provider.on_stream(stream, captured=False))
            except Exception:  # the first error is more informative
                raise error from None
            self._refuse_unless_started(session)
            self._refuse_elsewhere(session, refused=CAPTURE_REFUSED in str(error))
            raise
        self._refuse_unless_started(session)
        return session

    def _create(self, contents: Contents, chosen: Mapping[str, str]) -> Any:
        """ONNX Runtime's session, with the chosen options of the provider."""
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = self.threads or available_cpus()
        options.add_session_config_entry(RECORD, "1")
        if self.library:
            options.register_custom_ops_library(str(self.library))
        providers = {"providers": [(self.provider.name, dict(chosen))], "enable_fallback": 0}
        return load_graph(self.ort, self.spec, self.graph, contents, options, providers)

    def _refuse_unless_started(self, session: Any) -> None:
        """Raises MissingPackageError if ONNX Runtime left the provider out, which it does silently."""
        if self.provider.name not in session.get_providers():
            raise self.provider.not_started(self.ort, self.device)

    def _refuse_elsewhere(self, session: Any, *, refused: bool) -> None:
        """Raises ArtefactError if a node computes on another device. refused: see `elsewhere`."""
        if found := elsewhere(session, self.provider.name, refused=refused):
            raise ArtefactError(
                f"{self.graph} would not run entirely on {self.device}: ONNX Runtime {self.ort.__version__} "
                f"puts {found} elsewhere; {kernels_missing(self.spec)}, or give --device cpu."
            )


def elsewhere(session: Any, provider: str, *, refused: bool = False) -> str:
    """The nodes on other providers, as a part of a sentence; empty if none of them computes more than
    shapes.

    refused: whether ONNX Runtime has found that they compute more; then all of them are named. ONNX Runtime
    before 1.24 does not report the placement; the sentence then says that.
    """
    if not hasattr(session, TELLS_PLACEMENT):
        return "some nodes, which this release does not name,"
    here, kinds = _placement(session, provider)
    return "" if not refused and not set(kinds) - OF_SHAPES else _named(here, kinds)


def of_shapes_elsewhere(session: Any, provider: str) -> str:
    """The nodes that ONNX Runtime keeps on the CPU because they compute shapes, as a part of a sentence.

    For a session for which `elsewhere` is empty. Empty if none are known.
    """
    here, kinds = _placement(session, provider)
    return _named(here, kinds) if kinds else ""


def _placement(session: Any, provider: str) -> tuple[int, Counter[str]]:
    """How many nodes are on the provider, and how many of each operator on others; 0 if ONNX Runtime does not
    report it.
    """
    here = 0
    kinds = Counter[str]()
    for part in getattr(session, TELLS_PLACEMENT, list)():
        if part.ep_name == provider:
            here += len(part.get_nodes())
        else:
            kinds.update(node.op_type for node in part.get_nodes())
    return here, kinds


def _named(here: int, kinds: Counter[str]) -> str:
    return f"{kinds.total()} of {here + kinds.total()} nodes ({', '.join(sorted(kinds))})"
