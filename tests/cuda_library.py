"""A file with code for GPUs, as nvcc writes it into a library."""

from __future__ import annotations

import struct
from pathlib import Path

from runtimes.sessions.ort_gpu.machine_code import CODE, MARK, PTX, SPECIFIC, Code


def write_library(path: Path, *containers: list[Code]) -> Path:
    """An ELF file whose section for GPUs has these containers; the code itself is zeros."""
    code = b"".join(map(_container, containers))
    names = b"\0" + CODE + b"\0.shstrtab\0"
    sections = [(0, 0, 0), (1, 64, len(code)), (1 + len(CODE) + 1, 64 + len(code), len(names))]
    heads = [struct.pack("<I20xQQ24x", *section) for section in sections]
    first = 64 + len(code) + len(names)
    head = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack(
        "<Q10xHHH", first, 64, len(heads), len(heads) - 1
    )
    path.write_bytes(head + code + names + b"".join(heads))
    return path


def _container(codes: list[Code]) -> bytes:
    entries = [
        struct.pack(
            "<HHIQ12xI8xQ", PTX if ptx else 2, 257, 64, 40, capability, SPECIFIC if specific else 0
        ).ljust(64 + 40, b"\0")
        for capability, ptx, specific in codes
    ]
    content = b"".join(entries)
    return struct.pack("<IHHQ", MARK, 1, 16, len(content)) + content + bytes(8)  # padding behind it
