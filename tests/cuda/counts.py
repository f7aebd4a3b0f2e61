"""What a single token asks of a GPU, counted: ONNX Runtime's real CUDA provider over stub libraries.

`python -m tests.cuda.counts` writes the table of counts.md again.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from runtimes import open_session
from runtimes.base.files import write_json
from runtimes.base.records import to_json
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import ByteVocab, save_vocab
from runtimes.sessions.fused_cpu import build
from runtimes.sessions.ort_gpu.provider import PROVIDER
from runtimes.sessions.ort_gpu.session import OrtGpuSession
from tests.cuda.stubs import Event, Stubs, load_all

LAYERS = 2
DOCUMENT = Path(__file__).with_name("counts.md")
BEGIN = "<!-- counted: python -m tests.cuda.counts -->\n"
END = "<!-- end of counted -->"
# The options of `xl-export export` that matter to a GPU.
CASES: dict[str, dict[str, Any]] = {
    "": {},
    "--memory shift": {"memory": "shift"},
    "--memory hidden": {"memory": "hidden"},
    "--precision fp16": {"precision": "fp16", "memory_precision": "fp16"},
    "--attention-as node": {"attention": "plugin"},
    "--attention-as node --memory-precision fp16": {"attention": "plugin", "memory_precision": "fp16"},
    "--attention-as node --precision fp16": {"attention": "plugin", "precision": "fp16"},
    "--precision int8": {"precision": "int8"},
    "--precision int4": {"precision": "int4"},
    "--memory-precision int8": {"memory_precision": "int8"},
    "--target tensorrt": {"target": "tensorrt"},
    "--target tensorrt --memory shift": {"target": "tensorrt", "memory": "shift"},
    "--target tensorrt --precision int8": {"target": "tensorrt", "precision": "int8"},
    "--target tensorrt --attention-as operators": {"target": "tensorrt", "attention": "native"},
}
TF32 = "--device cuda+tf32"


@dataclass(frozen=True)
class Counts:
    """One case, counted."""

    on_cuda: int
    """Nodes of the graph on the GPU."""
    elsewhere: tuple[str, ...]
    """The operators of the nodes on the CPU."""
    token: tuple[Event, ...]
    """Of a token that is not captured."""
    replayed: tuple[Event, ...]
    """Of a token that is a captured graph."""
    memory: tuple[range, ...]
    """The addresses of the memory tensors."""

    @property
    def products(self) -> Counter[str]:
        """The matrix products of a token, by the type of their factors."""
        return Counter(event.name for event in self.token if event.kind == "product")

    def of_memory(self) -> list[Event]:
        """The copies and fills of a token that read or write a memory tensor."""
        return [
            event
            for event in (*self.token, *self.replayed)
            if event.kind in ("copy", "fill")
            and any(address in part for part in self.memory for address in (event.source, event.target))
        ]


def make_run(folder: Path) -> Path:
    """A run of random weights that every case can be exported from."""
    import torch

    from trainer.model.config import ModelConfig
    from trainer.model.model import LanguageModel
    from trainer.run.checkpoint import save_tensors
    from trainer.run.config import TrainConfig
    from trainer.run.history import CONFIG, MODEL

    sizes = {"layers": LAYERS, "d_model": 32, "heads": 2, "head_dim": 16, "d_ff": 64, "vocab_size": 256}
    model = ModelConfig(**sizes)  # type: ignore[arg-type]
    rule = MemoryRule(mem_len=12, segment=4)
    config = TrainConfig(model=model, training=rule, evaluation=rule, vocab="byte", text=None)
    torch.set_num_threads(1)  # more are slower for so small a model
    torch.manual_seed(0)
    write_json(folder / CONFIG, to_json(config))
    save_vocab(folder, ByteVocab())
    save_tensors(folder / MODEL, LanguageModel(model).state_dict())
    return folder


def counted(artefact: Path, stubs: Stubs, *, device: str = "cuda") -> Counts:
    """Opens an artefact and steps it until a token is captured."""
    session = open_session(artefact, device=device, threads=1)
    assert isinstance(session, OrtGpuSession)
    memory = session.start(1)
    steps = []
    for _ in range(5):
        stubs.forget()
        session.predict(np.zeros((1, 1), np.int64), memory)
        steps.append(tuple(stubs.events()))
    on_cuda = 0
    elsewhere = []
    for part in session._session.get_provider_graph_assignment_info():
        kinds = [node.op_type for node in part.get_nodes()]
        if part.ep_name == PROVIDER.name:
            on_cuda += len(kinds)
        else:
            elsewhere += kinds
    arrays = [array.value for array in memory.tensors.values()]  # type: ignore[attr-defined]
    starts = [array.data_ptr() for array in arrays]
    sizes = [array.tensor_size_in_bytes() for array in arrays]
    return Counts(
        on_cuda=on_cuda,
        elsewhere=tuple(sorted(elsewhere)),
        token=tuple(event for event in steps[1] if not event.captured),  # after it, one is captured
        replayed=steps[-1],
        memory=tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True)),
    )


def table(counts: Iterable[tuple[str, Counts]]) -> str:
    """The Markdown table of all cases."""
    lines = [
        "| option | nodes on the GPU, on the CPU | kernels | matrix products | copies on the "
        "GPU | in a graph: launches, uploads, downloads, waits |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in counts:
        token = Counter(event.kind for event in found.token)
        on_device = sum(event.name == "on device" for event in found.token)
        products = ", ".join(f"{count} {kind}" for kind, count in found.products.items()) or "0"
        replayed = Counter(event.name if event.kind == "copy" else event.kind for event in found.replayed)
        kinds = f" ({', '.join(sorted(set(found.elsewhere)))})" if found.elsewhere else ""
        cells = [
            f"`{name}`" if name else "(defaults)",
            f"{found.on_cuda}, {len(found.elsewhere)}{kinds}",
            str(token["kernel"]),
            products,
            str(on_device),
            ", ".join(str(replayed[kind]) for kind in ("graph", "upload", "download", "wait")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """The table in a document's text."""
    return text.partition(BEGIN)[2].partition(END)[0]


def count_all(folder: Path) -> dict[str, Counts]:
    """Every case, exported below a folder that exists."""
    from xl_export.artefact import export as exporting

    build()  # the library of the node
    run = folder / "run"
    run.mkdir()
    make_run(run)
    stubs = load_all()
    counts = {}
    for number, (name, options) in enumerate(CASES.items()):
        with patch.object(exporting, "on_cuda", return_value=None):  # stubs compute nothing to compare
            artefact = exporting.export(run, folder / f"artefact-{number}", **options)
        counts[name] = counted(artefact, stubs)
    return counts | {TF32: counted(folder / "artefact-0", stubs, device="cuda+tf32")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        new = table(count_all(Path(temporary)).items())
    content = DOCUMENT.read_text()
    DOCUMENT.write_text(content.replace(BEGIN + written(content) + END, BEGIN + new + END))
