"""Memory tensors in another precision, for streams that continue in an artefact of another precision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.base.errors import ArtefactError, StreamError
from runtimes.contract.precision import MEMORY_PRESETS
from runtimes.contract.tensors import MAX_SCALE, SCALE, TensorSpec

# By NumPy's names.
TYPES = {str(preset.dtype): ELEMENT_TYPES[preset.dtype] for preset in MEMORY_PRESETS.values()}


def in_bytes(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Float32 numbers as int8 values and float32 scales, one scale for each vector along an axis.

    The scale is max |x| / 127. The values are x / scale, rounded to the nearest integer, and to the even one
    of two that are equally near. `xl_export.graph.memory.bytes_and_scales` is the same rule in a graph.
    """
    scales = np.abs(array).max(axis=axis, keepdims=True) / np.float32(127)
    rounded = np.round(array / np.where(scales > 0, scales, np.float32(1)))
    # A scale below the normal numbers has few bits, and a quotient may then be larger than 127.
    return np.clip(rounded, -127, 127).astype(np.int8), scales


def converted(
    stored: Mapping[str, np.ndarray], state: Iterable[TensorSpec], path: Path | str
) -> dict[str, np.ndarray]:
    """The memory tensors of a file in the element types of a session, as new arrays.

    state: the session's memory tensors. path: of the file, for messages. Raises ArtefactError for arrays that
    are no memory in any precision or hold impossible numbers, and StreamError for numbers that are too large
    for fp16.
    """
    left = dict(stored)
    tensors = {}
    for tensor in state:
        if tensor.is_scale:
            continue
        array = left.pop(tensor.name, None)
        if array is None or str(array.dtype) not in TYPES:
            raise ArtefactError(f"{path} is damaged: {tensor.name} is missing or has no type of a memory.")
        scales = left.pop(tensor.name + SCALE, None) if TYPES[str(array.dtype)].scaled else None
        _refuse_impossible(array, scales, path)
        if array.dtype == tensor.dtype:
            tensors[tensor.name] = np.array(array, order="C")
            if scales is not None:
                tensors[tensor.name + SCALE] = np.array(scales, order="C")
            continue
        numbers = array.astype(np.float32) if scales is None else array * scales
        if TYPES[tensor.dtype].scaled:
            tensors[tensor.name], tensors[tensor.name + SCALE] = in_bytes(numbers, -1)
            continue
        with np.errstate(over="ignore"):
            tensors[tensor.name] = numbers.astype(tensor.dtype)
        if not np.isfinite(tensors[tensor.name]).all():
            raise StreamError(
                f"{path} holds numbers beyond 65,504, the largest in fp16; continue it in an artefact with "
                "memory in fp32."
            )
    if left:
        raise ArtefactError(f"{path} is damaged: {min(left)!a:.60} is no tensor of this memory.")
    return tensors


def _refuse_impossible(array: np.ndarray, scales: np.ndarray | None, path: Path | str) -> None:
    """Raises ArtefactError for numbers that are not finite, and for scales that no vector has."""
    if TYPES[str(array.dtype)].scaled:
        if scales is None or scales.dtype != np.float32 or scales.shape != (*array.shape[:-1], 1):
            raise ArtefactError(f"{path} is damaged: a tensor of bytes has no scales.")
        array = scales
    if not np.isfinite(array).all():
        raise ArtefactError(f"{path} is damaged: it holds values that are not finite; start a new stream.")
    if scales is not None and not ((scales >= 0) & (scales <= MAX_SCALE)).all():
        raise ArtefactError(
            f"{path} is damaged: it holds scales that no key or value has; start a new stream."
        )
