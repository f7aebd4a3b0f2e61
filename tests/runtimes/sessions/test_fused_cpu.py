"""The fused operator computes what the standard operators compute, at odd sizes and positions."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from runtimes import check, open_session
from runtimes.base.errors import ArtefactError, ConfigError, MissingPackageError, UserError
from runtimes.base.logits import log_probability
from runtimes.contract.precision import MemoryPrecision, Precision
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import FUSED, GRAPH, WEIGHTS, load_spec
from runtimes.sessions import fused_cpu
from runtimes.sessions.onnx_runtime import OrtSession
from tests.nightly import every, matrix
from tests.runtimes.sessions.both_kernels import compare, compare_random_model
from tests.runtimes.tasks.independent_texts import same_as_alone, some_texts
from tests.streams import feed, rows
from trainer.model.config import SpanConfig
from xl_export.artefact.export import export
from xl_export.serve.core.engine import dependence_of_rows
from xl_export.serve.core.rows import rows_of
from xl_export.serve.core.settings import EngineSettings

# What one node of the graph computes: a whole layer, as in small models, or only its attention.
NODES = ("layers", "attention")


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built once for these tests."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ here to build the operator with")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert fused_cpu.built() is None
        library = fused_cpu.build()
        yield library  # type: ignore[misc]


@pytest.fixture(params=NODES)
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "attention":
        monkeypatch.setattr("xl_export.graph.fused_cpu.MAX_LAYER_NODE_PARAMETERS", 0)


# Spans of 6 and 26 tokens: the softmax ends at distance 64, which a segment of 100 tokens sees past.
WINDOW: dict[str, Any] = {
    "positions": "learned",
    "context": 129,
    "span": SpanConfig(maximum=128, ramp=4, epsilon=1e-2),
    "shares": (0.05, 0.2),
}
SIZES = [
    ({"head_dim": 64}, MemoryRule(mem_len=300, segment=150)),  # several blocks of queries and of keys
    ({"head_dim": 41}, MemoryRule(mem_len=200, segment=130, mask="full")),
    ({"head_dim": 48}, MemoryRule(mem_len=140, segment=20, clamp_len=37)),
    ({"head_dim": 128}, MemoryRule(mem_len=129, segment=128, include_self=False)),
    ({"head_dim": 80, "tie_biases": False}, MemoryRule(mem_len=0, segment=12)),
    ({"head_dim": 16, "heads": 3}, MemoryRule(mem_len=1, segment=1)),
    (WINDOW, MemoryRule(mem_len=128, segment=100, mask="full")),
]


def compare_cut(artefact: Path, tokens: np.ndarray, segment: int, tolerance: float = 1e-4) -> None:
    cut = [segment, 1, min(7, segment), segment, 1, 1, segment, segment]
    compare(artefact, rows(tokens, 3, sum(cut)), cut, tolerance=tolerance)


@pytest.mark.parametrize(
    ("nodes", "sizes", "rule"),
    every(3, [(nodes, *sizes) for sizes in SIZES for nodes in NODES]),
    indirect=["nodes"],
    ids=str,
)
@pytest.mark.usefixtures("nodes")
def test_it_equals_the_standard_operators(
    sizes: dict, rule: MemoryRule, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    artefact = export(make_run(rule=rule, **sizes), tmp_path / "artefact")
    compare_cut(artefact, tokens, rule.segment)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(("seed", "memory"), every(3, [(3, "fp32"), (6, "fp32"), (7, "fp32"), (7, "int8")]))
def test_random_models_equal_the_standard_operators(  # 7 has gated spans
    seed: int, memory: MemoryPrecision, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    compare_random_model(random.Random(seed), make_run, tokens, tmp_path, memory)


@pytest.mark.usefixtures("nodes")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
@pytest.mark.parametrize("memory", ["fp32", "int8"])
def test_more_random_models_equal_the_standard_operators(
    memory: MemoryPrecision, seed: int, make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path
) -> None:
    compare_random_model(random.Random(seed), make_run, tokens, tmp_path, memory)


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(("sizes", "rule"), every(4, [SIZES[2], SIZES[0], SIZES[1], SIZES[5]]), ids=str)
@pytest.mark.parametrize(("nodes", "memory"), matrix(NODES, ("int8", "fp16"), together=1), indirect=["nodes"])
def test_memory_may_be_of_halves_or_bytes(
    memory: MemoryPrecision,
    sizes: dict,
    rule: MemoryRule,
    make_run: Callable[..., Path],
    tokens: np.ndarray,
    tmp_path: Path,
) -> None:
    artefact = export(make_run(rule=rule, **sizes), tmp_path / "artefact", memory_precision=memory)
    graph = onnx.load(artefact / FUSED, load_external_data=False).graph
    over = f"Over{'Bytes' if memory == 'int8' else 'Halves'}"
    assert any(node.op_type.endswith(over) for node in graph.node)
    # A key on the edge between two halves or bytes may go either way.
    compare_cut(artefact, tokens, rule.segment, tolerance=2e-3)
    if memory == "int8":
        same_as_alone(OrtSession.open(artefact, kernel="fused"), some_texts(2))


@pytest.mark.parametrize(
    ("sizes", "rule"), every(3, [SIZES[3], SIZES[0], SIZES[1]]), ids=str
)  # whose tables are not too short for it
@pytest.mark.parametrize(("precision", "kind"), [("fp16", ".fp16"), ("int8", ".int8")])
def test_tables_and_persistent_vectors_may_be_of_halves_or_bytes(
    sizes: dict,
    rule: MemoryRule,
    precision: Precision,
    kind: str,
    make_run: Callable[..., Path],
    tokens: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Matrices stay as they are here: products with int8 activations would hide small differences."""
    monkeypatch.setattr("xl_export.graph.quantise.quantise", lambda model, bits: None)
    persistent = {"d_ff": 0, "sublayers": "all-attention", "persistent": 140}
    artefact = export(make_run(rule=rule, **sizes, **persistent), tmp_path / "artefact", precision=precision)
    graph = onnx.load(artefact / FUSED, load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type == "RingRelativeLayer"]
    assert all(node.input[i].endswith(kind) for node in nodes for i in (4, 13, 14))
    compare_cut(artefact, tokens, rule.segment)


