"""Tensors whose sizes are checked before memory is taken.

They come from the storages of PyTorch's pickles, from safetensors files and from `.npz` files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from runtimes.base.errors import ArtefactError, first_line
from runtimes.base.files import reading, refuse_other_kinds
from runtimes.base.npz import read_npz
from xl_export.importers.pickle.values import PickleError, clean, described

DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
DTYPES |= {name.replace("torch.", "torch.cuda."): dtype for name, dtype in DTYPES.items()}
MAX_VIEW_RATIO = (
    4  # tensors may share storages; together they have at most this many times the bytes of the file
)
MAX_DIMENSIONS = 8
MAX_TENSORS = 100_000
BLOCK_BYTES = 1 << 20


class Storages:
    """The storages that a pickle mentions, as one flat CPU tensor for each key, and views of them.

    budget: the bytes of the file; all storages together cannot exceed them. Memory is allocated when a
    storage is first mentioned. The caller, who knows where the elements are, fills it.
    """

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.left_of_views = MAX_VIEW_RATIO * budget
        self.flat: dict[str, Tensor] = {}
        self.tensors = 0

    def storage(self, key: Any, kind: str, count: Any) -> Tensor:
        """Returns the storage `key` with `count` elements; it holds zeros until it is filled.

        kind: the class that shows the type of the elements, such as `torch.FloatStorage`.
        """
        dtype = DTYPES.get(kind)
        if dtype is None:
            raise PickleError(f"has a storage of the type {kind}, which is not read here")
        if type(key) is not str or type(count) is not int or count < 0:
            raise PickleError(
                f"has a storage whose key is {described(key)} and whose number of elements is "
                f"{described(count)}"
            )
        if key not in self.flat:
            self.left -= count * dtype.itemsize
            if self.left < 0 or len(self.flat) >= MAX_TENSORS:
                raise PickleError(
                    f"has a storage {clean(key)} of {described(count)} elements, too many for its file"
                )
            self.flat[key] = torch.zeros(count, dtype=dtype)
        flat = self.flat[key]
        if flat.dtype != dtype or len(flat) != count:
            raise PickleError(f"describes its storage {clean(key)} in two ways")
        return flat

    def view(self, flat: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
        """Returns a tensor over a storage, with no element outside it.

        With a stride of 0, as `expand` makes it, a tensor has more elements than its storage.
        `MAX_VIEW_RATIO` bounds the size of copies of all tensors.
        """
        if (
            not isinstance(flat, Tensor)
            or flat.dim() != 1
            or type(shape) is not tuple
            or type(strides) is not tuple
        ):
            raise PickleError("makes a tensor of something else than a storage, a shape and strides")
        numbers = (offset, *shape, *strides)
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
            raise PickleError("makes a tensor with a shape that is not one of whole numbers")
        if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
            raise PickleError(f"makes a tensor of {len(shape)} dimensions with {len(strides)} strides")
        count = 1
        for size in shape:
            count *= size
        end = offset  # one after the last element
        if count:
            end += 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if end > len(flat):
            raise PickleError(f"makes a tensor {list(shape)} of a storage of {len(flat)} elements")
        self.left_of_views -= count * flat.element_size()
        self.tensors += 1
        if self.left_of_views < 0 or self.tensors > MAX_TENSORS:
            raise PickleError(
                f"makes tensors of more than {MAX_VIEW_RATIO} times the bytes of its file, "
                f"or more than {MAX_TENSORS}"
            )
        return flat.as_strided(shape, strides, offset)


def fill(flat: Tensor, stream: Any, key: str) -> None:
    """Reads the elements of the storage `key` from `stream`; raises PickleError if there are too few."""
    target = flat.view(torch.uint8).numpy()
    done = 0
    while done < len(target):
        count = stream.readinto(target[done : done + BLOCK_BYTES])
        if not count:
            raise PickleError(
                f"describes {flat.numel()} elements in storage {clean(key)}, and the file ends before them"
            )
        done += count
    if flat.dtype == torch.bool and done and target.max() > 1:
        raise PickleError(f"has a storage {clean(key)} of booleans with other values than 0 and 1")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Returns every tensor of a safetensors file.

    Raises ArtefactError if its header and its bytes do not agree.
    """
    with reading(path):
        refuse_other_kinds(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ArtefactError(
            f"{path} is not a readable safetensors file ({first_line(error)}); copy it again."
        ) from error


def read_npz_tensors(path: Path) -> dict[str, Tensor]:
    """Returns every array of an `.npz` file as a tensor.

    Raises ArtefactError if `read_npz` does, and for arrays that do not hold numbers. `tensorflow.py`
    explains how a TensorFlow checkpoint becomes such a file.
    """
    tensors = {}
    for name, array in read_npz(path).items():
        try:
            tensors[name] = torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise ArtefactError(
                f"{path}: {clean(name)} is of the type {clean(str(array.dtype))}; expected little-endian "
                f"numbers."
            ) from error
    return tensors
