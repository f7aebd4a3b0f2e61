"""One folder, one writer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtimes.base.errors import UserError
from runtimes.base.lock import LOCK, only_writer

HOLD = """
import sys
from pathlib import Path
from runtimes.base.lock import only_writer
with only_writer(Path(sys.argv[1]), doing="trained"):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_second_writer_is_refused_with_the_owner(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        assert first.stdout.readline() == "held\n"
        told = rf"is being written by another process \(trained by process {first.pid} on .* since 2"
        with pytest.raises(UserError, match=told), only_writer(tmp_path, doing="trained"):
            pytest.fail("the block must not run")
        first.kill()
    with only_writer(tmp_path, doing="trained"):  # the killed process holds nothing any more
        assert (tmp_path / LOCK).read_text().startswith(f"trained by process {os.getpid()} ")
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_ask_at_once_never_two_write(tmp_path: Path) -> None:
    writing, most, turns = [0], [0], [0]
    counting = threading.Lock()

    def ask() -> None:
        for _ in range(50):
            try:
                with only_writer(tmp_path, doing="tried"):
                    with counting:
                        writing[0] += 1
                        most[0] = max(most[0], writing[0])
                        turns[0] += 1
                    with counting:
                        writing[0] -= 1
            except UserError:
                continue

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert turns[0] > 0
