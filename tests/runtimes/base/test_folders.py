"""Folders are whole or absent, and nothing is replaced that nobody asked to replace."""

# ruff: noqa: PT012 (what happens inside the block is what is tested)
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtimes.base import folders
from runtimes.base.errors import UserError
from runtimes.base.files import atomic_file, write_json
from runtimes.base.folders import atomic_folder, refuse_existing
from runtimes.base.kinds import ARTEFACT, KINDS
from tests.runtimes.base.test_files import FILE, names


def test_an_existing_folder_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    for content in ("first", "second"):
        with atomic_folder(path, FILE, force=content == "second") as temporary:
            fill(temporary, content)
            (temporary / "side").write_text(content) if content == "first" else None
    assert names(path) == ["file"]
    assert (path / "file").read_text() == "second"
    assert names(tmp_path) == ["folder"]
    with pytest.raises(UserError, match="exists already"), atomic_folder(path, FILE):
        pytest.fail("the block must not run")
    (tmp_path / "file").write_text("precious")
    with (
        pytest.raises(UserError, match="not a folder"),
        atomic_folder(tmp_path / "file", FILE, force=True),
    ):
        pytest.fail("the block must not run")


def test_force_replaces_only_a_folder_of_the_same_kind(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years")
    for path in (tmp_path / "precious", tmp_path, Path("/")):
        with (
            pytest.raises(UserError, match=r"holds other things .* and no file"),
            atomic_folder(path, FILE, force=True),
        ):
            pytest.fail("the block must not run")
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years"
    assert names(tmp_path) == ["precious"]


STRANGE: dict[str, tuple[list[str], list[str]]] = {
    # files that are added to a folder, and what is named
    "files": (["CNAME", "about.html"], ["CNAME", "about.html"]),
    "hidden": ([".git/HEAD", ".nojekyll"], [".git", ".nojekyll"]),
    "below": (["run/notes.txt", "run/more/file"], ["run/more", "run/notes.txt"]),
    "a folder by the name of a file": (["side/thesis.txt"], ["side"]),
    "as if it were being written": ([".thesis.0123abcd.partial"], [".thesis.0123abcd.partial"]),
    "the last copy of another folder": ([".side.0123abcd.replaced"], [".side.0123abcd.replaced"]),
}


@pytest.mark.parametrize(("added", "named"), STRANGE.values(), ids=STRANGE)
def test_force_keeps_files_that_are_not_its_own(added: list[str], named: list[str], tmp_path: Path) -> None:
    """What this project itself leaves in a folder, such as files that are being written, does not count."""
    folder = tmp_path / "run"
    for name in ("file", ".side.0123abcd.partial", "run/file", *added):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    with (
        pytest.raises(UserError, match=f"also holds {re.escape(' and '.join(map(repr, named)))},"),
        atomic_folder(folder, FILE, force=True),
    ):
        pytest.fail("the block must not run")
    for name in added:
        assert (folder / name).read_text() == name
        (folder / name).unlink()
    for name in ("side", "run/more", ".git"):
        (folder / name).rmdir() if (folder / name).is_dir() else None
    with atomic_folder(folder, FILE, force=True) as new:
        (new / "file").write_text("new")
    assert names(folder) == ["file"]


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    fill(tmp_path / "folder", "old")
    fill(tmp_path / "elsewhere", "precious")
    (tmp_path / "folder" / "run").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(UserError, match="also holds 'run'"),
        atomic_folder(tmp_path / "folder", FILE, force=True),
    ):
        pytest.fail("the block must not run")
    assert names(tmp_path / "elsewhere") == ["file"]


def test_no_folder_is_written_into_one_of_ours(tmp_path: Path) -> None:
    """At any depth, and through a link; the folder may hold files of others, and its files may be damaged."""
    for kind in KINDS:
        outer = tmp_path / kind.marker
        for name in (kind.marker, *kind.proofs[:1], "notes.txt"):
            (outer / name).parent.mkdir(parents=True, exist_ok=True)
            (outer / name).write_text("{")
        (outer / "empty").mkdir()
        (tmp_path / "link").symlink_to(outer)
        for inside in ("inside", "deep/inside", "empty", "../link/inside"):
            with pytest.raises(UserError, match=f"{kind.marker}, which is {kind.what};"):
                refuse_existing(outer / inside, FILE, force=True)
        (tmp_path / "link").unlink()
        (outer / kind.marker).unlink()
        refuse_existing(outer / "inside", FILE, force=False)


def test_lists_of_files_decide_what_is_replaced(tmp_path: Path) -> None:
    """A file whose name such a folder could have had is not ours; a damaged list replaces nothing."""
    (tmp_path / "reference.json").touch()
    write_json(tmp_path / "spec.json", {"files": {"step.onnx": {}, "a*": {}}})
    for name in ("step.onnx", "tokenizer.json", "ab"):
        (tmp_path / name).touch()
    assert ARTEFACT.foreign(tmp_path) == ["ab", "tokenizer.json"]
    for damaged in ("{", "[]", '{"files": 5}'):
        (tmp_path / "spec.json").write_text(damaged)
        with pytest.raises(UserError, match=r"spec.json is damaged and does not list the files"):
            refuse_existing(tmp_path, ARTEFACT, force=True)


