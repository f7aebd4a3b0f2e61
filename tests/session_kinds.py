"""The kinds of sessions that `test_sessions.py` puts under the same tests."""

from __future__ import annotations

# Every kind of session and what computes it. A new runtime adds a line here, and a folder of its kind to
# `folders`.
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
