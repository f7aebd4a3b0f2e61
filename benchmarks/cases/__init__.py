"""The cases that can be measured: the name of each, and where its declaration is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from benchmarks.case import Case
from runtimes.base.errors import needs

PACKAGES = ("onnxruntime", "onnx_ir", "torch", "safetensors", "tqdm")
NAMES = {
    "decode": "steps.DECODE",
    "segment": "steps.SEGMENT",
    "batch": "steps.BATCH",
    "growing-cache": "growing_cache.CASE",
    "latency": "latency.CASE",
    "busy": "busy.CASE",
    "sliding-window": "sliding_window.CASE",
    "memory-forms": "memory_forms.CASE",
    "precision": "precision.CASE",
    "overhead": "overhead.CASE",
    "score": "score.CASE",
    "load": "load.CASE",
    "policy": "policy.CASE",
    "training": "training.CASE",
    "autocast-loss": "learning.autocast_loss.CASE",
    "architectures": "learning.architectures.CASE",
    "recipes": "learning.recipes.CASE",
    "own-text": "learning.own_text.CASE",
    "text-quality": "learning.text_quality.CASE",
    "music-memory": "learning.music_memory.CASE",
    "serve": "serving.serve.CASE",
    "ray": "serving.ray.CASE",
    "web": "web.CASE",
    "gpu": "on_gpu.gpu.CASE",
    "rtx-build": "rtx_build.CASE",
    "triton-kernel": "on_gpu.triton_kernel.CASE",
}


class _Cases(Mapping[str, Case]):
    """The cases by name. A case is imported when it is asked for, because most need PyTorch."""

    def __getitem__(self, name: str) -> Case:
        module, _, declared = NAMES[name].rpartition(".")
        with needs("cpu,export", *PACKAGES):
            case: Case = getattr(import_module(f"benchmarks.cases.{module}"), declared)
        return case

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


CASES = _Cases()
