"""What the tests of the runtimes share: sessions, copies to damage, and code run in another process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runtimes.contract.session import Session
from runtimes.sessions.open import open_session
from tests.sealing import sealed

Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def sessions(run: Path, artefacts: dict[str, Path]) -> dict[str, Session]:
    """A session of each kind over the same model: `ring`, `shift`, `hidden`, and `torch`."""
    return {**{form: open_session(folder) for form, folder in artefacts.items()}, "torch": open_session(run)}


@pytest.fixture(scope="session")
def in_bytes(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A session over the same model with ring memory in int8."""
    from xl_export.artefact.export import export

    return open_session(export(run, tmp_path_factory.mktemp("bytes") / "artefact", memory_precision="int8"))


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("shift", "hidden", "bytes")]


@pytest.fixture(params=["ring", "torch", *OTHERS])
def session(request: pytest.FixtureRequest, sessions: dict[str, Session]) -> Session:
    """Each kind of session in turn."""
    if request.param == "bytes":
        in_bytes: Session = request.getfixturevalue("in_bytes")
        return in_bytes
    return sessions[request.param]


@pytest.fixture
def artefact(artefacts: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the ring artefact that the test may change."""
    return Path(shutil.copytree(artefacts["ring"], tmp_path / "artefact"))


@pytest.fixture(scope="session")
def python() -> Python:
    """`python(code, *arguments, block=…)` runs code in a new interpreter in which the named packages cannot
    be imported.
    """

    def start(code: str, *arguments: object, block: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        preamble = f"import sys\nfor name in {block!r}: sys.modules[name] = None\n"
        command = [sys.executable, "-W", "error", "-c", preamble + code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=280)

    return start


@pytest.fixture(scope="session")
def reseal() -> Callable[..., None]:
    """`reseal(folder, name)`: makes `spec.json`'s hashes and digest fit what the folder holds now."""

    def seal(folder: Path, *names: str, **changes: object) -> None:
        document = {**json.loads((folder / "spec.json").read_text()), **changes}
        (folder / "spec.json").write_bytes(sealed(document, folder, *names))

    return seal
