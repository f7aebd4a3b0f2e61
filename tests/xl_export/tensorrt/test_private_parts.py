"""The unpromised part of the bindings that `private_parts.py` uses works in the installed packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.xl_export.tensorrt.bindings import needs_bindings
from xl_export.tensorrt.private_parts import CHECKED_WITH, allow_decomposition


def test_an_attention_layer_of_the_base_class_becomes_decomposable() -> None:
    """Checked with TensorRT-RTX 1.7.1.116: the mark is set on the layer itself, as any later look at it
    shows.
    """
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed (Linux on x86-64)")
    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network()
    query, key, value = (network.add_input(name, trt.float16, (1, 2, 8, 16)) for name in "qkv")
    kind = trt.AttentionNormalizationOp.SOFTMAX
    attention = network.add_attention(query, key, value, kind, False)
    assert not attention.decomposable
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    assert not any(hasattr(layer, "attention") for layer in layers), (
        "get_layer gives the layer's own class now: allow_decomposition needs no change of class any more"
    )
    allow_decomposition(trt, layers)
    assert attention.decomposable


@needs_bindings
def test_the_names_are_there_in_tensorrt(bindings: Callable[..., str]) -> None:
    """Checked with the bindings of TensorRT 11.4.0.106."""
    names = ("LayerType.ATTENTION_INPUT", "IAttentionInputLayer.attention", "IAttention.decomposable")
    bindings("\n".join(f"trt.{name}" for name in names))


@pytest.mark.parametrize("package", CHECKED_WITH)
def test_the_installed_packages_are_those_it_was_checked_with(package: str) -> None:
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert installed == CHECKED_WITH[package], (
        f"{package} has another version: run this file's other tests and write the version into "
        "private_parts.py"
    )
