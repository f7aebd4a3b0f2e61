"""The logic of engine sessions over a stand-in for the GPU: buffers, graphs, refusals.

No TensorRT computes anything here.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import check, open_session
from runtimes.base.errors import ArtefactError, MissingPackageError, StreamError
from runtimes.base.sealed import file_facts
from runtimes.contract.engine import PLAN, Gpu, load_engine, save_engine
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from tests import fake_gpu
from tests.fake_gpu import FakeCuda, install, make_engine
from tests.nightly import every
from tests.streams import feed, rows
from xl_export.artefact.export import export


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.fixture
def engine(cuda: FakeCuda, artefacts: dict[str, Path], tmp_path: Path) -> Path:
    return make_engine(artefacts["shift"], tmp_path / "engine")


@pytest.fixture
def session(engine: Path) -> Session:
    return open_session(engine)


@pytest.mark.parametrize("attention", every(2, ["native", "plugin"]))
def test_memory_in_float16_is_carried_too(cuda: FakeCuda, run: Path, tmp_path: Path, attention: Any) -> None:
    artefact = export(run, tmp_path / "artefact", target="tensorrt", attention=attention)
    engine = make_engine(artefact, tmp_path / "engine")
    assert {array.dtype.name for array in open_session(engine).start(1).tensors.values()} == {"float16"}
    mine, theirs = check(engine), check(artefact)
    assert mine.passed
    assert mine.max_difference == theirs.max_difference


def test_a_plan_changed_after_verification_is_not_loaded(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified_and_altered(folder: Path) -> Any:
        facts = load_engine(folder)
        (folder / PLAN).write_bytes((folder / PLAN).read_bytes().replace(b"graph", b"hparg"))
        return facts

    monkeypatch.setattr("runtimes.sessions.tensorrt.session.load_engine", verified_and_altered)
    with pytest.raises(ArtefactError, match=r"step\.plan .*build it again"):
        open_session(engine)


def test_single_tokens_become_two_graphs_and_then_only_launches(
    session: Session, cuda: FakeCuda, tokens: np.ndarray
) -> None:
    memory = session.start(1)
    for at in range(12):
        session.step(tokens[None, at : at + 1], memory)
    assert cuda.calls["instantiate"] == 2  # one for each direction of the two sets of buffers
    assert cuda.calls["launch"] == 11  # all but the first step
    feed(session, rows(tokens, 1, 16), [8, 8], memory)
    session.step(tokens[None, :1], memory)
    assert cuda.calls["instantiate"] == 2


def test_a_graph_is_captured_again_after_another_batch(
    session: Session, artefacts: dict[str, Path], cuda: FakeCuda, tokens: np.ndarray
) -> None:
    other = open_session(artefacts["shift"])
    streams = [(session.start(size), other.start(size), rows(tokens, size, 12)) for size in (1, 2, 1)]
    for at in range(12):
        for mine, theirs, batch in streams:
            found, expected = (
                s.step(batch[:, at : at + 1], m)[0] for s, m in ((session, mine), (other, theirs))
            )
            assert np.abs(found - expected).max() < 1e-5, at


def test_a_batch_beyond_the_token_profile_uses_the_segment_profile(
    session: Session, cuda: FakeCuda, tokens: np.ndarray
) -> None:
    feed(session, rows(tokens, 5, 6), [1] * 6)
    assert "instantiate" not in cuda.calls


def test_the_memory_stays_on_the_device_and_reads_as_arrays(
    session: Session, artefacts: dict[str, Path], cuda: FakeCuda, tokens: np.ndarray
) -> None:
    _, memory = feed(session, rows(tokens, 2, 8), [8])
    _, expected = feed(open_session(artefacts["shift"]), rows(tokens, 2, 8), [8])
    copies = cuda.calls["copy"]
    feed(session, rows(tokens, 2, 8), [8], memory)
    assert cuda.calls["copy"] == copies + 3  # tokens and positions in, logits out
    _, expected = feed(open_session(artefacts["shift"]), rows(tokens, 2, 8), [8], expected)
    for name, array in memory.tensors.items():
        assert np.abs(np.asarray(array) - expected.tensors[name]).max() < 1e-6
    for other in (memory.copy(), copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert all(type(array) is np.ndarray for array in other.tensors.values())
        assert all(np.array_equal(array, memory.tensors[name]) for name, array in other.tensors.items())


def test_device_memory_is_given_back_with_the_stream(
    session: Session, cuda: FakeCuda, tokens: np.ndarray
) -> None:
    gc.collect()
    before = len(cuda.memory)
    memory = feed(session, rows(tokens, 2, 12), [8, 1, 1, 1, 1])[1]
    assert len(cuda.memory) > before
    del memory
    gc.collect()
    assert len(cuda.memory) == before


def test_what_the_gpu_has_no_room_for_is_refused(session: Session, cuda: FakeCuda) -> None:
    memory = session.start(2)
    cuda.full = True
    with pytest.raises(StreamError, match=r"the GPU has no room for .* use a smaller batch"):
        session.step(np.zeros((2, 1), np.int64), memory)
    cuda.full = False
    session.step(np.zeros((2, 1), np.int64), memory)


def test_a_batch_beyond_every_profile_is_refused_with_the_command(session: Session) -> None:
    with pytest.raises(
        StreamError, match=r"this engine takes at most 16: .*`xl-export build ARTEFACT .*--batch"
    ):
        session.start(17)


@pytest.mark.parametrize("name", [PLAN, "spec.json", "vocab.json", "reference.json", "reference.bin"])
def test_an_altered_engine_file_is_refused_with_the_build_command(engine: Path, name: str) -> None:
    data = (engine / name).read_bytes()
    (engine / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        ArtefactError, match=f"{name} was altered.* build it again: `xl-export build ARTEFACT --out"
    ):
        open_session(engine)
    (engine / name).write_bytes(data + b"x")
    with pytest.raises(ArtefactError, match=f"{name} has .* bytes, expected"):
        open_session(engine)
    (engine / name).unlink()
    with pytest.raises(ArtefactError, match=f"{name} is missing"):
        open_session(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "11.3.0.1"}, "was built by TensorRT 11.3.0.1 and this is 11.4.0.106"),
        ({"version": "11.5.0.1", "version_compatible": True}, "was built by TensorRT 11.5.0.1"),
        ({"version": "10.16.0.1", "version_compatible": True}, "was built by TensorRT 10.16.0.1"),
        ({"compute_capabilities": ("8.6",)}, r"compute capability 8.6, and this one is Fake RTX \(8.9\)"),
        ({"gpu": Gpu(name="Other RTX", compute_capability="8.9")}, "was tuned on 'Other RTX'"),
    ],
)
def test_an_engine_for_another_tensorrt_or_gpu_is_refused(
    cuda: FakeCuda, artefacts: dict[str, Path], tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(
        ArtefactError, match=message + r".* build it again here: `xl-export build ARTEFACT .*--force`\.$"
    ):
        open_session(make_engine(artefacts["shift"], tmp_path / "engine", **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "11.3.0.1", "version_compatible": True},
        {"gpu": Gpu(name="Other RTX", compute_capability="8.9"), "hardware": "same-capability"},
        {"compute_capabilities": ("8.0",), "hardware": "ampere-plus"},
    ],
)
def test_a_compatible_engine_is_opened(
    cuda: FakeCuda, artefacts: dict[str, Path], tmp_path: Path, changes: dict
) -> None:
    open_session(make_engine(artefacts["shift"], tmp_path / "engine", **changes))


def test_an_rtx_engine_leaves_capturing_to_tensorrt(
    monkeypatch: pytest.MonkeyPatch, artefacts: dict[str, Path], tmp_path: Path, tokens: np.ndarray
) -> None:
    cuda = install(monkeypatch, package="tensorrt_rtx")
    folder = make_engine(
        artefacts["shift"], tmp_path / "engine", flavour="rtx", gpu=None, hardware="same-capability"
    )
    mine, _ = feed(open_session(folder), rows(tokens, 1, 6), [1] * 6)
    theirs, _ = feed(open_session(artefacts["shift"]), rows(tokens, 1, 6), [1] * 6)
    assert np.abs(mine - theirs).max() < 1e-6
    assert "instantiate" not in cuda.calls


def test_a_plan_whose_tensors_are_not_the_specs_is_refused(
    cuda: FakeCuda, artefacts: dict[str, Path], tmp_path: Path
) -> None:
    folder = make_engine(artefacts["shift"], tmp_path / "engine")
    other = make_engine(artefacts["hidden"], tmp_path / "other")
    facts, _ = load_engine(folder)
    (folder / PLAN).write_bytes((other / PLAN).read_bytes())
    save_engine(folder, dataclasses.replace(facts, files={**facts.files, PLAN: file_facts(folder / PLAN)}))
    with pytest.raises(ArtefactError, match=r"expected .* by its spec"):
        open_session(folder)


def test_a_machine_without_a_gpu_is_an_error(cuda: FakeCuda, engine: Path) -> None:
    cuda.count = 0
    with pytest.raises(ArtefactError, match=r"no NVIDIA GPU can be used here \(cudaErrorNoDevice\)"):
        open_session(engine)


def test_threads_are_refused(engine: Path) -> None:
    with pytest.raises(StreamError, match="leave --threads out"):
        open_session(engine, threads=2)


@pytest.mark.parametrize(
    ("blocked", "advice"), [("tensorrt", "tensorrt>=10.15"), ("cuda.bindings.runtime", "cuda-bindings")]
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, engine: Path, blocked: str, advice: str
) -> None:
    monkeypatch.setitem(sys.modules, blocked, None)  # type: ignore[arg-type]
    with pytest.raises(MissingPackageError, match=f"is not installed .*run `pip install '?{advice}"):
        open_session(engine)


def test_an_old_tensorrt_is_refused(monkeypatch: pytest.MonkeyPatch, engine: Path) -> None:
    install(monkeypatch, __version__="10.3.0.30")  # that of JetPack 6
    sentence = (
        r"TensorRT 10\.3\.0\.30 is installed and 10\.15 or newer is needed; .*on JetPack 6 run the artefact"
    )
    with pytest.raises(MissingPackageError, match=sentence):
        open_session(engine)


def test_a_refused_shape_leaves_no_other_stream_under_it(
    session: Session, artefacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tokens: np.ndarray
) -> None:
    batch, other = rows(tokens, 1, 8), open_session(artefacts["shift"])
    memory = feed(session, batch[:, :4], [1] * 4)[1]
    expected = feed(other, batch[:, :4], [1] * 4)[1]
    take = fake_gpu._Context.set_input_shape
    with monkeypatch.context() as patch:
        patch.setattr(
            fake_gpu._Context, "set_input_shape", lambda *given: given[1] == "input_ids" and take(*given)
        )
        with pytest.raises(
            StreamError, match=r"position_ids \[2, 1\] does not fit the engine's token profile"
        ):
            session.step(tokens[:2, None], session.start(2))
    for at in range(4, 8):
        found, _ = session.step(batch[:, at : at + 1], memory)
        wanted, _ = other.step(batch[:, at : at + 1], expected)
        assert np.abs(found - wanted).max() < 1e-6


def test_a_rejected_tensor_address_stops_the_step(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_gpu._Context, "set_tensor_address", lambda *given: False)
    monkeypatch.setattr(fake_gpu._Context, "execute_async_v3", lambda *given: True)
    with pytest.raises(ArtefactError, match="the engine could not run a step"):
        session.step(np.zeros((1, 1), np.int64), session.start(1))


def test_a_plan_of_types_that_numpy_lacks_is_refused(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_gpu._Engine, "get_tensor_dtype", lambda *given: fake_gpu.DataType.BF16)
    with pytest.raises(ArtefactError, match=r"'of another type'.*, expected .* by its spec"):
        open_session(engine)


def test_a_tensorrt_that_does_not_start_is_an_error(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(log: object) -> None:
        raise TypeError("factory function returned nullptr")

    install(monkeypatch, Runtime=nothing)
    with pytest.raises(
        ArtefactError, match=r"TensorRT cannot start on this GPU .*; update the GPU's driver\.$"
    ):
        open_session(engine)


def test_a_model_without_memory_runs(
    cuda: FakeCuda, make_run: Callable[..., Path], tmp_path: Path, tokens: np.ndarray
) -> None:
    artefact = export(
        make_run(), tmp_path / "artefact", memory="shift", rule=MemoryRule(mem_len=0, segment=8)
    )
    cuts = [8, 1, 1, 1, 1, 1, 3]
    mine, memory = feed(open_session(make_engine(artefact, tmp_path / "engine")), rows(tokens, 2, 16), cuts)
    theirs, _ = feed(open_session(artefact), rows(tokens, 2, 16), cuts)
    assert np.abs(mine - theirs).max() < 1e-6
    assert all(array.size == 0 for array in memory.copy().tensors.values())
