"""The C++ library in one process for each test process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cpp.program import Driver, compiled


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    running = Driver(compiled(Path(__file__).with_name("driver.cpp"), "-O0"))
    yield running
    assert running.close() == 0
