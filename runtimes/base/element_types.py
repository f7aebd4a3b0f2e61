"""The element types of tensors, and their names in each format. A new type is a row here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ElementName = Literal["int64", "int32", "float32", "float16", "int8"]  # as in NumPy, PyTorch and spec.json


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """The names of one element type."""

    stored: str
    """NumPy's name of the type as files hold it, in little-endian."""
    safetensors: str | None
    """Name in safetensors files; None if our files have no such tensors."""
    onnx: str
    """Name in ONNX: a member of `onnx_ir.DataType`."""
    onnx_runtime: str
    """ONNX Runtime's name for a tensor of this type."""
    tensorrt: str
    """Member of `tensorrt.DataType`."""
    inference: str
    """Name in the Open Inference Protocol; in Triton's configuration files, it follows `TYPE_`."""
    scaled: bool = False
    """Whether each vector of a memory of this type has a scale, in a float32 tensor of its own."""


ELEMENT_TYPES: dict[ElementName, ElementType] = {
    "int64": ElementType(
        stored="<i8",
        safetensors="I64",
        onnx="INT64",
        onnx_runtime="tensor(int64)",
        tensorrt="INT64",
        inference="INT64",
    ),
    "int32": ElementType(
        stored="<i4",
        safetensors=None,
        onnx="INT32",
        onnx_runtime="tensor(int32)",
        tensorrt="INT32",
        inference="INT32",
    ),
    "float32": ElementType(
        stored="<f4",
        safetensors="F32",
        onnx="FLOAT",
        onnx_runtime="tensor(float)",
        tensorrt="FLOAT",
        inference="FP32",
    ),
    "float16": ElementType(
        stored="<f2",
        safetensors="F16",
        onnx="FLOAT16",
        onnx_runtime="tensor(float16)",
        tensorrt="HALF",
        inference="FP16",
    ),
    "int8": ElementType(
        stored="|i1",
        safetensors="I8",
        onnx="INT8",
        onnx_runtime="tensor(int8)",
        tensorrt="INT8",
        inference="INT8",
        scaled=True,
    ),
}
