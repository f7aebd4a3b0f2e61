"""The published archive of a corpus, fetched and verified."""

from __future__ import annotations

import http.client
import urllib.request
from pathlib import Path

from runtimes.base.errors import UserError, first_line
from runtimes.base.files import atomic_file
from trainer.data.corpora import CORPORA, Corpus
from trainer.data.published import BLOCK, fingerprint, progress_bar, say

TIMEOUT = 30  # seconds without a byte
NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)


class _NotHadError(Exception):
    """Why one server did not give the archive."""


def download(name: str, path: Path, *, progress: bool = True) -> None:
    """Fetches the published archive of the corpus `name` to the file `path`, which appears whole and verified or not at all.

    Raises UserError where no server gives it, or none gives what was published.
    """
    corpus, reasons = CORPORA[name], []
    for url in corpus.urls:
        try:
            with atomic_file(path) as temporary:
                _fetch(url, temporary, corpus, progress)
            return
        except _NotHadError as error:
            reasons.append(f"{url}: {error}")
    raise UserError(
        f"{name} could not be downloaded ({'; '.join(reasons)}); get its archive by other means and give it as --from."
    )


def _fetch(url: str, path: Path, corpus: Corpus, progress: bool) -> None:
    request = urllib.request.Request(
        url, headers={"User-Agent": "xl-export"}
    )  # one of the servers refuses urllib's own
    left = corpus.archive.num_bytes or corpus.max_bytes
    with open(path, "wb") as target, progress_bar(f"downloading {corpus.archive_name}", progress) as tick:
        try:
            response = urllib.request.urlopen(request, timeout=TIMEOUT)
        except NETWORK_ERRORS as error:
            raise _NotHadError(_why(error)) from error
        with response:
            while block := _read(response):
                left -= len(block)
                if left < 0:
                    raise _NotHadError("it sends more than was published")
                target.write(block)
                tick(len(block))
    found = fingerprint({path.name: path}, progress=False)
    if fact := found.differs(corpus.archive):
        raise _NotHadError(
            f"it sends another file: expected {say(fact, corpus.archive)}, found {say(fact, found)}"
        )


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(BLOCK)
    except NETWORK_ERRORS as error:
        raise _NotHadError(_why(error)) from error


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", error)  # an OSError inside of urllib's own
    return reason if isinstance(reason, str) else getattr(reason, "strerror", None) or first_line(reason)
