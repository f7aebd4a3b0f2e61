"""The cases that can be measured: the name of each, and where its declaration is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import NamedTuple

from benchmarks.case import Case
from runtimes.base.errors import needs

PACKAGES = ("onnxruntime", "onnx_ir", "torch", "safetensors", "tqdm")


class Entry(NamedTuple):
    """What is known of a case before its packages are imported."""

    declared: str  # where, below this package
    summary: str  # one line
    draws: bool = False  # whether the case can draw its result


ENTRIES = {
    "decode": Entry(
        "steps.DECODE",
        "one token at several memory lengths: ONNX Runtime against PyTorch with the same memory",
        draws=True,
    ),
    "segment": Entry("steps.SEGMENT", "one whole segment: ONNX Runtime against PyTorch"),
    "batch": Entry(
        "steps.BATCH", "one token of each of 1, 8 and 32 independent streams: ONNX Runtime against PyTorch"
    ),
    "growing-cache": Entry(
        "growing_cache.CASE",
        "one token after 0 to 100,000 others: fixed memory against a cache that keeps every token",
        draws=True,
    ),
    "latency": Entry(
        "latency.CASE", "1,000 consecutive tokens with fixed memory against a key/value cache that grows"
    ),
    "busy": Entry(
        "busy.CASE", "one token while other processes compute: the default number of threads, one, and all"
    ),
    "sliding-window": Entry(
        "sliding_window.CASE",
        "segments with memory against a window recomputed for each token (Table 9 of Dai et al.)",
        draws=True,
    ),
    "memory-forms": Entry("memory_forms.CASE", "one token in each of the three forms of memory"),
    "precision": Entry(
        "precision.CASE", "one token with weights in each precision, and with memory in fp16 and in int8"
    ),
    "overhead": Entry(
        "overhead.CASE",
        "one token of a small model: ONNX Runtime's run against its limit, and what Python adds",
    ),
    "score": Entry(
        "score.CASE", "many short texts side by side against one stream of as many tokens, and one by one"
    ),
    "load": Entry(
        "load.CASE", "from opening to the first token, and the memory that stays in use: artefact against run"
    ),
    "policy": Entry(
        "policy.CASE", "a policy at 1,000 steps a second: Python and C++ against PyTorch and a growing window"
    ),
    "training": Entry(
        "training.CASE",
        "a training step with memory and without, in bf16, with spans, and of the public code",
    ),
    "autocast-loss": Entry(
        "learning.autocast_loss.CASE",
        "pairs of short trainings in fp32 and in bf16 from the same weights: their held-out bits",
    ),
    "architectures": Entry(
        "learning.architectures.CASE", "six small models trained for the same CPU time: bits per byte"
    ),
    "recipes": Entry(
        "learning.recipes.CASE", "published recipes, reduced and trained for a stated CPU time: their curves"
    ),
    "own-text": Entry(
        "learning.own_text.CASE",
        "texts of several sizes, each trained for a stated time as `train --text` does",
    ),
    "text-quality": Entry(
        "learning.text_quality.CASE",
        "held-out bits per byte of the stories: an artefact, n-grams and compressors",
    ),
    "music-memory": Entry(
        "learning.music_memory.CASE",
        "held-out bits per event of the chorales: memory, no memory, windows, n-grams",
    ),
    "serve": Entry(
        "serving.serve.CASE",
        "a server of many streams next to the steps of its model: CPU, tokens/s, gaps, memory",
    ),
    "ray": Entry(
        "serving.ray.CASE",
        "many short texts by one process, by one actor of Ray Data and by two, with the cores",
    ),
    "web": Entry(
        "web.CASE", "one token in WebAssembly, in place and with copies, against Node, Python and C++"
    ),
    "gpu": Entry("on_gpu.gpu.CASE", "steps on an NVIDIA GPU: engines, providers, PyTorch and training"),
    "rtx-build": Entry(
        "rtx_build.CASE", "engines that TensorRT-RTX builds without a GPU: layers, bytes and seconds"
    ),
    "triton-kernel": Entry(
        "on_gpu.triton_kernel.CASE", "TensorRT's attention kernel against PyTorch's on an NVIDIA GPU"
    ),
}


class _Cases(Mapping[str, Case]):
    """The cases by name. A case is imported when it is asked for, because most need PyTorch."""

    def __getitem__(self, name: str) -> Case:
        module, _, declared = ENTRIES[name].declared.rpartition(".")
        with needs("cpu,export", *PACKAGES):
            case: Case = getattr(import_module(f"benchmarks.cases.{module}"), declared)
        return case

    def __iter__(self) -> Iterator[str]:
        return iter(ENTRIES)

    def __len__(self) -> int:
        return len(ENTRIES)


CASES = _Cases()
