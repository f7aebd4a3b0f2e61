"""The sizes of the tensors of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

Sizes = tuple[int | str, ...]


def sizes_of(value: ir.Value | None) -> Sizes | None:
    """The sizes of a tensor, names for those that vary; None if one is unknown."""
    if value is None or value.shape is None:
        return None
    sizes: Sequence[int | str | None] = [
        size if isinstance(size, int) else size.value for size in value.shape
    ]
    return tuple(size for size in sizes if size is not None) if None not in sizes else None


def broadcast(one: ir.Value | None, other: ir.Value | None) -> Sizes | None:
    """The sizes of an elementwise result of two tensors; None if one is unknown."""
    left, right = sizes_of(one), sizes_of(other)
    if left is None or right is None:
        return None
    rank = max(len(left), len(right))
    left, right = ((1,) * (rank - len(sizes)) + sizes for sizes in (left, right))
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))
