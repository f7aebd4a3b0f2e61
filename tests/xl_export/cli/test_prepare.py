"""`xl-export prepare`: what it writes and says, and one sentence with exit code 2 for a mistake."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import lzma
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.commands import json_of, xl
from tests.nightly import every
from tests.trainer.data.corpus_files import ENWIK8, PUBLISHED, make_source, make_tar
from trainer.data.corpora import CORPORA
from trainer.data.dataset import open_dataset
from trainer.data.published import fingerprint
from trainer.run.choices import SHORT_NAMES
from xl_export.cli.main import main


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["prepare", *map(str, arguments)])


NAMES = {name: name for name in CORPORA} | SHORT_NAMES


@pytest.mark.parametrize(("given", "name"), NAMES.items())
def test_a_corpus_becomes_a_dataset(given: str, name: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", name, "tar.gz")
    result = run(given, "--from", source, "--out", tmp_path / "out", "--unverified")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'out'} is ready: {name}, not the published files; tokens ")
    dataset = open_dataset(tmp_path / "out")
    assert (dataset.facts.corpus, dataset.facts.published) == (name, False)


def test_the_published_file_needs_no_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path / "in", "text8", "zip")
    monkeypatch.setitem(
        CORPORA,
        "text8",
        dataclasses.replace(CORPORA["text8"], archive=fingerprint({"": source})),
    )
    result = run("text8", "--from", source, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "text8, as published; tokens" in result.stdout


@pytest.mark.parametrize("suffix", every(3, ["gz", "bz2", "xz"]))
def test_compressed_files_give_the_bytes_of_the_corpus(suffix: str, tmp_path: Path) -> None:
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[suffix]
    single = tmp_path / f"enwik8.first-part.{suffix}"
    single.write_bytes(compress(ENWIK8))
    archive = make_tar(tmp_path / f"enwik8.tar.{suffix}", PUBLISHED["enwik8"], mode=f"w:{suffix}")
    for source in (single, archive):
        out = tmp_path / f"from-{source.name}"
        result = run("enwik8", "--from", source, "--out", out, "--unverified", "--json")
        assert json_of(result)["tokens"]["train"] == len(ENWIK8) * 90 // 100
        dataset = open_dataset(out)
        assert b"".join(bytes(part) for part in (dataset.train, dataset.valid, dataset.test)) == ENWIK8


def test_a_download_that_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.data.download.download",
        lambda urls, path, *_, **__: make_source(path.parent, "enwik8", "zip"),
    )
    for _ in range(2):
        options = f"--from {tmp_path}/enwik8.zip --out {tmp_path}/out --download --unverified --force"
        result = xl(f"prepare enwik8 {options}")
        assert result.exit_code == 0, result.output
        monkeypatch.setattr("trainer.data.download.download", lambda *_, **__: pytest.fail("fetched again"))


@pytest.mark.parametrize(
    ("sent", "code"), every(3, [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
)
def test_interrupted_it_leaves_nothing(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with open(tmp_path / "in/enwik8", "wb") as stream:
        stream.truncate(900 << 20)  # takes seconds
    options = "prepare enwik8 --from in/enwik8 --out out --unverified"
    command = [sys.executable, "-m", "xl_export", *options.split()]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    while not list(tmp_path.glob(".out.*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(sent)
    _, said = process.communicate(timeout=280)
    assert process.returncode == code
    assert b"Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
