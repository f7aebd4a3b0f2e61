"""Model repositories for Triton Inference Server: the configuration, the graph, and answers of a stand-in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from runtimes import Memory, Session, open_session
from runtimes.base.errors import ConfigError, UserError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import Spec, load_spec
from tests.architectures import ARCHITECTURES
from tests.commands import xl
from tests.steps import observed
from tests.triton_server import Server, read_config
from tests.xl_export.tracing import modules
from trainer.run.checkpoint import load_run
from xl_export import trace
from xl_export.artefact.export import export, make_spec
from xl_export.artefact.write import finite_arrays
from xl_export.deployment import model_repository
from xl_export.deployment.model_repository import read_sequence_graph, write_model
from xl_export.deployment.server_config import CONFIG
from xl_export.deployment.server_graph import READ, WRITTEN, SequenceGraph, sequence_graph
from xl_export.graph.step import StepGraph

# What each client sends: the lengths of its requests. The streams begin at different times.
STREAMS = {7: [5, 1, 1, 8, 3, 8, 8, 1], 2**40: [1, 8, 1, 8, 3, 8, 1], 3: [8, 1, 8, 3, 1]}
BEGINS = {7: 0, 2**40: 1, 3: 2}
Inputs = dict[str, np.ndarray]


def difference(server: Server, session: Session, inputs_of: Callable[[int, int], Inputs]) -> float:
    """The largest difference between the answers of the server, whose requests wait together wherever they
    can, and those of a session. inputs_of: from a seed and a length.
    """
    memories: dict[int, Memory] = {}
    worst = 0.0
    for turn in range(12):
        requests: list[tuple[int, bool, Inputs]] = []
        for sequence, lengths in STREAMS.items():
            step = turn - BEGINS[sequence]
            if 0 <= step < len(lengths):
                inputs = inputs_of(100 * sequence + step, lengths[step])
                requests.append((sequence, step == 0, inputs))
        for (sequence, starts, inputs), answer in zip(requests, server.infer(requests), strict=True):
            memory = session.start(1) if starts else memories[sequence]
            if "targets" in inputs:
                log_probs, memory = session.score(inputs["input_ids"], inputs["targets"], memory)
                expected = {"log_probs": log_probs}
            elif "input_ids" in inputs:
                logits, memory = session.step(inputs["input_ids"], memory)
                expected = {"logits": logits}
            else:
                expected, memory = session.step(inputs, memory)
                assert answer.keys() == expected.keys()
            memories[sequence] = memory
            worst = max(worst, *(float(np.abs(answer[name] - x).max()) for name, x in expected.items()))
    return worst


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "selective": ("adaptive-softmax", {}),
    "zeros": ("adaptive-softmax-wide-first", {}),
    "groups": ("all-attention-groups", {}),
    "engine": ("transformer-xl", {"memory": "shift", "target": "tensorrt"}),
}
MARKED = [pytest.param(case, marks=pytest.mark.slow) for case in ("zeros", "groups", "engine")]


@pytest.mark.parametrize("case", ["ring", "shift", "hidden", "selective", "policy", *MARKED])
def test_the_server_gives_the_answers_of_the_session(
    case: str,
    artefacts: dict[str, Path],
    make_run: Callable[..., Path],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    if case in CASES:
        name, options = CASES[case]
        artefact = export(make_run(**ARCHITECTURES[name]), tmp_path / "model", **options)
    else:
        artefact = request.getfixturevalue("policy") if case == "policy" else artefacts[case]
    spec = load_spec(artefact)

    def inputs_of(seed: int, length: int) -> Inputs:
        if case == "policy":
            return observed(1, min(length, 4), seed)
        names = ("input_ids", "targets") if spec.model.selective else ("input_ids",)
        draw = np.random.default_rng(seed)
        return {name: draw.integers(spec.model.vocab_size, size=(1, length)) for name in names}

    folder = write_model(artefact, tmp_path / "repository")
    server = Server(folder, leaks=True)
    server.infer([(1, True, inputs_of(1, 8))])
    server.end(1)  # its memory is there when the others begin
    assert difference(server, open_session(artefact), inputs_of) < (3e-2 if case == "engine" else 1e-4)
    assert server.executions < sum(map(len, STREAMS.values()))  # requests of equal length share a step
    too_long = observed(1, 5, 0) if case == "policy" else inputs_of(1, spec.rule.segment + 1)
    with pytest.raises(Exception, match=r"Reshape node.*cannot be reshaped"):
        server.infer([(7, False, too_long)])
    onnx.checker.check_model(str(folder / "1" / "model.onnx"))


def test_a_graph_for_the_server_that_computes_something_else_is_never_written(
    artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys_for_values(model: ir.Model, spec: Spec) -> SequenceGraph:
        made = sequence_graph(model, spec)
        keys, values = (
            x for x in made.model.graph.outputs if str(x.name).startswith(f"{WRITTEN}key_values.0000")
        )
        keys.name, values.name = values.name, keys.name
        return made

    monkeypatch.setattr(model_repository, "sequence_graph", keys_for_values)
    with pytest.raises(UserError, match="with --triton the graph differs from itself"):
        write_model(artefacts["ring"], tmp_path / "repository")
    assert not list((tmp_path / "repository").iterdir())


@pytest.mark.slow
def test_the_server_refuses_steps_that_are_not_promised(tmp_path: Path) -> None:
    """Its streams may not be cut within a segment, and its rows change each other."""

    class Both(modules.WholeSegments, modules.MixedRows):
        pass

    without = {"padding", "cuts", "rows"}
    free = trace(Both(), tmp_path / "free", rule=modules.RULE, without=without)
    server = Server(write_model(free, tmp_path / "repository"))
    assert server.config["max_batch_size"] == [1]
    server.infer([(1, True, observed(1, modules.T - 1, 0))])
    with pytest.raises(Exception, match=r"Reshape node.*cannot be reshaped"):
        server.infer([(1, False, observed(1, 1, 0))])
    fixed = trace(Both(), tmp_path / "fixed", rule=modules.RULE, without=without, rows=1)
    with pytest.raises(ConfigError, match="exactly 1 row"):
        write_model(fixed, tmp_path / "repository")


def test_states_keep_their_order_in_models_of_any_depth(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """The server pairs them by alphabetical order; 12 layers have numbers of one and two digits."""
    rule = MemoryRule(mem_len=4, segment=4)
    run = load_run(make_run(layers=12, d_model=8, heads=1, head_dim=4, d_ff=4, rule=rule))
    for form in ("ring", "hidden"):
        spec = make_spec(run, rule, form, "onnxruntime", "fp32", "fp32")  # type: ignore[arg-type]
        graph = sequence_graph(StepGraph(spec, run.config.model, finite_arrays(run.model)).build(), spec)
        read, written = ([pair[at].name for pair in graph.states] for at in (0, 1))
        assert len(read) == (25 if form == "ring" else 13)
        pairs = dict(zip(sorted(read), sorted(written), strict=True))
        assert pairs == {one.name: other.name for one, other in graph.states}
        for names in (
            read,
            written,
            [*read, *written, *(fact.name for fact in graph.inputs + graph.outputs)],
        ):
            assert not any(a != b and b.startswith(a) for a in names for b in names)
        layers = [name for name in sorted(read) if "hidden" in name or name.endswith(".key")]
        assert layers == [name for name in read if name in layers]
        assert all(name.startswith(READ) for name in read)
        assert all(name.startswith(WRITTEN) for name in written)


def test_the_configuration_is_what_the_servers_own_client_reads(
    artefacts: dict[str, Path], tmp_path: Path
) -> None:
    reason = "tritonclient is not installed; pip install --no-deps tritonclient python-rapidjson"
    messages = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason=reason)
    from google.protobuf import text_format

    folder = write_model(artefacts["ring"], tmp_path / "repository")
    config = text_format.Parse((folder / CONFIG).read_text(), messages.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("ring", "onnxruntime", 8)
    assert [(t.name, list(t.dims)) for t in config.input] == [("input_ids", [-1])]
    assert config.output[0].data_type == messages.TYPE_FP32
    batching = config.sequence_batching
    assert batching.WhichOneof("strategy_choice") == "oldest"
    control = batching.control_input[0].control[0]
    assert control.kind == control.CONTROL_SEQUENCE_START
    assert list(control.int32_false_true) == [0, 1]
    assert all(state.initial_state[0].WhichOneof("state_data") == "zero_data" for state in batching.state)
    states = {(s.input_name, s.output_name, tuple(s.dims), s.data_type) for s in batching.state}
    assert ("past.position", "present.position", (1,), messages.TYPE_INT64) in states
    key = "key_values.0001.value"
    assert (f"past.{key}", f"present.{key}", (2, 24, 6), messages.TYPE_FP32) in states
    # The tests' own reader of the format finds the same.
    own = read_config((folder / CONFIG).read_text())
    assert len(own["sequence_batching"][0]["state"]) == len(batching.state) == 5


def test_the_command_writes_a_model_beside_the_artefact(run: Path, tmp_path: Path) -> None:
    arguments: tuple[Any, ...] = (
        "export",
        run,
        "--out",
        tmp_path / "my-model",
        "--triton",
        tmp_path / "models",
    )
    made = xl(*arguments)
    assert made.exit_code == 0, made.output
    model = tmp_path / "models" / "my-model"
    assert f"{model} is a model for Triton Inference Server" in made.output
    files = sorted(str(path.relative_to(model)) for path in model.rglob("*") if path.is_file())
    assert files == [
        "1/model.onnx",
        "1/weights.bin",
        "config.pbtxt",
        "spec.json",
        "tokenizer.json",
        "vocab.json",
    ]
    again = xl(*arguments)
    assert again.exit_code == 2
    assert xl(*arguments, "--force").exit_code == 0
    (model / CONFIG).unlink()
    refused = xl(
        "export", run, "--out", tmp_path / "a" / "my-model", "--triton", tmp_path / "models", "--force"
    )
    assert refused.exit_code == 2
    assert not (tmp_path / "a").exists()  # it is refused before anything is exported


def test_what_the_server_cannot_serve_is_refused(artefacts: dict[str, Path], tmp_path: Path) -> None:
    spec = dataclasses.replace(load_spec(artefacts["ring"]), target="tensorrt")
    with pytest.raises(ConfigError, match=r"a ring for TensorRT, .* export it with --memory shift\.$"):
        read_sequence_graph(artefacts["ring"], spec)
    empty = dataclasses.replace(spec.state[0], shape=("batch", 2, 0, 6))
    spec = dataclasses.replace(spec, target="onnxruntime", inputs=(*spec.inputs[:2], empty))
    with pytest.raises(ConfigError, match=r"memory tensors of no tokens, .* export it with --memory ring\.$"):
        read_sequence_graph(artefacts["ring"], spec)
    odd = tmp_path / "odd name"
    odd.mkdir()
    with pytest.raises(UserError, match=r"--triton calls the model 'odd name', after its folder"):
        write_model(odd, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_commands_say_what_a_model_repository_is(tmp_path: Path) -> None:
    (tmp_path / "repository" / "model" / "1").mkdir(parents=True)
    (tmp_path / "repository" / "model" / CONFIG).write_text("platform: 'onnxruntime_onnx'")
    for folder in (tmp_path / "repository", tmp_path / "repository" / "model"):
        with pytest.raises(UserError, match="is a model repository for Triton Inference Server"):
            open_session(folder)
