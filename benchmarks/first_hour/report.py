"""The report on disk: `report.json`, the page that people read, what each step printed, and one archive."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

from benchmarks.first_hour import page
from benchmarks.first_hour.private import Scrubber
from benchmarks.first_hour.process import excerpt
from benchmarks.first_hour.render import to_html, to_markdown
from benchmarks.first_hour.results import Report
from runtimes.base.files import atomic_file, write_json, writing
from runtimes.base.records import to_json

REPORT, MARKDOWN, HTML, LOGS, ARCHIVE, WORK = (
    "report.json",
    "report.md",
    "index.html",
    "logs",
    "report.tar.gz",
    "work",
)


def remove_report(folder: Path) -> None:
    """Removes the files of an earlier report, and nothing else that lies in the folder."""
    with writing(folder):
        for name in (REPORT, MARKDOWN, HTML, ARCHIVE):
            (folder / name).unlink(missing_ok=True)
        for name in (LOGS, WORK):
            if (folder / name).exists():
                shutil.rmtree(folder / name)


def save_report(folder: Path, report: Report, *, scrub: Scrubber) -> None:
    """Writes the report and its page, without private data; each file is whole or as it was before."""
    clean = replace(report, steps=tuple(scrub.clean(step) for step in report.steps))
    write_json(folder / REPORT, to_json(clean))
    blocks = page.blocks(clean)
    for name, text in ((MARKDOWN, to_markdown(blocks)), (HTML, to_html(blocks))):
        with atomic_file(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")


def keep_log(folder: Path, name: str, *, scrub: Scrubber) -> None:
    """Copies what a step printed to the report, without private data and without a long middle."""
    (folder / LOGS).mkdir(exist_ok=True)
    text = scrub(excerpt(folder / WORK / "output" / f"{name}.txt"))
    with atomic_file(folder / LOGS / f"{name}.txt") as temporary:
        temporary.write_text(text, encoding="utf-8")


def pack(folder: Path) -> Path:
    """Writes the archive of the report, which names no user, and returns its path."""
    files = [folder / name for name in (REPORT, MARKDOWN, HTML)]
    if (folder / LOGS).is_dir():
        files += sorted((folder / LOGS).glob("*.txt"))
    with (
        atomic_file(folder / ARCHIVE) as temporary,
        temporary.open("wb") as stream,
        gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for file in files:
            content = file.read_bytes()
            member = tarfile.TarInfo(f"first-hour/{file.relative_to(folder)}")  # its owner is nobody
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return folder / ARCHIVE
