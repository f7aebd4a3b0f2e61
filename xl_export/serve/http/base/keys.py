"""API keys: whose streams a client sees. Keys of one name own the same streams."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from runtimes.base.errors import ConfigError
from runtimes.base.files import read_bytes
from runtimes.base.text import decode_text
from xl_export.serve.http.base.errors import RefusedError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MIN_KEY_CHARACTERS = 16  # characters of a key
HASHED = "sha256:"


Keys: TypeAlias = dict[bytes, str]
"""The names of the keys by their hashes, so that the time of a lookup reveals nothing of a key."""


def read_keys(path: Path) -> Keys:
    """The keys of a file with one on each line: `NAME KEY`.

    A key may be given as `sha256:` and the hash of it in hexadecimal digits. Empty lines and lines that begin
    with `#` are left out. Raises ConfigError for any other line, and for a file without keys.
    """
    return keys_of(decode_text(read_bytes(path), str(path)).split("\n"), str(path))


def keys_of(lines: Iterable[str], place: str) -> Keys:
    """The keys of the lines of a file; place: its name, for messages."""
    keys: Keys = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"line {number} of {place}"
        if len(words) != 2 or not NAME.fullmatch(words[0]):
            raise ConfigError(
                f"{where} is no key; expected `NAME KEY`, and a name of only letters, digits, dots, "
                "dashes and underscores."
            )
        digest = _digest(words[1], where)
        if digest in keys:
            raise ConfigError(f"{where} has a key that an earlier line has; give each name its own.")
        keys[digest] = words[0]
    if not keys:
        raise ConfigError(f"{place} has no keys; write one `NAME KEY` on each line.")
    return keys


def _digest(key: str, where: str) -> bytes:
    if key.startswith(HASHED):
        try:
            digest = bytes.fromhex(key.removeprefix(HASHED))
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise ConfigError(f"{where} has no SHA-256 after {HASHED!r}; expected 64 hexadecimal digits.")
        return digest
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(
            f"{where} has a key of {len(key)} characters, which can be guessed; give at least "
            f"{MIN_KEY_CHARACTERS}, such as `openssl rand -hex 24` prints."
        )
    return hashed(key.encode())


def hashed(key: bytes) -> bytes:
    """The hash of a key."""
    return hashlib.sha256(key).digest()


def owner_of(headers: Mapping[str, str], keys: Keys) -> str:
    """The name of a request's key; empty if there are no keys. Raises RefusedError for no valid key."""
    if not keys:
        return ""
    kind, _, key = headers.get("authorization", "").partition(" ")
    owner = keys.get(hashed(key.strip().encode("latin-1"))) if kind.lower() == "bearer" else None
    if owner is None:
        raise RefusedError(
            "the request has no valid API key; send it as `Authorization: Bearer KEY`.",
            status=401,
            code="invalid_api_key",
        )
    return owner
