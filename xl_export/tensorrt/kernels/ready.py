"""Compiled kernels of two cases that the package carries, to try a GPU without a compiler.

They are PTX for the oldest GPUs that have their instructions, so the driver of any newer GPU compiles them
too. `python -m xl_export.tensorrt.kernels.ready` writes the file again, after a change to the kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from runtimes.base.files import read_json, write_json
from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.kernels.compile import JOINS, Kernel, tactics
from xl_export.tensorrt.kernels.driver import compile_pair

FILE = Path(__file__).with_name("ready.json")
SEGMENT = CASES["three-tiles-of-queries"]
# A case, its tactic, and the oldest compute capability that runs it.
READY = {
    "single tokens": (dataclasses.replace(SEGMENT, T=1), tactics(SEGMENT.K, 75)[0], 75),
    "segments": (SEGMENT, tactics(SEGMENT.K, 80)[2], 80),
}


def ready_kernels(capability: int) -> Iterator[tuple[str, Case, Kernel, Kernel]]:
    """Name, case and the two kernels of everything that a GPU of this compute capability runs."""
    document = read_json(FILE)
    for name, (case, _, oldest) in READY.items():
        if capability >= oldest:
            first, second = (Kernel(**fields) for fields in document[name])
            yield name, case, first, second


def main() -> None:
    document = {}
    for name, (case, tactic, oldest) in READY.items():
        kernels = compile_pair(
            [array.shape for array in case.inputs().values()],
            case.attributes,
            case.mem_len,
            tactic=tactic,
            join=JOINS[0],
            compute_capability=oldest,
            dtype=case.dtype,
        )
        document[name] = [dataclasses.asdict(kernel) for kernel in kernels]
    write_json(FILE, document)


if __name__ == "__main__":
    main()