@pytest.mark.parametrize(
    ("precision", "head_dim"),
    [
        *((precision, 41) for precision in ("fp32", "fp16", "int8-stored", "int8", "int4")),
        *((precision, 48) for precision in ("fp32", "int8")),  # whole vectors: several streams at once
    ],
)
def test_products_are_precise_and_alike_in_every_batch(
    precision: Precision, head_dim: int, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """They round activations to 16 bits for int8 and int4, those of `MatMulNBits` to 8. The reference of fp16
    has weights in fp32.
    """
    run = make_run(d_model=46, heads=3, head_dim=head_dim, d_ff=70, rule=MemoryRule(mem_len=13, segment=9))
    artefact = export(run, tmp_path / "artefact", precision=precision)
    report = check(artefact)
    assert report.kernel == "fused"
    assert report.max_difference < (5e-5 if precision in ("fp32", "int8-stored") else 1e-3)
    session = OrtSession.open(artefact, kernel="fused")
    assert dependence_of_rows(session, EngineSettings(), rows_of(session, 32)) is None


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_threads_change_no_bit(precision: Precision, make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Tokens that follow one another for so long that their short loops are shared, and then a segment."""
    rule = MemoryRule(mem_len=256, segment=128)
    sizes = {"d_model": 128, "heads": 4, "head_dim": 32, "d_ff": 512, "layers": 2}
    artefact = export(make_run(rule=rule, **sizes), tmp_path / "artefact", precision=precision)
    alone, several = (OrtSession.open(artefact, threads=threads, kernel="fused") for threads in (1, 4))
    options = several._sessions[None].get_session_options()
    assert int(options.get_session_config_entry("session.intra_op.spin_duration_us")) == 200
    memories = alone.start(1), several.start(1)
    for step in [np.full((1, 1), n % 7) for n in range(300)] + [np.arange(128)[None] % 5]:
        answers = alone.predict(step, memories[0])[0], several.predict(step, memories[1])[0]
        np.testing.assert_array_equal(*(logits.view(np.int32) for logits in answers))


def test_scores_may_lie_far_apart(make_run: Callable[..., Path], tokens: np.ndarray, tmp_path: Path) -> None:
    """Later blocks of keys have far larger scores than earlier ones: what was summed must be scaled down."""
    run = make_run(rule=MemoryRule(mem_len=300, segment=40), head_dim=16)
    tensors = load_file(run / "model.safetensors")
    for name in tensors:
        if name.endswith("query.weight"):
            tensors[name] *= 12
    save_file(tensors, run / "model.safetensors")
    compare(export(run, tmp_path / "artefact"), rows(tokens, 2, 460), [40] * 10 + [20] * 3)


@pytest.fixture(scope="module")
def in_bytes(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact with memory in int8."""
    return export(run, tmp_path_factory.mktemp("bytes") / "artefact", memory_precision="int8")


@pytest.mark.parametrize("memory_precision", ["fp32", "int8"])
def test_what_is_not_a_number_stays_so(
    memory_precision: str, artefacts: dict[str, Path], in_bytes: Path, tokens: np.ndarray
) -> None:
    for kernel in ("standard", "fused"):
        folder = in_bytes if memory_precision == "int8" else artefacts["ring"]
        session = OrtSession.open(folder, kernel=kernel)  # type: ignore[arg-type]
        for bits, length in itertools.product((0x7FC00000, 0x7FC00001, 0xFFFFFFFF), (1, 8)):
            _, memory = feed(session, rows(tokens, 2, 16), [8, 8], session.start(2))
            for array in memory.tensors.values():
                if array.dtype != np.int8:
                    array.view(np.uint32)[0] = bits
            logits, _ = session.step(rows(tokens, 2, length), memory)
            assert np.isnan(logits[0]).all(), (kernel, bits, length)
            assert np.isfinite(logits[1]).all(), (kernel, bits, length)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_log_probabilities_equal_those_of_doubles(library: Path) -> None:
    chance = np.random.default_rng(0)
    for size in (1, 2, 140, 2560, 40_001):
        logits = (chance.normal(size=(3, 4, size)) * 9).astype(np.float32)
        targets = chance.integers(-1, size, (3, 4))
        for row, value in enumerate((np.nan, np.inf, -np.inf)):
            logits[row, 0, 0] = value
        score = fused_cpu.scorer(library, logits, targets)
        expected = log_probability(logits.astype(np.float64), targets)
        np.testing.assert_allclose(score(), expected, atol=3e-6)


def test_a_built_operator_is_used_and_checked(artefacts: dict[str, Path]) -> None:
    report = check(artefacts["ring"])
    assert report.passed
    assert report.max_difference > 0
    by_name = {
        node.op_type for node in onnx.load(artefacts["ring"] / FUSED, load_external_data=False).graph.node
    }
    assert by_name == {"ConstantRows", "RingRelativeLayer", "ConstantProduct"}
    assert open_session(artefacts["ring"]).kernel == "fused"


def test_both_graphs_read_one_file_of_weights(artefacts: dict[str, Path]) -> None:
    folder = artefacts["ring"]
    files = [name for name in load_spec(folder).files if name.endswith(".bin")]
    model = onnx.load(folder / FUSED, load_external_data=False)
    outside = [i for i in model.graph.initializer if i.data_location == onnx.TensorProto.EXTERNAL]
    assert {e.value for i in outside for e in i.external_data if e.key == "location"} == {WEIGHTS}
    assert set(files) == {WEIGHTS, "reference.bin"}
    assert (folder / FUSED).stat().st_size < (folder / GRAPH).stat().st_size


def test_it_is_refused_where_it_cannot_be(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="does not serve this artefact's model and memory"):
        OrtSession.open(artefacts["shift"], kernel="fused")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match="is not built on this machine; build it with `xl-export fused-kernel`"
    ):
        OrtSession.open(artefacts["ring"], kernel="fused")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingPackageError, match="no-such-compiler could not be started"):
        fused_cpu.build()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UserError, match="false could not compile the fused operator"):
        fused_cpu.build()
    assert list((tmp_path / "xl-export").iterdir()) == []


