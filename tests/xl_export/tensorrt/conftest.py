"""What the tests of engines share: the real bindings over stub libraries."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.xl_export.tensorrt.bindings import make_stubs, runner


@pytest.fixture(scope="session")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`bindings(code, *arguments)`: see `bindings.runner`."""
    return runner(make_stubs(tmp_path_factory.mktemp("stubs")))
