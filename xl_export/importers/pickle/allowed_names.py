"""The names that a pickle may contain, and the result of a call of each of them.

The result is plain data, or a `Foreign` that records the call. A name is only compared with the tables here:
no name is imported, not even an allowed one. Every other name is refused, whether the pickle calls it or only
mentions it, because an ordinary unpickler imports a name that is mentioned, and that runs its module.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from xl_export.importers.pickle.tensors import DTYPES, Storages
from xl_export.importers.pickle.values import Foreign, Named, PickleError, checked_key, clean

# Packages whose classes occur in published checkpoints and vocabularies: an instance of one becomes a
# Foreign.
FOREIGN_MODULES = re.compile(
    r"mem_transformer|proj_adaptive_softmax|data_utils|vocabulary|data|argparse|fp16_opt|__main__"
    r"|(apex|fairseq)(\.\w+)*"
    r"|utils(\.\w+)*|torch\.(nn\.(modules|parallel)|optim)(\.\w+)*|(transformers|tokenizers|sacremoses)(\.\w+)*",
    re.ASCII,
)
# This excludes functions of those packages, and paths through attributes.
CLASS_NAME = re.compile(r"_*[A-Z]\w*", re.ASCII)
# A path through one of these modules is not a class of a model: `utils.subprocess`, `Popen`.
DANGEROUS = frozenset((
    "os", "posix", "nt", "sys", "io", "subprocess", "builtins", "importlib", "runpy", "shutil", "ctypes",
    "pty", "socket", "pip", "multiprocessing", "threading", "asyncio", "pickle", "marshal", "types",
    "functools", "operator", "inspect", "webbrowser",
))  # fmt: skip
FOREIGN_NAMES = {
    "re._compile": "re._compile",
    "numpy.ndarray": "numpy.ndarray",
    "numpy.dtype": "numpy.dtype",
    "numpy.core.multiarray._reconstruct": "numpy.ndarray",
    "numpy._core.multiarray._reconstruct": "numpy.ndarray",
    # Of the arguments of a training that a checkpoint keeps: folders, times and versions.
    "pathlib.PosixPath": "pathlib.Path",
    "pathlib._local.PosixPath": "pathlib.Path",
    "pathlib.WindowsPath": "pathlib.Path",
    "pathlib._local.WindowsPath": "pathlib.Path",
    "datetime.datetime": "datetime.datetime",
    "datetime.timedelta": "datetime.timedelta",
    "torch.torch_version.TorchVersion": "torch.torch_version.TorchVersion",
    "collections.deque": "collections.deque",
}
MAX_NAME = 200
NUMPY_SCALARS = frozenset({"f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"})


def named(module: str, name: str) -> Named:
    """Returns the global with this name; raises PickleError for a name that is not in the tables."""
    full = f"{module}.{name}"
    if (
        full in CALLS
        or full in TENSORS
        or full in MENTIONED
        or full in FOREIGN_NAMES
        or (len(full) < MAX_NAME and is_foreign_class(module, name))
    ):
        return Named(full)
    raise PickleError(
        f"calls {clean(full)}, which is neither plain data nor a class of a known model (for a model of your "
        "own code, see docs/guides/own-model.md)"
    )


def is_foreign_class(module: str, name: str) -> bool:
    """Whether a global is a class of one of the packages that are known and not imported."""
    return bool(
        FOREIGN_MODULES.fullmatch(module)
        and CLASS_NAME.fullmatch(name)
        and DANGEROUS.isdisjoint(module.split("."))
    )


def called(storages: Storages, target: Named, args: tuple[Any, ...]) -> Any:
    """Returns the result of a call, or of an instance that is made without its constructor."""
    try:
        if target.name in TENSORS:
            return storages.view(*args[:4])
        if target.name in CALLS:
            return CALLS[target.name](args)
    except (TypeError, ValueError) as error:  # the arguments do not fit the function
        raise PickleError(f"calls {target.name} with {len(args)} arguments that it does not take") from error
    if target.name in MENTIONED:
        raise PickleError(f"calls {target.name}, which a checkpoint only mentions")
    return Foreign(FOREIGN_NAMES.get(target.name, target.name), args)


def _parameter(args: tuple[Any, ...]) -> Tensor:
    """Returns the tensor in `_rebuild_parameter(tensor, …)`, or in the class itself (PyTorch 0.4)."""
    if not args or not isinstance(args[0], Tensor):
        raise ValueError
    return args[0]


def _dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    """Returns the dictionary of OrderedDict([[key, value], …]), Counter({…}) or dict(…)."""
    (content,) = args or ((),)
    if type(content) is dict:
        return dict(content)
    if type(content) not in (list, tuple) or any(
        type(pair) not in (list, tuple) or len(pair) != 2 for pair in content
    ):
        raise ValueError
    return {checked_key(key): value for key, value in content}


def _members(args: tuple[Any, ...]) -> list[Any]:
    (content,) = args or ((),)
    if type(content) not in (list, tuple, set, frozenset):
        raise ValueError
    return [checked_key(value) for value in content]


def _sequence(args: tuple[Any, ...]) -> list[Any]:
    (content,) = args or ((),)
    if type(content) not in (list, tuple):
        raise ValueError
    return list(content)


def _device(args: tuple[Any, ...]) -> str:
    kind, *index = args
    if type(kind) is not str or len(index) > 1 or any(type(number) is not int for number in index):
        raise ValueError
    return ":".join([kind, *map(str, index)])


def _latin1(args: tuple[Any, ...]) -> bytes:
    """Returns the bytes of _codecs.encode(text, "latin1"), the form of bytes in protocol 2."""
    text, codec = args
    if type(text) is not str or type(codec) is not str:
        raise ValueError
    if codec not in ("latin1", "latin-1"):
        raise PickleError(f"calls _codecs.encode for the codec {clean(codec)}, which is not read here")
    return text.encode("latin-1")


def _nothing(args: tuple[Any, ...], result: Any = None) -> Any:
    """Returns the result of a function without arguments."""
    () = args
    return result


def _scalar(args: tuple[Any, ...]) -> Any:
    """Returns the number of numpy's scalar(dtype, bytes)."""
    dtype, data = args
    if not isinstance(dtype, Foreign) or dtype.name != "numpy.dtype" or type(data) is not bytes:
        raise ValueError
    kind = dtype.args[0] if dtype.args else None
    order = dtype.state[1:2] if type(dtype.state) is tuple else ()
    if type(kind) is not str or kind not in NUMPY_SCALARS or order not in (("<",), ("|",)):
        raise PickleError("has a NumPy number of a type that is not read here")
    (value,) = np.frombuffer(data, np.dtype("<" + kind)).tolist()
    return value


# Of a storage, an offset, a shape, strides and more.
TENSORS = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2")
CALLS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.Size": lambda args: tuple(_sequence(args)),
    "torch.device": _device,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": lambda args: _dict(args[1:]),  # missing keys stay missing
    "_codecs.encode": _latin1,
    # Modules held it until PyTorch 1.1.
    "torch.nn.backends.thnn._get_thnn_function_backend": _nothing,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
for _module in ("builtins", "__builtin__"):
    CALLS |= {
        f"{_module}.set": lambda args: set(_members(args)),
        f"{_module}.frozenset": lambda args: frozenset(_members(args)),
        f"{_module}.list": lambda args: _sequence(args),
        f"{_module}.tuple": lambda args: tuple(_sequence(args)),
        f"{_module}.dict": _dict,
        f"{_module}.bytes": partial(_nothing, result=b""),  # the form of zero bytes in protocol 2
    }
# The types of storages and tensors, and the factories of a defaultdict.
MENTIONED = frozenset(DTYPES) | {str(dtype) for dtype in DTYPES.values()} | {"torch.Tensor"}
MENTIONED |= {
    f"{module}.{name}"
    for module in ("builtins", "__builtin__")
    for name in ("int", "long", "float", "bool", "str", "unicode", "object")
}
