"""Engines that ONNX Runtime builds: kept in the cache whole, and used only by whoever may trust them."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtimes import open_session
from runtimes.base.errors import ArtefactError, MissingPackageError
from runtimes.contract.device import Device
from runtimes.contract.engine import Gpu
from runtimes.sessions import onnx_runtime
from runtimes.sessions.ort_gpu import driver, loading
from tests import host_gpu


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, artefacts: dict[str, Path]) -> list[Path]:
    """The files that the stand-in was told to write: it writes the step graph, as a provider its context."""
    host_gpu.install(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host_gpu.HostProvider, "builds", True)
    attach, files = host_gpu.HostProvider.attach, list[Path]()

    def attached(
        self: host_gpu.HostProvider, ort: Any, options: Any, chosen: Mapping[str, str], device: Device
    ) -> dict[str, Any]:
        try:
            path = Path(options.get_session_config_entry(loading.CONTEXT_FILE))
        except RuntimeError:  # it was not asked for
            return attach(self, ort, options, chosen, device)
        files.append(path)
        shutil.copy(artefacts["shift"] / "step.onnx", path)
        options.add_session_config_entry(loading.WRITE_CONTEXT, "0")
        return attach(self, ort, options, chosen, device)

    monkeypatch.setattr(host_gpu.HostProvider, "attach", attached)
    return files


def answer(folder: Path) -> np.ndarray:
    session = open_session(folder, device="cuda", threads=1)
    logits, _ = session.step(np.arange(8)[None], session.start(1))
    return logits


def test_an_engine_is_built_once_and_kept(
    artefacts: dict[str, Path],
    built: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refuse, may_be_compiled = onnx_runtime.refuse_foreign_graph, list[bool]()

    def noted(data: bytes, *, compiled: bool, **facts: Any) -> None:
        may_be_compiled.append(compiled)
        refuse(data, compiled=compiled, **facts)

    monkeypatch.setattr(onnx_runtime, "refuse_foreign_graph", noted)
    first = answer(artefacts["shift"])
    (kept,) = (tmp_path / "cache/xl-export/engines").iterdir()  # no temporary folder is left
    assert kept.name.startswith("engine-")
    assert kept.stat().st_mode & 0o777 == 0o600
    np.testing.assert_array_equal(answer(artefacts["shift"]), first)
    assert len(built) == 1
    assert may_be_compiled == [False, True]  # the artefact, and then the engine that this user built
    assert "building an engine for cuda" in capsys.readouterr().err


def test_another_driver_rebuilds_the_engine(
    artefacts: dict[str, Path], built: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    serves_13_0 = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda count: setattr(count._obj, "value", 1),
        cuDriverGetVersion=lambda number: setattr(number._obj, "value", 13000),
        cuDeviceGet=lambda device, number: 0,
        cuDeviceGetName=lambda name, size, device: setattr(name, "value", b"A GPU"),
        cuDeviceGetAttribute=lambda value, attribute, device: setattr(value._obj, "value", attribute - 70),
    )
    monkeypatch.setattr(driver, "ctypes", SimpleNamespace(**{**vars(ctypes), "CDLL": lambda _: serves_13_0}))
    for version, engines in (("580.65.06", 1), ("580.95.05", 2), ("580.65.06", 2)):
        monkeypatch.setattr(driver, "driver_version", lambda version=version: version)
        assert driver.ask_driver() == driver.DriverFacts(
            gpus=(Gpu(name="A GPU", compute_capability="5.6"),), cuda=(13, 0), version=version
        )
        answer(artefacts["shift"])
        assert len(built) == engines


def test_what_others_may_write_is_built_again(
    artefacts: dict[str, Path], built: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(artefacts["shift"])
    (kept,) = (tmp_path / "cache/xl-export/engines").iterdir()
    kept.chmod(0o666)
    answer(artefacts["shift"])
    assert len(built) == 2
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "an engine in the cache is not used: other users may write" in capsys.readouterr().err
    kept.parent.chmod(0o777)
    answer(artefacts["shift"])
    assert len(built) == 2  # built, and written nowhere
    assert "the engine is not kept: other users may write" in capsys.readouterr().err


def test_an_engine_that_cannot_be_kept_computes_all_the_same(
    artefacts: dict[str, Path], built: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache/xl-export").mkdir(parents=True, mode=0o700)
    (tmp_path / "cache/xl-export/engines").touch()  # a file: nothing can be made in it
    assert np.isfinite(answer(artefacts["shift"])).all()
    assert built == []
    assert "the engine is not kept: " in capsys.readouterr().err


def test_nothing_is_built_if_node_placement_is_unknown(
    artefacts: dict[str, Path], built: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxruntime.capi.onnxruntime_inference_collection import Session

    monkeypatch.delattr(Session, loading.TELLS_PLACEMENT)
    with pytest.raises(MissingPackageError, match=r"does not tell which nodes .* 1\.24 or newer"):
        answer(artefacts["shift"])
    assert built == []


def test_an_incomplete_engine_is_not_cached(
    artefacts: dict[str, Path], built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "elsewhere", lambda *_, refused: "4 of 95 nodes (TensorScatter)")
    with pytest.raises(ArtefactError, match=r"puts 4 of 95 nodes \(TensorScatter\) elsewhere"):
        answer(artefacts["shift"])
    assert len(built) == 1
    assert list((tmp_path / "cache/xl-export/engines").iterdir()) == []