def test_a_user_without_a_home_runs_the_standard_operators(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert open_session(artefacts["ring"]).kernel == "standard"
    with pytest.raises(UserError, match="name a folder in the variable XDG_CACHE_HOME"):
        fused_cpu.build()


def test_a_library_that_cannot_be_loaded_is_named(
    artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"no library")
    monkeypatch.setattr(fused_cpu, "built", lambda: other)
    with pytest.raises(
        MissingPackageError, match=r"the fused operator .*other\.so could not be loaded .* delete it"
    ):
        open_session(artefacts["ring"])


# Altered graphs are refused with a sentence, before anything is read elsewhere.


@contextlib.contextmanager
def altered(source: Path, folder: Path, reseal: Callable[..., None]) -> Iterator[tuple[Any, Any]]:
    """The graph of a copy of an artefact, and its first layer, to be changed in the block."""
    shutil.copytree(source, folder)
    model = onnx.load(folder / FUSED, load_external_data=False)
    yield model.graph, next(node for node in model.graph.node if node.op_type.startswith("RingRelativeLayer"))
    onnx.save(model, folder / FUSED)
    reseal(folder, FUSED)


def test_a_table_without_rows_is_refused(
    artefacts: dict[str, Path], reseal: Callable[..., None], tmp_path: Path
) -> None:
    with altered(artefacts["ring"], tmp_path / "altered", reseal) as (graph, node):
        name = node.input[4]
        tensor = next(tensor for tensor in graph.initializer if tensor.name == name)
        heads, width, _ = tensor.dims
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros((heads, width, 0), np.float32), name))
    with pytest.raises(ArtefactError, match="do not fit together"):
        check(tmp_path / "altered")


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("heads", 3),
        ("mem_len", 1 << 40),
        ("mem_len", 17),
        ("query_at", 90),
        ("key_at", -1),
        ("value_at", 1 << 62),
    ],
)
def test_a_graph_that_would_read_elsewhere_is_refused(
    attribute: str, value: int, artefacts: dict[str, Path], reseal: Callable[..., None], tmp_path: Path
) -> None:
    with altered(artefacts["ring"], tmp_path / "altered", reseal) as (_, node):
        next(a for a in node.attribute if a.name == attribute).i = value
    with pytest.raises(ArtefactError, match=r"could not (be loaded|run)"):
        one_step(tmp_path / "altered")


@pytest.mark.parametrize(("dropped", "given"), [(1, 2), (2, 3), (3, 17), (4, 18)])
def test_a_graph_without_its_ring_outputs_is_refused(
    dropped: int,
    given: int,
    artefacts: dict[str, Path],
    in_bytes: Path,
    reseal: Callable[..., None],
    tmp_path: Path,
) -> None:
    """Outputs 3 and 4 are the scales of a ring of bytes."""
    source = artefacts["ring"] if dropped < 3 else in_bytes
    with altered(source, tmp_path / "altered", reseal) as (graph, node):
        graph.node.append(onnx.helper.make_node("Identity", [node.input[given]], [node.output[dropped]]))
        node.output[dropped] = ""
    with pytest.raises(ArtefactError, match="could not run"):
        one_step(tmp_path / "altered")


def one_step(folder: Path) -> None:
    session = OrtSession.open(folder, kernel="fused")
    session.step(np.zeros((1, 8), np.int64), session.start(1))
