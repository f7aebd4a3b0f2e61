"""The C++ library in one process for each test process."""

from tests.parity.conftest import cpp  # noqa: F401
