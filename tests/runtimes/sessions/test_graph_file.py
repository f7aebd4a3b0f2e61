"""What an ONNX file refers to is known before ONNX Runtime opens it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from runtimes import open_session
from runtimes.base.errors import ArtefactError
from runtimes.contract.spec import FUSED, GRAPH, SPEC, WEIGHTS
from runtimes.sessions import fused_cpu
from runtimes.sessions.graph_file import refuse_foreign_graph
from tests import host_gpu
from tests.sealing import sealed

X, Y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
BRANCH = helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])


def outside(location: str) -> TensorProto:
    """A tensor w [4] that lies in another file."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("offset", "0"), ("location", location), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def constant(tensor: TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["w"], value=tensor)


def model(nodes: list, *initializers: TensorProto, functions: list | None = None) -> bytes:
    graph = helper.make_graph(nodes, "graph", [X], [Y], list(initializers))
    return helper.make_model(graph, functions=functions or []).SerializeToString()


def add(result: str = "y") -> onnx.NodeProto:
    return helper.make_node("Add", ["x", "w"], [result])


def branches(*graphs: onnx.GraphProto) -> onnx.NodeProto:
    return helper.make_node("If", ["c"], ["y"], then_branch=graphs[0], else_branch=graphs[-1])


def in_function(tensor: TensorProto) -> bytes:
    opsets = [helper.make_opsetid("", 21)]
    function = helper.make_function("d", "F", ["x"], ["y"], [constant(tensor), add()], opsets)
    return model([helper.make_node("F", ["x"], ["y"], domain="d")], functions=[function])


def sparse(tensor: TensorProto) -> onnx.NodeProto:
    indices = helper.make_tensor("indices", TensorProto.INT64, [4], [0, 1, 2, 3])
    values = onnx.SparseTensorProto(values=tensor, indices=indices, dims=[4])
    return helper.make_node("Constant", [], ["w"], sparse_value=values)


PLACES: dict[str, Callable[[TensorProto], bytes]] = {
    "an initializer": lambda tensor: model([add()], tensor),
    "a constant": lambda tensor: model([constant(tensor), add()]),
    "a sparse constant": lambda tensor: model([sparse(tensor), add()]),
    "a branch": lambda tensor: model([branches(helper.make_graph([add("z")], "b", [], [BRANCH], [tensor]))]),
    "a constant of a branch": lambda tensor: model(
        [branches(helper.make_graph([constant(tensor), add("z")], "b", [], [BRANCH]))]
    ),
    "a function": in_function,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["secret.bin", "../weights.bin", "/etc/hostname", "./weights.bin", ""])
def test_a_file_that_the_spec_does_not_list_is_refused(place: str, location: str) -> None:
    refuse_foreign_graph(PLACES[place](outside(WEIGHTS)), name="step.onnx", files=[WEIGHTS])
    with pytest.raises(ArtefactError, match=r"takes tensors from the file .* does not list"):
        refuse_foreign_graph(PLACES[place](outside(location)), name="step.onnx", files=[WEIGHTS])


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_a_loop_is_refused_wherever_it_is(kind: str) -> None:
    body = helper.make_graph([add("z")], "body", [], [BRANCH])
    loop = helper.make_node(kind, ["x"], ["y"], body=body)
    within = helper.make_graph([loop], "b", [], [BRANCH])
    for data in (model([loop]), model([branches(within, within)])):
        with pytest.raises(ArtefactError, match=f"has a {kind} operator, which may never end"):
            refuse_foreign_graph(data, name="step.onnx", files=[])


def test_every_graph_of_ours_passes(artefacts: dict[str, Path]) -> None:
    for folder in artefacts.values():
        for name in (GRAPH, FUSED):
            if (folder / name).is_file():
                refuse_foreign_graph((folder / name).read_bytes(), name=name, files=[WEIGHTS])
                with pytest.raises(ArtefactError, match=r"takes tensors from the file 'weights\.bin'"):
                    refuse_foreign_graph((folder / name).read_bytes(), name=name, files=["spec.json"])


def test_damaged_bytes_are_one_sentence_and_deep_graphs_too() -> None:
    data = PLACES["a branch"](outside(WEIGHTS))
    random = np.random.default_rng(0)
    for _ in range(2000):
        altered = bytearray(data[: random.integers(1, len(data) + 1)])
        for _ in range(random.integers(0, 4)):
            altered[random.integers(len(altered))] = random.integers(256)
        with contextlib.suppress(ArtefactError):  # any other error fails the test
            refuse_foreign_graph(bytes(altered), name="step.onnx", files=[WEIGHTS])
    graph = helper.make_graph([add("z")], "b", [], [BRANCH])
    for _ in range(30):
        graph = helper.make_graph([helper.make_node("If", ["c"], ["z"], body=graph)], "b", [], [BRANCH])
    with pytest.raises(ArtefactError, match="is not a readable ONNX file"):
        refuse_foreign_graph(model([branches(graph)]), name="step.onnx", files=[])


def test_a_field_that_other_readers_would_see_elsewhere_is_refused() -> None:
    """ONNX Runtime drops what a tag has beyond 32 bits; a reader that does not would miss the Loop."""
    tag = (4 << 3 | 2) + (1 << 32)  # op_type of a node, with a bit beyond
    written = bytearray()
    while tag >= 0x80:
        written.append(tag & 0x7F | 0x80)
        tag >>= 7
    node = bytes([*written, tag, 4]) + b"Loop"
    graph = bytes([1 << 3 | 2, len(node)]) + node
    with pytest.raises(ArtefactError, match="is not a readable ONNX file"):
        refuse_foreign_graph(bytes([7 << 3 | 2, len(graph)]) + graph, name="step.onnx", files=[])


def test_compiled_code_is_refused() -> None:
    """A provider would run it as it is; with `embed_mode` 0 it would read it from any file."""
    node = helper.make_node(
        "EPContext", ["x"], ["y"], domain="com.microsoft", embed_mode=0, ep_cache_context="/etc/engine"
    )
    with pytest.raises(ArtefactError, match="has an EPContext operator, which holds compiled code"):
        refuse_foreign_graph(model([node]), name="step.onnx", files=[])


@pytest.mark.parametrize(("file", "device"), [(GRAPH, "cpu"), (GRAPH, "cuda"), (FUSED, "cpu")])
def test_a_foreign_graph_is_refused_when_it_is_opened(
    file: str, device: str, artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every session; what an export has just written is not looked into."""
    host_gpu.install(monkeypatch)
    library = tmp_path / "library.so"
    monkeypatch.setattr(fused_cpu, "built", lambda: library if file == FUSED else None)
    folder = Path(shutil.copytree(artefacts["ring"], tmp_path / "artefact"))
    graph = onnx.load(folder / file, load_external_data=False)
    graph.graph.node.append(helper.make_node("Loop", [], ["never"]))
    (folder / file).write_bytes(graph.SerializeToString())
    document = json.loads((folder / SPEC).read_text())
    (folder / SPEC).write_bytes(sealed(document, folder, file))
    with pytest.raises(ArtefactError, match=rf"{file} has a Loop operator"):
        open_session(folder, device=device, threads=1)