def test_files_added_while_a_folder_is_made_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "file").write_text("old")
    with (
        pytest.raises(UserError, match=r"also holds 'notes.txt'"),
        atomic_folder(folder, FILE, force=True),
    ):
        (folder / "notes.txt").write_text("mine")
    assert names(folder) == ["file", "notes.txt"]


def fill(folder: Path, text: str) -> None:
    """Makes a folder that a command of the kind `file` could have written."""
    folder.mkdir(exist_ok=True)
    (folder / "file").write_text(text)


def test_a_folder_written_by_another_process_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with (
        pytest.raises(UserError, match="was written by somebody else meanwhile"),
        atomic_folder(path, FILE) as mine,
    ):
        fill(mine, "mine")
        fill(path, "theirs")
    assert (path / "file").read_text() == "theirs"
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("exchange", [True, False])
def test_what_became_something_else_meanwhile_is_not_replaced(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --force, too; whether it changes before the last look or between that and the exchange."""
    path, swap = tmp_path / "folder", folders._swap

    def change_and_swap(first: Path, second: Path) -> bool:
        if (path / "file").exists():
            (path / "file").rename(path / "thesis")
        return swap(first, second)

    fill(path, "old")
    if exchange:
        monkeypatch.setattr(folders, "_swap", change_and_swap)
    with (
        pytest.raises(UserError, match="changed meanwhile" if exchange else "and no file"),
        atomic_folder(path, FILE, force=True) as mine,
    ):
        fill(mine, "mine")
        if not exchange:
            (path / "file").rename(path / "thesis")
    assert (path / "thesis").read_text() == "old"
    assert names(tmp_path) == ["folder"]


def test_a_source_inside_the_folder_that_is_replaced_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder"
    fill(path, "old")
    fill(path / "run", "source")
    for source in (path, path / "run", tmp_path / "other" / ".." / "folder" / "run" / "file"):
        (tmp_path / "other").mkdir(exist_ok=True)
        with (
            pytest.raises(UserError, match="which would be replaced and deleted"),
            atomic_folder(path, FILE, force=True, sources=[source]),
        ):
            pytest.fail("the block must not run")
    monkeypatch.chdir(path / "run")
    with (
        pytest.raises(UserError, match="this command was started in"),
        atomic_folder(Path(".."), FILE, force=True),
    ):
        pytest.fail("the block must not run")
    assert (path / "run" / "file").read_text() == "source"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # the shell would be left in a folder that is gone
    with pytest.raises(UserError, match="this command was started in"), atomic_folder(Path("."), FILE):
        pytest.fail("the block must not run")


REPLACE_FOR_EVER = """
import sys
from pathlib import Path
from runtimes.base.folders import atomic_folder
from runtimes.base.kinds import Kind
FILE = Kind(what="a folder", marker="file", proofs=("file",))
path = Path(sys.argv[1])
print("ready", flush=True)
while True:
    with atomic_folder(path, FILE, force=True) as mine:
        (mine / "file").write_text("whole")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges two names at once")
def test_a_kill_between_two_renames_leaves_neither_name_empty(tmp_path: Path) -> None:
    """While a folder is replaced again and again it is always there; so it is after a kill."""
    path = tmp_path / "folder"
    fill(path, "whole")
    command = [sys.executable, "-c", REPLACE_FOR_EVER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        began = time.monotonic()
        while time.monotonic() - began < 0.15:
            os.stat(path)  # never FileNotFoundError
        child.send_signal(signal.SIGKILL)
    assert (path / "file").read_text() == "whole"
    with atomic_folder(path, FILE, force=True) as mine:
        fill(mine, "new")
    assert names(tmp_path) == ["folder"]


def test_only_partial_files_of_killed_commands_are_removed(tmp_path: Path) -> None:
    path, other = tmp_path / "folder", tmp_path / "other"
    for left in (".folder.0123abcd.partial", ".file.0123abcd.partial", ".folder.0123abcd.not"):
        (tmp_path / left).mkdir()
    (tmp_path / ".file.0123abce.partial").touch()
    with atomic_folder(path, FILE) as mine:
        fill(mine, "mine")
        with atomic_folder(path, FILE, force=True) as second:  # sweeps, but not what is in use
            fill(second, "second")
        assert (mine / "file").read_text() == "mine"
        for folder in (path, second):
            assert folder.exists() == (folder == path)
        (path / "file").unlink()
    with atomic_file(tmp_path / "file") as temporary:
        temporary.write_text("text")
    assert not other.exists()
    assert names(tmp_path) == [".folder.0123abcd.not", "file", "folder"]


def test_a_kill_between_two_renames_without_exchange_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command brings the old folder back; an interrupt brings it back at once."""
    path, rename = tmp_path / "folder", os.rename
    fill(path, "old")
    monkeypatch.setattr(folders, "_swap", lambda first, second: False)

    def stopped(source: Path, target: Path) -> None:
        if Path(target) == path and Path(source).suffix == ".partial":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", stopped)
    with pytest.raises(KeyboardInterrupt), atomic_folder(path, FILE, force=True) as mine:
        fill(mine, "new")
    monkeypatch.undo()
    assert (path / "file").read_text() == "old"
    path.rename(tmp_path / ".folder.0123abcd.replaced")  # as a kill would leave it
    with (
        pytest.raises(UserError, match="was written by somebody else meanwhile"),
        atomic_folder(path, FILE) as mine,
    ):
        fill(mine, "new")
    assert (path / "file").read_text() == "old"
