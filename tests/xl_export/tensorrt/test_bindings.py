"""Every name of TensorRT and CUDA that this project uses exists in the real packages, and so does every one
of the stand-ins.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runtimes
import xl_export
from tests.fake_gpu import FakeCuda, FakeTensorRT, _Context, _Engine
from tests.xl_export.tensorrt.bindings import needs_bindings

RUNTIMES, EXPORT = Path(runtimes.__file__).parent, Path(xl_export.__file__).parent / "tensorrt"
SOURCES = [
    *(
        RUNTIMES / "sessions/tensorrt" / f"{name}.py"
        for name in ("session", "bound", "module", "runtime_cache")
    ),
    *(EXPORT / f"{name}.py" for name in ("build", "network", "plugin", "progress")),
    EXPORT.parent / "deployment" / "refit.py",
]
# What our names for TensorRT's objects are instances of.
OBJECTS = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "made": "IOptimizationProfile",
    "engine": "ICudaEngine",
    "_engine": "ICudaEngine",
    "_runtime": "Runtime",
    "runtime": "Runtime",
    "refitter": "Refitter",
    "weights_parser": "OnnxParserRefitter",
    "inspector": "EngineInspector",
    "context": "IExecutionContext",
    "runtime_config": "IRuntimeConfig",
    "parser_error": "ParserError",
    "layer": "ILayer",
}
RTX_ONLY = {
    "ComputeCapability",
    "CudaGraphStrategy",
    "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE",
    "DynamicShapesKernelSpecializationStrategy",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
}


def chains(tree: ast.AST) -> Iterator[list[str]]:
    """Every `a.b.c` of a source as its names."""
    for node in ast.walk(tree):
        names, at = [], node
        while isinstance(at, ast.Attribute):
            names.insert(0, at.attr)
            at = at.value
        if names and isinstance(at, ast.Name):
            yield [at.id, *names]


def used_names() -> set[str]:
    """`Name.member` of the module TensorRT for everything that the sources use of it."""
    found = set()
    for source in SOURCES:
        for first, *rest in chains(ast.parse(source.read_text())):
            names = [first, *rest]
            while names[0] in ("self", "parsed", "made") and len(names) > 2:
                names = names[1:]
            if names[0] in ("trt", "_trt"):
                found.add(".".join(names[1:3]))
            elif names[0] in OBJECTS and not (names[0] == "context" and names[1] in vars_of("Context")):
                found.add(f"{OBJECTS[names[0]]}.{names[1]}")
    found.remove("ILayer.attention")  # of the class that `allow_decomposition` gives the layer
    return found | {"IAttentionInputLayer.attention", "IAttention.decomposable"}


def vars_of(name: str) -> set[str]:
    """Names of a class of our own that has the same name for its instances as TensorRT's."""
    from runtimes.sessions.tensorrt import bound

    return {*vars(getattr(bound, name)), "profile", "captured", "serial", "context"}


NAMES = sorted(used_names())
PRESENT = """
import json
def there(name):
    at = trt
    for part in name.split('.'):
        if not hasattr(at, part): return False
        at = getattr(at, part)
    return True
print(json.dumps([name for name in json.loads(sys.argv[1]) if not there(name)]))
"""


@needs_bindings
def test_every_name_exists_in_tensorrt(bindings: Callable[..., str]) -> None:
    assert set(json.loads(bindings(PRESENT, json.dumps(NAMES)))) == RTX_ONLY


def test_every_name_exists_in_tensorrt_rtx() -> None:
    trt = pytest.importorskip(
        "tensorrt_rtx", reason="tensorrt-rtx is not installed (it is for Linux on x86-64)"
    )
    missing = []
    for name in NAMES:
        at: Any = trt
        for part in name.split("."):
            at = getattr(at, part, None)
        if at is None:
            missing.append(name)
    assert missing == []


@needs_bindings
def test_every_name_of_the_stand_in_exists_in_tensorrt(bindings: Callable[..., str]) -> None:
    own = {"cuda", "log", "profiles", "ort", "tensors", "engine"}
    names = [name for name in vars(FakeTensorRT) if not name.startswith("__")]
    for stand_in, real in ((_Engine, "ICudaEngine"), (_Context, "IExecutionContext")):
        names += [f"{real}.{name}" for name in vars(stand_in) if not name.startswith("_") and name not in own]
    names += [f"TensorIOMode.{mode.name}" for mode in FakeTensorRT.TensorIOMode]
    assert set(json.loads(bindings(PRESENT, json.dumps(names)))) <= RTX_ONLY


def test_every_function_of_the_stand_in_exists_in_cuda() -> None:
    cuda = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    text = (RUNTIMES / "sessions/tensorrt/device_memory.py").read_text()
    used = {
        names[2] for names in chains(ast.parse(text)) if names[:2] == ["self", "_cuda"] and len(names) > 2
    }
    used |= {kind for kind in ("cudaFree", "cudaFreeHost", "cudaGraphExecDestroy") if f'"{kind}"' in text}
    stand_in = {name for name in vars(FakeCuda) if name.startswith("cuda")}
    assert used == stand_in
    assert {name for name in used if not hasattr(cuda, name)} == set()
    for enumeration in ("cudaMemcpyKind", "cudaStreamCaptureMode", "cudaError_t"):
        assert all(
            hasattr(getattr(cuda, enumeration), member.name) for member in getattr(FakeCuda, enumeration)
        )
