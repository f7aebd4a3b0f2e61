"""What the tests of kernels share: a cache of compiled kernels, because compiling takes seconds, and parts of
few keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xl_export.tensorrt.kernels import compile


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    triton = pytest.importorskip("triton")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys of a segment are divided too: the emulator would need minutes for many."""
    monkeypatch.setattr(compile, "LEAST_TILES", 1)
