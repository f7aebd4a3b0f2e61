"""The cases that can be measured."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from runtimes.base.errors import needs

PACKAGES = ("onnxruntime", "onnx_ir", "torch", "safetensors", "tqdm")
CASES = {  # summary by name; the module of a case is named like it, with _ for -
    "steps": "one token, one segment, several streams, forms of memory: ONNX Runtime against PyTorch",
    "latency": "1,000 consecutive tokens: fixed memory against a key/value cache that grows",
    "growing-cache": "one token after 0 to 100,000 others: fixed memory against a cache that keeps all",
    "sliding-window": "segments with memory against a window recomputed for each token (Dai et al., Table 9)",
    "precision": "one token with weights and memory in each precision",
    "overhead": "one token of a small model: what Python adds to ONNX Runtime, and other busy processes",
    "load": "from opening to the first token, and the memory that stays in use: artefact against run",
    "start": "from the start of a process to its first token: Python, C++, OpenVINO, MNN, llama.cpp",
    "policy": "a policy at 1,000 steps a second: Python and C++ against PyTorch; with real-time scheduling",
    "mamba": "one token of a Mamba: ONNX Runtime against PyTorch and llama.cpp",
    "training": "a training step with memory and without, in bf16, with spans, and of the public code",
    "serve": "a server of many streams: throughput, CPU time, other servers",
    "gpu": "steps on an NVIDIA GPU: TensorRT, ONNX Runtime, PyTorch and training",
}
DRAWN = ("latency", "growing-cache", "sliding-window")  # cases with --plot


def load_case(name: str) -> Any:
    """The module of a case; it is imported when it is needed, because most cases import PyTorch."""
    with needs("cpu,export", *PACKAGES):
        return import_module(f"benchmarks.cases.{name.replace('-', '_')}")
