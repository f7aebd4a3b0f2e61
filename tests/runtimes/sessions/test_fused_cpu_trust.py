"""A library that somebody else may have written is never loaded, and the user reads why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtimes.base.errors import UserError
from runtimes.sessions import fused_cpu
from runtimes.sessions.fused_cpu import trust
from runtimes.sessions.open import open_session
from tests.commands import json_of, xl


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that XDG_CACHE_HOME names; the compiler writes a few bytes there in place of a library."""
    folder = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(trust, "_is_private_group", lambda group: False)  # whatever this machine's groups are
    monkeypatch.setattr(
        "runtimes.sessions.fused_cpu.library._compile", lambda compiler, to: to.write_bytes(b"compiled")
    )
    return folder


def test_only_the_user_may_write_the_library(home: Path) -> None:
    before = os.umask(0o002)  # the default of systems where each user has a group
    try:
        home.mkdir(mode=0o755)
        (home / "cache").mkdir(mode=0o755)
        library = fused_cpu.build()
    finally:
        os.umask(before)
    assert fused_cpu.built() == library
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert library.stat().st_mode & 0o022 == 0
    assert fused_cpu.ignored() is None


@pytest.mark.parametrize("place", ["LIBRARY", "home", "home/cache", "home/cache/xl-export"])
@pytest.mark.parametrize("mode", [0o770, 0o1777])
def test_what_others_may_write_is_not_loaded(
    place: str, mode: int, home: Path, artefacts: dict[str, Path]
) -> None:
    library = fused_cpu.build()
    changed = library if place == "LIBRARY" else home.parent / place
    changed.chmod(mode)
    if mode == 0o1777 and place in ("home", "home/cache"):  # only the owner of a file replaces it, as in /tmp
        assert fused_cpu.built() == library
        return
    assert fused_cpu.built() is None
    assert open_session(artefacts["ring"]).kernel == "standard"
    sentence = json_of(xl("info", artefacts["ring"], "--json"))["fused_kernel_ignored"]
    assert f"other users may write {changed};" in sentence
    told = xl("info", artefacts["ring"]).stdout
    assert sentence.rstrip(".") in told
    result = xl("fused-kernel")
    if place == "LIBRARY":  # in a folder of the user alone a new one is built
        assert result.exit_code == 0
        assert str(changed) in result.stderr
        assert fused_cpu.built() is not None
    else:
        assert f"other users may write {changed};" in result.stderr
        assert result.exit_code == 2
        changed.chmod(0o700)
        assert fused_cpu.built() == library


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("place", ["LIBRARY", "home", "home/cache/xl-export"])
def test_what_another_user_owns_is_not_loaded(place: str, home: Path) -> None:
    library = fused_cpu.build()
    changed = library if place == "LIBRARY" else home.parent / place
    os.chown(changed, 54321, -1)
    assert fused_cpu.built() is None
    assert f"{changed} belongs to another user (number 54321)" in str(fused_cpu.ignored())
    if place != "LIBRARY":
        with pytest.raises(UserError, match=r"belongs to another user .* name a folder of your own"):
            fused_cpu.build()


def test_a_link_to_a_folder_of_others_is_not_trusted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fused_cpu.build()
    (tmp_path / "link").symlink_to(home / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert fused_cpu.built() == library
    home.chmod(0o777)
    assert fused_cpu.built() is None
    home.chmod(0o755)
    library.rename(home / "elsewhere")
    library.symlink_to(home / "elsewhere")
    assert fused_cpu.built() is None
    assert f"{library} is no regular file" in str(fused_cpu.ignored())


def test_a_relative_cache_folder_is_ignored(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = fused_cpu.build()
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(work))
    assert fused_cpu.built() is None
    assert fused_cpu.build() == work / ".cache" / "xl-export" / library.name
    monkeypatch.setenv("HOME", "cache")
    assert fused_cpu.built() is None
    with pytest.raises(UserError, match="name a folder in the variable XDG_CACHE_HOME"):
        fused_cpu.build()


def test_a_cache_that_cannot_be_read_is_ignored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + 300 * "x")  # which root cannot read either
    assert fused_cpu.built() is None
    assert fused_cpu.ignored() is None
