"""One table of expected identities and signatures, and each implementation that opens artefacts.

The keys and signatures are OpenSSL's, as docs/guides/fleet.md makes them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cpp.program import SIGNATURES
from tests.parity.operations import Implementation, Program, PythonSession
from tests.parity.test_refusals import Commands
from tests.sealing import identity, sealed

ENTRY_POINTS = ("python", "command", "cpp", "javascript", "worker")
SPEC, SIGNATURE = "spec.json", "spec.json.sig"
OTHER = "0" * 64  # an identity


def openssl(*words: str | Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so nothing can be signed")
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pairs of keys: `ours`, `other`, and `rsa` of another algorithm."""
    folder = tmp_path_factory.mktemp("keys")
    for name, algorithm in (("ours", "ed25519"), ("other", "ed25519"), ("rsa", "RSA")):
        private = folder / f"{name}.private.pem"
        openssl("genpkey", "-algorithm", algorithm, "-out", private)
        openssl("pkey", "-in", private, "-pubout", "-out", folder / f"{name}.pem")
    return folder


@pytest.fixture(scope="module")
def signed(keys: Path, artefacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact that `ours` has signed."""
    folder = tmp_path_factory.mktemp("signed") / "artefact"
    shutil.copytree(artefacts["ring"], folder)
    private, spec, signature = keys / "ours.private.pem", folder / SPEC, folder / SIGNATURE
    openssl("pkeyutl", "-sign", "-rawin", "-inkey", private, "-in", spec, "-out", signature)
    return folder


def edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def sealed_again(data: bytes) -> bytes:
    """The same facts in other bytes, whose digest fits."""
    return sealed(json.loads(data))


def unchanged(folder: Path) -> None:
    pass


def unsigned(folder: Path) -> None:
    (folder / SIGNATURE).unlink()


# What is done to the signed artefact; the name of a key; the identity that is expected, "" for that of the
# signed artefact; and the words that refuse it, None if it opens.
CASES: list[tuple[Callable[[Path], object], str | None, str | None, str | None]] = [
    (unchanged, None, None, None),
    (unchanged, None, "", None),
    (unchanged, None, OTHER, "identity"),
    (unchanged, None, " ", "identity"),
    (edited(SPEC, sealed_again), None, None, None),
    (edited(SPEC, sealed_again), None, "", "identity"),
    (unsigned, None, "", None),
    (edited(SIGNATURE, flipped), None, "", None),
    (unchanged, "ours", None, None),
    (unchanged, "ours", "", None),
    (unchanged, "ours", OTHER, "identity"),
    (unsigned, "ours", "", "sig.* is missing"),
    (edited(SIGNATURE, flipped), "ours", "", "does not fit"),
    (edited(SIGNATURE, lambda data: data[:-1]), "ours", None, "does not fit"),
    (edited(SIGNATURE, lambda data: data + b"\n"), "ours", None, "does not fit|expected 64"),
    (edited(SPEC, sealed_again), "ours", None, "does not fit"),
    (edited("weights.bin", flipped), "ours", None, "weights.bin"),
    (edited("vocab.json", lambda data: data + b" "), "ours", None, "vocab.json"),
    (lambda folder: (folder / "sampling.json").write_text("{}"), "ours", None, None),
    (unchanged, "other", None, "does not fit"),
    (unchanged, "rsa", None, "no Ed25519"),
    (unchanged, "ours.private", None, "no Ed25519"),
]


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_only_the_expected_and_signed_artefact_opens(
    name: str,
    signed: Path,
    keys: Path,
    artefacts: dict[str, Path],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    entry_point: Implementation
    if name in ("python", "command"):
        pytest.importorskip("cryptography")
        entry_point = PythonSession(artefacts["ring"]) if name == "python" else Commands(artefacts["ring"])
    else:
        entry_point = request.getfixturevalue("javascript" if name == "worker" else name)
        if name == "cpp" and not SIGNATURES:
            pytest.skip("OpenSSL's headers are not installed")
    wrong = []
    for number, (change, key, expected, words) in enumerate(CASES):
        folder = shutil.copytree(signed, tmp_path / str(number))
        change(folder)
        given: dict[str, Any] = {"worker": True} if name == "worker" else {}
        if key is not None:
            given["public_key"] = str(keys / f"{key}.pem")
        if expected is not None:
            given["expected_identity"] = expected or identity(signed / SPEC)
        answer = entry_point.ask("open", model=str(folder), **given)
        fits = re.search(rf"({words}).*\.$", answer.get("error", "")) if words else "error" not in answer
        if not fits:
            wrong.append((number, answer))
    if isinstance(entry_point, Program):
        entry_point.ask("open", model=str(artefacts["ring"]))
    assert wrong == []
