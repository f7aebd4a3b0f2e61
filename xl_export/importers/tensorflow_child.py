"""Reads a TensorFlow checkpoint in a separate process and writes its variables to an `.npz` file.

TensorFlow reads the file with native code, and a damaged file could end the process that reads it.
`tensorflow_checkpoint.py` starts this process with three arguments: the prefix of the checkpoint, the `.npz`
file, and the number of bytes that the variables may have together. Their sizes are known before one of them
is read.
"""

from __future__ import annotations

import math
import sys

import numpy as np

REFUSED_STATUS = 4  # exit status
OPTIMISER = ("/Adam", "/Adam_1", "/Momentum", "/Adafactor")  # ends of names that belong to the optimiser
MAX_NAMES = 100_000


def write_variables(prefix: str, out: str, limit: int) -> None:
    """Writes the variables of a checkpoint to an `.npz` file, without the optimiser's.

    Raises ValueError if they are larger than `limit` or cannot be named in such a file.
    """
    import tensorflow

    reader = tensorflow.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    # Variables without a number are texts, such as the graph that newer releases of TensorFlow store.
    kinds = {name: np.dtype(dtypes[name].as_numpy_dtype) for name in shapes if not name.endswith(OPTIMISER)}
    kinds = {name: kind for name, kind in kinds.items() if not kind.hasobject}
    claimed = sum(math.prod(shapes[name]) * kind.itemsize for name, kind in kinds.items())
    if len(kinds) > MAX_NAMES or claimed > limit or any(n < 0 for name in kinds for n in shapes[name]):
        raise ValueError(f"it claims {claimed:,} bytes in {len(kinds):,} variables, too many for its files")
    arrays = {name: np.asarray(reader.get_tensor(name)) for name in kinds}
    # The `.npz` format has no bfloat16.
    np.savez(
        out, **{name: a if a.dtype.kind in "biuf" else a.astype(np.float32) for name, a in arrays.items()}
    )


def main(prefix: str, out: str, limit: str) -> int:
    try:
        write_variables(prefix, out, int(limit))
    except Exception as error:
        # Every error is one sentence for the parent. TensorFlow has its own error classes.
        print(str(error).strip().partition("\n")[0] or type(error).__name__, file=sys.stderr)
        return REFUSED_STATUS
    return 0
