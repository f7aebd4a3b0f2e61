from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure
from runtimes.base.errors import ConfigError, MissingPackageError
from runtimes.sessions.ort_gpu.driver import ask_driver
from tests.gpu import stand_ins


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU; None if it is a real one. Without a parameter it is real."""
    if getattr(request, "param", "real") == "stand-in":
        monkeypatch.setattr(measure, "REST_SECONDS", 0)
        return stand_ins.install(monkeypatch)
    if fault := ask_driver().fault:
        pytest.skip(fault)
    return None


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exports that tests share."""
    return tmp_path_factory.mktemp("work")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """A test whose package is missing, or serves other GPUs only, is skipped with its sentence."""
    try:
        return (yield)
    except MissingPackageError as error:
        pytest.skip(str(error))
    except ConfigError as error:
        if "TensorRT-RTX builds nothing" not in str(error):
            raise
        pytest.skip(str(error))
