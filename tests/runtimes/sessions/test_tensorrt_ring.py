"""What is different in engines whose memory is a ring, over a stand-in for the GPU; and what RTX is told."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import generate, open_session, score_texts
from runtimes.base.errors import ArtefactError, StreamError
from runtimes.contract.engine import Profile
from runtimes.contract.spec import load_spec
from tests import fake_gpu
from tests.fake_gpu import FakeCuda, install, make_engine


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def test_a_ring_is_bound_once_and_has_one_graph(
    cuda: FakeCuda, cut_ring: Path, artefacts: dict[str, Path], tmp_path: Path, tokens: np.ndarray
) -> None:
    """40 tokens go round the ring of 24 slots. Shift memory of the same model has two buffers and graphs."""

    def buffers_and_graphs(artefact: Path, name: str) -> tuple[int, int]:
        session = open_session(make_engine(artefact, tmp_path / name))
        memory, graphs = session.start(1), cuda.calls.get("instantiate", 0)
        before = len(cuda.memory)
        for at in range(40):
            session.step(tokens[None, at : at + 1], memory)
        return len(cuda.memory) - before, cuda.calls["instantiate"] - graphs

    in_place, apart = buffers_and_graphs(cut_ring, "ring"), buffers_and_graphs(artefacts["shift"], "shift")
    assert (in_place[1], apart[1]) == (1, 2)
    assert apart[0] - in_place[0] == len(load_spec(cut_ring).state)  # one buffer more for each tensor


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("rows", [1, 2])
def test_engines_of_few_rows_score_and_generate(rows: int, cut_ring: Path, tmp_path: Path) -> None:
    profiles = tuple(
        Profile(name=n, batch=(rows,) * 3, tokens=(1, t, t)) for n, t in (("segment", 8), ("token", 1))
    )
    session = open_session(make_engine(cut_ring, tmp_path / "engine", profiles=profiles))
    texts = ["abcde", "bcdea"][:rows]
    alone = [score.log_prob for score in score_texts(open_session(cut_ring), texts)]
    assert [score.log_prob for score in score_texts(session, texts, batch=rows)] == pytest.approx(
        alone, abs=1e-3
    )
    list(generate(session, texts, memory=session.start(rows), max_tokens=3, stop="~"))


def test_an_engine_that_does_not_write_in_place_is_refused(
    cut_ring: Path, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_engine(cut_ring, tmp_path / "engine")
    monkeypatch.setattr(fake_gpu._Engine, "get_aliased_input_tensor", lambda *_: None)
    with pytest.raises(
        ArtefactError, match=r"0\.key in a tensor of its own, expected over past_key_values\.0"
    ):
        open_session(folder)


def test_an_engine_that_writes_over_its_shift_memory_is_refused(
    artefacts: dict[str, Path], cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(artefacts["shift"], tmp_path / "engine")
    monkeypatch.setattr(fake_gpu._Engine, "get_aliased_input_tensor", lambda _, name: f"past of {name}")
    with pytest.raises(ArtefactError, match=r"0\.key over past .*expected in a tensor of its own"):
        open_session(engine)


def test_contexts_take_the_scratch_memory_of_their_own_profile(
    cut_ring: Path, cuda: FakeCuda, tmp_path: Path
) -> None:
    open_session(make_engine(cut_ring, tmp_path / "engine"))
    assert [context.name for context in cuda.contexts] == ["ON_PROFILE_CHANGE"] * 2


def test_rtx_captures_only_rings_and_keeps_its_kernels(
    cut_ring: Path, artefacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = install(monkeypatch, package="tensorrt_rtx")
    options: dict[str, Any] = {"flavour": "rtx", "gpu": None, "hardware": "same-capability"}
    monkeypatch.setenv("XL_EXPORT_RTX_CACHE", str(tmp_path / "nowhere"))
    folder = make_engine(cut_ring, tmp_path / "ring", **options)
    with pytest.raises(StreamError, match="is no folder; make it, or unset the variable"):
        open_session(folder)
    monkeypatch.setenv("XL_EXPORT_RTX_CACHE", str(tmp_path))
    for content in (b" and more", b" and more and more"):
        cuda.contexts.clear()
        opened = open_session(folder)
        segment, token = cuda.contexts
        assert token.cuda_graph_strategy.name == "WHOLE_GRAPH_CAPTURE"
        assert token.dynamic_shapes_kernel_specialization_strategy.name == "EAGER"
        assert not hasattr(segment, "cuda_graph_strategy")
        assert {config.allocation.name for config in (segment, token)} == {"ON_PROFILE_CHANGE"}
        assert segment.cache is token.cache is not None
        del opened
        gc.collect()
        [kept] = tmp_path.glob("*-8.9.cache")
        assert kept.read_bytes() == content
        assert kept.stat().st_mode & 0o777 == 0o600
    cuda.contexts.clear()
    monkeypatch.delenv("XL_EXPORT_RTX_CACHE")
    open_session(make_engine(artefacts["shift"], tmp_path / "shift", **options))
    assert not hasattr(cuda.contexts[1], "cuda_graph_strategy")  # addresses change at every token
    assert cuda.contexts[1].cache is None


def test_compiled_kernels_that_others_may_have_written_are_not_read(
    cut_ring: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, package="tensorrt_rtx")
    kept, engine = tmp_path / "kept", tmp_path / "engine"
    kept.mkdir(mode=0o700)
    monkeypatch.setenv("XL_EXPORT_RTX_CACHE", str(kept))
    make_engine(cut_ring, engine, flavour="rtx", gpu=None, hardware="same-capability")
    open_session(engine)
    gc.collect()
    [file] = kept.glob("*.cache")
    for changed in (file, kept):
        changed.chmod(0o777)
        with pytest.raises(StreamError, match=f"other users may write {changed}; name a folder where only"):
            open_session(engine)
        changed.chmod(0o700)
    opened = open_session(engine)
    shutil.rmtree(kept)
    del opened
    gc.collect()
    assert f"is not kept: {file} could not be written" in capsys.readouterr().err
