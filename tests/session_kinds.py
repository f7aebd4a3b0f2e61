"""The kinds of sessions that `test_sessions.py` puts under the same tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runtimes.contract.tensors import FORMS
from tests import fake_gpu
from tests.architectures import ARCHITECTURES
from xl_export.artefact.export import export

# Every kind of session and what computes it. A new runtime adds a line here, and a folder of its kind to
# `folders_of_kinds`.
COMPUTED_BY = {
    "torch": "PyTorch",
    "ring": "ONNX Runtime, standard operators",
    "shift": "ONNX Runtime, standard operators",
    "hidden": "ONNX Runtime, standard operators",
    "device": "ONNX Runtime, CUDA on cuda",  # over a stand-in for the GPU; its memory is a ring
    "cut-ring": "ONNX Runtime, standard operators",  # for TensorRT: segments are cut at the ring's end
    "engine": "TensorRT engine",  # over a stand-in for the GPU; its memory is shift
    "ring-engine": "TensorRT engine",  # over the graph of cut-ring
}
KINDS = tuple(COMPUTED_BY)
OTHER_KINDS = tuple(kind for kind in KINDS if kind not in ("cut-ring", "ring-engine"))  # of `OTHERS`
# A model with a selective output layer, and one with persistent vectors, spans and groups of heads.
OTHERS = ("adaptive-softmax", "all-attention-groups")
OTHER_SESSIONS = tuple(f"{name} {kind}" for name in OTHERS for kind in OTHER_KINDS)


def folders_of_kinds(made: dict[str, Path], make_run: Callable[..., Path], folder: Path) -> dict[str, Path]:
    """A folder of each kind to open; those of `OTHERS` as "name kind". made: what there is already."""
    made = dict(made)
    for name in OTHERS:
        made[f"{name} torch"] = trained = make_run(**ARCHITECTURES[name])
        for form in FORMS:
            made[f"{name} {form}"] = export(trained, folder / f"{name}-{form}", memory=form)
    made |= {f"{name}device": made[f"{name}ring"] for name in ("", *(f"{name} " for name in OTHERS))}
    # ONNX Attention rounds all rows alike, which the body of the project's operator does not.
    options = {"target": "tensorrt", "precision": "fp32", "attention": "native"}
    made["cut-ring"] = export(made["torch"], folder / "cut-ring", **options)  # type: ignore[arg-type]
    made["ring-engine"] = fake_gpu.make_engine(made["cut-ring"], folder / "ring-engine")
    for name in ("", *(f"{name} " for name in OTHERS)):
        made[f"{name}engine"] = fake_gpu.make_engine(made[f"{name}shift"], folder / f"{name}engine")
    return made
