"""Finds the files of a public corpus in what the user gave, and tells whether they are the published ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from runtimes.base.errors import UserError
from runtimes.base.files import open_file, reading
from runtimes.base.sealed import FileFacts
from trainer.data.archives import Contents, Tick, find_files, is_packed
from trainer.data.corpora import WHOLE, Corpus, Fingerprint

BLOCK_BYTES = 1 << 22  # bytes that are read at a time
Files = dict[str, Path]  # by their names inside the source


@dataclass(frozen=True)
class FoundCorpus:
    """The files of each part of a corpus."""

    parts: dict[str, Files]
    published: bool  # whether these files, or the archive that holds them, are the published ones
    sources: dict[str, FileFacts]  # hashes and sizes


def find_corpus(corpus: Corpus, source: Path, scratch: Path, *, unverified: bool) -> FoundCorpus:
    """The verified files of `corpus` in a folder, archive or file.

    Members of an archive are unpacked to `scratch`.

    Raises UserError for a missing part, and for a part that is not the published one, which is accepted if
    `unverified`.
    """
    if (
        source.is_dir()
        and (source / corpus.archive_name).is_file()
        and not any(corpus.wants(p.name) for p in source.iterdir())
    ):
        source /= corpus.archive_name  # the public script leaves the archives of enwik8 and text8 in a folder
    archive = fingerprint({source.name: source}) if is_packed(source) else None
    with progress_bar("unpacking", archive.num_bytes if archive else None) as tick:
        found = find_files(source, corpus.wants, scratch=scratch, limit=corpus.max_bytes, tick=tick)
    parts = _parts(corpus, source, found)
    if archive and archive.differs(corpus.archive) is None and corpus.archive.hashed:
        return FoundCorpus(parts, True, {source.name: _facts(archive)})
    prints = {part: fingerprint(files) for part, files in parts.items()}
    published = True
    for part, found_print in prints.items():
        fact = found_print.differs(corpus.files[part])
        published &= fact is None
        if fact and not unverified:
            raise UserError(
                f"{source} is not the published {corpus.name}: for {corpus.parts[part][0]} expected "
                f"{say(fact, corpus.files[part])}, found {say(fact, found_print)}; give the published one, "
                "or accept this one with --unverified."
            )
    sources = {source.name: archive} if archive else prints
    return FoundCorpus(parts, published, {name: _facts(found_print) for name, found_print in sources.items()})


def _parts(corpus: Corpus, source: Path, found: Contents) -> dict[str, Files]:
    """The files of each part by name. Raises UserError for a part that is missing or that is there twice."""
    if WHOLE in corpus.parts and found.is_single:
        return {WHOLE: found.files}  # people give this one file many names
    files = found.files
    parts = {part: {name: files[name] for name in corpus.matching(part, files)} for part in corpus.parts}
    for part, members in parts.items():
        wanted = corpus.parts[part][0]
        if not members:
            raise UserError(
                f"{source} has no {wanted}, which {corpus.name} needs; give its whole archive or folder."
            )
        if len(members) > 1 and "*" not in wanted:
            first, second = sorted(members)[:2]
            raise UserError(
                f"{source} has both {first} and {second}; give a folder or archive with {corpus.name} only."
            )
    return parts


def fingerprint(files: Files) -> Fingerprint:
    """Number, size, lines and hashes of the files, joined in the given order."""
    md5, sha1, sha256 = (hashlib.new(name, usedforsecurity=False) for name in ("md5", "sha1", "sha256"))
    num_bytes = lines = 0
    with progress_bar("verifying", total_bytes(files.values())) as tick:
        for path in files.values():
            for block in read_blocks(path, tick):
                for digest in (md5, sha1, sha256):
                    digest.update(block)
                num_bytes += len(block)
                lines += block.count(b"\n")
    return Fingerprint(
        num_files=len(files),
        num_bytes=num_bytes,
        lines=lines,
        md5=md5.hexdigest(),
        sha1=sha1.hexdigest(),
        sha256=sha256.hexdigest(),
    )


def say(fact: str, of: Fingerprint) -> str:
    """A fact as people read it: `num_bytes` of 5 is `5 bytes`, and a hash comes with its name."""
    value = getattr(of, fact)
    return f"{fact} {value}" if isinstance(value, str) else f"{value:,} {fact.removeprefix('num_')}"


def _facts(found: Fingerprint) -> FileFacts:
    assert found.sha256 is not None
    assert found.num_bytes is not None
    return FileFacts(sha256=found.sha256, num_bytes=found.num_bytes)


def read_blocks(path: Path, tick: Tick, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The bytes of a file from `start` to `end`, in blocks of a few megabytes."""
    left = (path.stat().st_size if end is None else end) - start
    with reading(path), open_file(path) as stream:
        stream.seek(start)
        while block := stream.read(min(BLOCK_BYTES, left)):
            left -= len(block)
            tick(len(block))
            yield block


@contextmanager
def progress_bar(what: str, num_bytes: int | None) -> Iterator[Tick]:
    """Shows on a terminal how many bytes of `num_bytes` are done, if that is known.

    The bar disappears when the block ends.
    """
    hidden = True if num_bytes is None else None  # None: only on a terminal
    with tqdm(desc=what, total=num_bytes, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        yield bar.update


def total_bytes(paths: Iterable[Path]) -> int:
    """The size of all the files together; a file that is missing counts nothing."""
    return sum(path.stat().st_size for path in paths if path.is_file())
