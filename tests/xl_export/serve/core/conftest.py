"""Sessions that the tests of the engine share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes import open_session
from runtimes.contract.session import Session
from tests.architectures import ARCHITECTURES
from xl_export.artefact.export import export


@pytest.fixture(scope="session")
def session(artefacts: dict[str, Path]) -> Session:
    """The ring artefact of the shared run."""
    return open_session(artefacts["ring"], threads=1)


@pytest.fixture(scope="session")
def selective(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session that computes only the logits that are asked for."""
    run = make_run(**ARCHITECTURES["adaptive-softmax"])
    return open_session(export(run, tmp_path_factory.mktemp("selective") / "artefact"), threads=1)
