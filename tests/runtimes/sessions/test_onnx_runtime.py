"""What ONNX Runtime itself refuses, at loading or only in a step, becomes one sentence and nothing on
standard error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from runtimes import check, open_session
from runtimes.base.errors import ArtefactError, MissingPackageError
from runtimes.contract.spec import GRAPH, VOCAB, WEIGHTS, load_spec
from runtimes.sessions.onnx_runtime import OrtSession, import_onnxruntime


def rewrite(folder: Path, change: Callable[[onnx.ModelProto], object], reseal: Callable[..., None]) -> None:
    """Changes the graph, as an exporter with a bug would: hashes and all."""
    model = onnx.load(folder / GRAPH, load_external_data=False)
    change(model)
    onnx.save(model, folder / GRAPH)
    reseal(folder, GRAPH)


def take_sixth_position(model: onnx.ModelProto) -> None:
    """Reads position 5 of every segment, which a segment of one token does not have."""
    gather = next(
        node for node in model.graph.node if node.op_type == "Gather" and node.input[0] == "position_ids"
    )
    index = next(tensor for tensor in model.graph.initializer if tensor.name == gather.input[1])
    index.CopyFrom(numpy_helper.from_array(np.array(5), index.name))


def test_a_graph_that_fails_only_when_it_runs(
    artefact: Path, reseal: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    rewrite(artefact, take_sixth_position, reseal)
    session = open_session(artefact)
    with pytest.raises(
        ArtefactError, match=r"could not run the step \(.*\); export the artefact again"
    ) as caught:
        session.step(np.zeros((1, 1), np.int64), session.start(1))
    assert "\n" not in str(caught.value)
    with pytest.raises(ArtefactError):
        check(artefact)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: model.graph.node[3].__setattr__("op_type", "Surprise"),
            "could not be loaded by ONNX Runtime",
        ),
        (lambda model: model.graph.node.pop(), "could not be loaded by ONNX Runtime"),
        (
            lambda model: model.opset_import[0].__setattr__("version", 99),
            "could not be loaded by ONNX Runtime",
        ),
        (
            lambda model: model.graph.input[0].type.tensor_type.shape.dim[0].__setattr__("dim_param", "rows"),
            r"has inputs \('input_ids', 'int64', \['rows', 'tokens'\]\), and spec\.json promises "
            r"\('input_ids', 'int64', \['batch', 'tokens'\]\)",
        ),
        (lambda model: model.graph.output.pop(), r"has \d+ outputs, and spec\.json promises \d+"),
    ],
)
def test_a_graph_that_is_not_what_the_spec_promises(
    change: Callable[[onnx.ModelProto], object],
    message: str,
    artefact: Path,
    reseal: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    rewrite(artefact, change, reseal)
    with pytest.raises(ArtefactError, match=message) as caught:
        open_session(artefact)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_weights_that_are_too_short_for_the_graph(artefact: Path, reseal: Callable[..., None]) -> None:
    (artefact / WEIGHTS).write_bytes((artefact / WEIGHTS).read_bytes()[:100])
    reseal(artefact, WEIGHTS)
    with pytest.raises(ArtefactError, match="could not be loaded by ONNX Runtime"):
        open_session(artefact)


def flip_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("name", [GRAPH, VOCAB])
def test_an_altered_graph_or_vocabulary_is_never_loaded(
    name: str, artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_last_byte(artefact / name)
    monkeypatch.setattr(OrtSession, "_load", lambda *_: pytest.fail("loaded before it was verified"))
    with pytest.raises(ArtefactError, match=f"{name} was altered"):
        open_session(artefact)


def test_the_oldest_runtime_follows_from_the_operator_set(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.2")
    ring = load_spec(artefacts["ring"])
    import_onnxruntime(load_spec(artefacts["shift"]))
    import_onnxruntime(dataclasses.replace(ring, target="web", opset=21))
    with pytest.raises(MissingPackageError, match=r"ring memory needs ONNX Runtime 1\.25 or newer"):
        import_onnxruntime(ring)


def test_idle_threads_spin_for_at_most_fifty_microseconds(artefacts: dict[str, Path]) -> None:
    session = OrtSession.open(artefacts["ring"], kernel="standard")
    options = session._sessions[None].get_session_options()
    assert int(options.get_session_config_entry("session.intra_op.spin_duration_us")) <= 50
