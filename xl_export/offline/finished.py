"""Finished blocks as files that appear whole, so that a call after a kill does only what is missing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtimes.base.errors import UserError
from runtimes.base.files import atomic_file, read_bytes, read_json, write_json, writing
from runtimes.base.lock import LOCK, only_writer
from runtimes.base.records import json_text

PLAN = "plan.json"


class Finished:
    """A folder of finished blocks, and the plan that they belong to.

    plan: everything that the content of a block depends on. blocks: how many there are. No other call works
    with the folder until `close`.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], *, blocks: int) -> None:
        """Makes the folder, or reuses one that holds the same plan; raises UserError for another plan, and
        if another call works with it.
        """
        self.folder = folder
        self._blocks = blocks
        with contextlib.ExitStack() as stack:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_writer(folder, doing="scoring"))
            _take_over(folder, json.loads(json_text(plan | {"blocks": blocks})))
            self._stack = stack.pop_all()

    @property
    def missing(self) -> list[int]:
        """The numbers of the blocks that are not finished."""
        return [number for number in range(self._blocks) if not self._file(number).is_file()]

    def write(self, number: int, content: bytes) -> None:
        """Writes a finished block."""
        with atomic_file(self._file(number)) as temporary:
            temporary.write_bytes(content)

    def contents(self) -> Iterator[bytes]:
        """Yields the content of every block in order; all are finished."""
        for number in range(self._blocks):
            yield read_bytes(self._file(number))

    def remove(self) -> None:
        """Removes the blocks and the plan, and the folder if nothing else is in it."""
        for number in range(self._blocks):
            self._file(number).unlink(missing_ok=True)
        (self.folder / PLAN).unlink(missing_ok=True)
        self.close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def close(self) -> None:
        """Lets another call have the folder; a process that ends does the same."""
        self._stack.close()

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:09}.block"


def _take_over(folder: Path, plan: dict[str, Any]) -> None:
    """Raises UserError if a folder holds anything but finished blocks of this plan."""
    if not (folder / PLAN).is_file():
        if any(entry.name != LOCK for entry in folder.iterdir()):
            raise UserError(f"{folder} holds other things than finished blocks; give another --work.")
        write_json(folder / PLAN, plan)
        return
    before = read_json(folder / PLAN)
    different = [name for name in plan if before.get(name) != plan[name]]
    if different:
        raise UserError(
            f"{folder} holds finished blocks of a call with other {' and '.join(different)}; give another "
            "--work, or delete the folder to begin again."
        )
