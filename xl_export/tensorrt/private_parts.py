"""The one place that uses a part of TensorRT's Python bindings which their documentation does not promise.

`tests/xl_export/tensorrt/test_private_parts.py` tries it on the real packages, and names the versions it was
checked with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CHECKED_WITH = {"tensorrt-rtx": "1.7.1.116", "tensorrt-cu13-bindings": "11.4.0.106"}


def allow_decomposition(trt: Any, layers: Iterable[Any]) -> None:
    """Lets TensorRT run an attention as products and a softmax if it has no fused kernel for its sizes or
    types.

    Changes the layers of a parsed network. `INetworkDefinition.get_layer` returns the base class `ILayer`,
    which has no property `attention`; the underlying object is the right one. So the class of the Python
    object is replaced.
    """
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)  # older releases have no such layer
    for layer in layers:
        if layer.type == kind:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
