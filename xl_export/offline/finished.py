"""Finished blocks as files that appear whole, so that a call after a kill does only what is missing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtimes.base.errors import UserError
from runtimes.base.files import atomic_file, read_bytes, read_json, write_json, writing

PLAN = "plan.json"


class Finished:
    """A folder of finished blocks, and the plan that they belong to.

    plan: everything that the content of a block depends on. blocks: how many there are. No other call works
    with the folder until `close`.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], *, blocks: int) -> None:
        """Makes the folder, or reuses one that holds the same plan; raises UserError for another plan."""
        self.folder = folder
        self._blocks = blocks
        self._held: int | None = None
        try:
            self._begin(json.loads(json.dumps(plan | {"blocks": blocks})))
        except BaseException:
            self.close()
            raise

    def _begin(self, plan: dict[str, Any]) -> None:
        folder = self.folder
        if (folder / PLAN).is_file():
            self._lock()
            before = read_json(folder / PLAN)
            if not isinstance(before, dict):
                raise UserError(f"{folder / PLAN} is no plan of finished blocks; give another --work.")
            different = [name for name in plan if before.get(name) != plan[name]]
            if different:
                raise UserError(
                    f"{folder} holds finished blocks of a call with other {' and '.join(different)}; give "
                    "another --work, or delete the folder to begin again."
                )
            return
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} holds other things than finished blocks; give another --work.")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        write_json(folder / PLAN, plan)

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
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Lets another call have the folder; a process that ends does the same."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _lock(self) -> None:
        """Raises UserError if another call works with the folder.

        On a file system without locks nothing is refused.
        """
        self._held = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(
                f"another call works with {self.folder} now; wait until it ends, or give another --work."
            ) from None
        except OSError:
            self.close()

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:09}.block"
