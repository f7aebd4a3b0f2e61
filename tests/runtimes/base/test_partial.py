"""What is being written has a hidden name, and no interruption leaves one behind."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from runtimes.base import partial
from runtimes.base.partial import make_hidden


@pytest.mark.parametrize("folder", [True, False])
def test_partial_files_of_others_are_kept(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter([tmp_path / "theirs", tmp_path / "ours"])
    monkeypatch.setattr(partial, "hidden_name", lambda path: next(names))
    theirs = tmp_path / "theirs"
    theirs.mkdir() if folder else theirs.write_text("")
    made, lock = make_hidden(tmp_path / "out", folder=folder)
    os.close(lock)
    assert made == tmp_path / "ours"
    assert theirs.exists()


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("call", ["open", "flock"])
def test_an_interruption_while_it_is_made_leaves_nothing(
    call: str, folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal just after the file or folder appears."""
    owner = os if call == "open" else fcntl
    really = getattr(owner, call)

    def interrupted(*arguments: Any) -> Any:
        result = really(*arguments)
        assert len(list(tmp_path.iterdir())) == 1
        if call == "open":
            os.close(result)
        raise KeyboardInterrupt

    monkeypatch.setattr(getattr(partial, "os" if call == "open" else "fcntl"), call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_hidden(tmp_path / "out", folder=folder)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
