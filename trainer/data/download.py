"""Downloads a published file and verifies it."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from runtimes.base.errors import UserError, first_line
from runtimes.base.files import atomic_file
from trainer.data.corpora import Fingerprint
from trainer.data.published import BLOCK_BYTES, fingerprint, progress_bar, say

TIMEOUT = 30  # seconds without a byte until a server counts as silent
NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)


class _ServerError(Exception):
    """One server did not give the archive; the text says why."""


def download(
    urls: Sequence[str],
    path: Path,
    expected: Fingerprint,
    *,
    max_bytes: int | None = None,
) -> None:
    """Downloads a file to `path`, which appears whole and verified, or not at all.

    urls: the servers that have it; they are tried one after another. expected: what is known of the file.
    max_bytes: its largest size, if the size is not known. Raises UserError if no server sends the file.
    """
    reasons = []
    for url in urls:
        try:
            with atomic_file(path) as temporary:
                _fetch(url, temporary, expected, expected.num_bytes or max_bytes or 0)
            return
        except _ServerError as error:
            reasons.append(f"{url}: {error}")
    raise UserError(
        f"{path.name} could not be downloaded ({'; '.join(reasons)}); get it by other means and put it at "
        f"{path}."
    )


def _fetch(url: str, path: Path, expected: Fingerprint, most: int) -> None:
    # One of the servers refuses the name that urllib gives itself.
    request = urllib.request.Request(url, headers={"User-Agent": "xl-export"})
    # A server that sends without end is cut off here, because the hash is only known at the end.
    left = most
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except NETWORK_ERRORS as error:
        raise _ServerError(_why(error)) from error
    with response, open(path, "wb") as target:
        num_bytes = expected.num_bytes or response.length
        with progress_bar(f"downloading {url.rpartition('/')[2]}", num_bytes) as tick:
            while block := _read(response):
                left -= len(block)
                if left < 0:
                    raise _ServerError("it sends more than was published")
                target.write(block)
                tick(len(block))
    found = fingerprint({path.name: path})
    if fact := found.differs(expected):
        raise _ServerError(f"it sends another file: expected {say(fact, expected)}, found {say(fact, found)}")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(BLOCK_BYTES)
    except NETWORK_ERRORS as error:
        raise _ServerError(_why(error)) from error


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", error)  # urllib wraps the error of the operating system
    return reason if isinstance(reason, str) else getattr(reason, "strerror", None) or first_line(reason)
