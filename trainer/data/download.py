"""Downloads the published archive of a corpus and verifies it."""

from __future__ import annotations

import http.client
import urllib.request
from pathlib import Path

from runtimes.base.errors import UserError, first_line
from runtimes.base.files import atomic_file
from trainer.data.corpora import CORPORA, Fingerprint
from trainer.data.published import BLOCK, fingerprint, progress_bar, say

TIMEOUT = 30  # seconds without a byte until a server counts as silent
NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)


class _ServerError(Exception):
    """One server did not give the archive; the text says why."""


def download(name: str, path: Path, *, progress: bool = True) -> None:
    """Downloads the published archive of the corpus `name` to `path`, which appears whole and verified.

    The servers are tried one after another. Raises UserError, and leaves no file, if none of them gives the
    published archive.
    """
    corpus = CORPORA[name]
    reasons = []
    for url in corpus.urls:
        try:
            with atomic_file(path) as temporary:
                _fetch(url, temporary, corpus.archive, corpus.archive_name, corpus.max_bytes, progress)
            return
        except _ServerError as error:
            reasons.append(f"{url}: {error}")
    raise UserError(
        f"{name} could not be downloaded ({'; '.join(reasons)}); "
        "get its archive by other means and give it as --from."
    )


def download_file(url: str, path: Path, *, sha256: str, num_bytes: int, progress: bool = True) -> None:
    """Downloads a file to `path`, which appears whole and verified; raises UserError and leaves no file."""
    expected = Fingerprint(sha256=sha256, num_bytes=num_bytes)
    name = url.rpartition("/")[2]
    try:
        with atomic_file(path) as temporary:
            _fetch(url, temporary, expected, name, num_bytes, progress)
    except _ServerError as error:
        raise UserError(
            f"{url} could not be downloaded ({error}); get {name} by other means and put it at {path}."
        ) from error


def _fetch(url: str, path: Path, expected: Fingerprint, name: str, max_bytes: int, progress: bool) -> None:
    # One of the servers refuses the name that urllib gives itself.
    request = urllib.request.Request(url, headers={"User-Agent": "xl-export"})
    # A server that sends without end is cut off here, because the hash is only known at the end.
    left = expected.num_bytes or max_bytes
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except NETWORK_ERRORS as error:
        raise _ServerError(_why(error)) from error
    with response, open(path, "wb") as target:
        num_bytes = expected.num_bytes or response.length
        with progress_bar(f"downloading {name}", progress, num_bytes) as tick:
            while block := _read(response):
                left -= len(block)
                if left < 0:
                    raise _ServerError("it sends more than was published")
                target.write(block)
                tick(len(block))
    found = fingerprint({path.name: path}, progress=False)
    if fact := found.differs(expected):
        raise _ServerError(f"it sends another file: expected {say(fact, expected)}, found {say(fact, found)}")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(BLOCK)
    except NETWORK_ERRORS as error:
        raise _ServerError(_why(error)) from error


def _why(error: Exception) -> str:
    reason = getattr(
        error, "reason", error
    )  # urllib wraps the error of the operating system in one of its own
    return reason if isinstance(reason, str) else getattr(reason, "strerror", None) or first_line(reason)
