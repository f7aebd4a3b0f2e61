"""Verifies that the owner of a private key signed a sealed file.

The signature of `spec.json` is the file `spec.json.sig`: the 64 bytes of Ed25519 (RFC 8032) over the exact
bytes of `spec.json`, as `openssl pkeyutl -sign -rawin` writes them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from runtimes.base.errors import ArtefactError, ConfigError, needs
from runtimes.base.files import read_bytes


def signed_identity(path: Path, public_key: Path) -> str:
    """The SHA-256 of a file whose signature is right.

    public_key: a PEM file, as `openssl pkey -pubout` writes it. Raises ArtefactError for a missing or wrong
    signature, and ConfigError for a file that is no such key.
    """
    pem = read_bytes(public_key)
    with needs("sign", "cryptography"):
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(
            f"{public_key} is no Ed25519 public key in PEM; write one with `openssl pkey -in PRIVATE.pem "
            "-pubout -out PUBLIC.pem`."
        )
    signature = path.with_name(f"{path.name}.sig")
    if not signature.is_file():
        raise ArtefactError(
            f"{signature} is missing, and a public key was given; copy the signature with {path.name}, or "
            "sign that file with `openssl pkeyutl -sign -rawin`."
        )
    content = read_bytes(path)
    try:
        key.verify(read_bytes(signature), content)
    except InvalidSignature:
        raise ArtefactError(
            f"{signature} does not fit {path.name} and the public key {public_key}; copy the whole folder "
            "again, or sign it with the private key that belongs to this one."
        ) from None
    return hashlib.sha256(content).hexdigest()
