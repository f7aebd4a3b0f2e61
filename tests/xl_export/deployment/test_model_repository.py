"""Model repositories for Triton Inference Server: the configuration, the graph, and answers of a stand-in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from runtimes import open_session
from runtimes.base.errors import ConfigError, UserError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import load_spec
from tests.architectures import ARCHITECTURES
from tests.commands import xl
from tests.steps import observed
from tests.triton_server import Server, read_config
from tests.xl_export.tracing import modules
from trainer.run.checkpoint import load_run
from xl_export import trace
from xl_export.artefact.export import export, make_spec
from xl_export.artefact.write import finite_arrays
from xl_export.deployment.model_repository import read_sequence_graph, write_model
from xl_export.deployment.server_config import CONFIG
from xl_export.deployment.server_graph import READ, WRITTEN, sequence_graph
from xl_export.graph.step import step_graph

# What each client sends: the lengths of its requests. The streams begin at different times.
STREAMS = {7: [5, 1, 1, 8, 3, 8, 8, 1], 2**40: [1, 8, 1, 8, 3, 8, 1], 3: [8, 1, 8, 3, 1]}
BEGINS = {7: 0, 2**40: 1, 3: 2}


def answers_of(server: Server, tokens: np.ndarray, *, selective: bool) -> dict[int, list[np.ndarray]]:
    """The answers to all streams, whose requests wait together wherever they can."""
    found: dict[int, list[np.ndarray]] = {sequence: [] for sequence in STREAMS}
    at = dict.fromkeys(STREAMS, 0)
    for turn in range(12):
        requests = []
        for number, (sequence, lengths) in enumerate(STREAMS.items()):
            step = turn - BEGINS[sequence]
            if not 0 <= step < len(lengths):
                continue
            begin, length = 100 * number + at[sequence], lengths[step]
            inputs = {"input_ids": tokens[None, begin : begin + length]}
            if selective:
                inputs["targets"] = tokens[None, begin + 1 : begin + length + 1]
            requests.append((sequence, step == 0, inputs))
            at[sequence] += length
        for (sequence, *_), answer in zip(requests, server.infer(requests), strict=True):
            found[sequence].append(answer["log_probs" if selective else "logits"][0])
    return found


def expected_of(artefact: Path, tokens: np.ndarray, *, selective: bool) -> dict[int, list[np.ndarray]]:
    session = open_session(artefact)
    found: dict[int, list[np.ndarray]] = {}
    for number, (sequence, lengths) in enumerate(STREAMS.items()):
        memory, at, found[sequence] = session.start(1), 100 * number, []
        for length in lengths:
            given, following = tokens[None, at : at + length], tokens[None, at + 1 : at + length + 1]
            if selective:
                answer, memory = session.score(given, following, memory)
            else:
                answer, memory = session.step(given, memory)
            found[sequence].append(answer[0])
            at += length
    return found


def compare(found: dict[int, list[np.ndarray]], expected: dict[int, list[np.ndarray]]) -> float:
    return max(
        float(np.abs(mine - theirs).max())
        for sequence in STREAMS
        for mine, theirs in zip(found[sequence], expected[sequence], strict=True)
    )


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "selective": ("adaptive-softmax", {}),
    "zeros": ("adaptive-softmax-wide-first", {}),
    "groups": ("all-attention-groups", {}),
    "engine": ("transformer-xl", {"memory": "shift", "target": "tensorrt"}),
}
MARKED = [pytest.param(case, marks=pytest.mark.slow) for case in ("zeros", "groups", "engine")]


@pytest.mark.parametrize("case", ["ring", "shift", "hidden", "selective", *MARKED])
def test_the_server_gives_the_answers_of_the_session(
    case: str,
    artefacts: dict[str, Path],
    make_run: Callable[..., Path],
    tokens: np.ndarray,
    tmp_path: Path,
) -> None:
    if case in CASES:
        name, options = CASES[case]
        artefact = export(make_run(**ARCHITECTURES[name]), tmp_path / "model", **options)
    else:
        artefact = artefacts[case]
    selective = load_spec(artefact).model.selective
    folder = write_model(artefact, tmp_path / "repository")
    server = Server(folder)
    expected = expected_of(artefact, tokens, selective=selective)
    found = answers_of(server, tokens, selective=selective)
    most = 3e-2 if case == "engine" else 1e-4
    assert compare(found, expected) < most
    assert server.executions < sum(map(len, STREAMS.values()))  # requests of equal length share a step
    with pytest.raises(Exception, match=r"Reshape node.*cannot be reshaped"):  # a segment that is too long
        server.infer([(7, False, next_request(tokens, length=9, selective=selective))])

    leaking = Server(folder, leaks=True)
    leaking.infer([(1, True, next_request(tokens, selective=selective))])
    leaking.end(1)
    assert compare(answers_of(leaking, tokens, selective=selective), found) < most
    onnx.checker.check_model(str(folder / "1" / "model.onnx"))


def test_the_server_steps_streams_of_named_arrays(policy: Path, tmp_path: Path) -> None:
    """Two sequences with requests of equal and of other lengths; the second one begins later, and again."""
    server = Server(write_model(policy, tmp_path / "repository"))
    session = open_session(policy)
    memories: dict[int, Any] = {}
    for number in range(12):
        chosen = [1] if number < 2 else [1, 2]
        requests = []
        for sequence in chosen:
            begins = sequence not in memories or (number, sequence) == (8, 2)
            if begins:
                memories[sequence] = session.start(1)
            inputs = observed(1, 1 + (number * sequence) % 4, 100 * sequence + number)
            requests.append((sequence, begins, inputs))
        for (sequence, _, inputs), answer in zip(requests, server.infer(requests), strict=True):
            expected, _ = session.step(inputs, memories[sequence])
            assert answer.keys() == expected.keys()
            assert all(np.abs(answer[name] - x).max() < 1e-5 for name, x in expected.items())
    with pytest.raises(Exception, match=r"Reshape node.*cannot be reshaped"):
        server.infer([(1, False, observed(1, 5, 0))])


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
    with pytest.raises(ConfigError, match="exactly 1 rows"):
        write_model(fixed, tmp_path / "repository")


def next_request(tokens: np.ndarray, *, selective: bool, length: int = 8) -> dict[str, np.ndarray]:
    inputs = {"input_ids": tokens[None, 50 : 50 + length]}
    return inputs | ({"targets": tokens[None, 51 : 51 + length]} if selective else {})


def test_states_keep_their_order_in_models_of_any_depth(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """The server pairs them by alphabetical order; 12 layers have numbers of one and two digits."""
    rule = MemoryRule(mem_len=4, segment=4)
    run = load_run(make_run(layers=12, d_model=8, heads=1, head_dim=4, d_ff=4, rule=rule))
    for form in ("ring", "hidden"):
        spec = make_spec(run, rule, form, "onnxruntime", "fp32", "fp32")  # type: ignore[arg-type]
        graph = sequence_graph(step_graph(spec, run.config.model, finite_arrays(run.model)), spec)
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
