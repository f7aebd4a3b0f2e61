"""The GPUs for which a CUDA library has code, read from the library itself."""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
SECTION = struct.Struct("<I20xQQ24x")  # of an ELF file: where its name is, where it begins, its size
# nvcc puts its code into this section: containers, each with an entry for each kind of GPU. `cuobjdump` reads
# them too.
CODE = b".nv_fatbin"
CONTAINER = struct.Struct("<I2xHQ")  # its mark, and the sizes of its header and of what follows
MARK = 0xBA55ED50
ALIGNMENT = 8  # bytes
ENTRY = struct.Struct("<H2xIQ12xI8xQ")  # its kind, the sizes of header and code, the architecture, flags
PTX = 1  # a kind
SPECIFIC = 1 << 20  # a flag: of an architecture such as 9.0a, whose code runs on no later GPU


class Code(NamedTuple):
    """Code for one kind of GPU."""

    capability: int  # such as 89
    ptx: bool  # which the driver compiles for later GPUs
    specific: bool

    def runs_on(self, capability: int) -> bool:
        """Whether a GPU of this compute capability runs the code."""
        if self.specific:
            return capability == self.capability
        same_major = capability // 10 == self.capability // 10
        return capability >= self.capability and (self.ptx or same_major)


@functools.cache
def codes_of(library: Path) -> tuple[Code, ...]:
    """The code in a library, for the oldest GPU first; empty if there is none, or it cannot be read.

    Only headers are read: 609 containers in 284 MB of ONNX Runtime 1.31.
    """
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return tuple(sorted(set(_codes(content, *_section(content)))))
    except (OSError, ValueError, LookupError, OverflowError, struct.error):  # missing, or no such file
        return ()


def _section(content: mmap.mmap) -> tuple[int, int]:
    """Where the section with the code begins, and where it ends."""
    if content[: len(ELF)] != ELF:
        raise ValueError("no ELF file")
    (first,) = struct.unpack_from("<Q", content, 40)
    size, count, of_names = struct.unpack_from("<HHH", content, 58)
    sections = [SECTION.unpack_from(content, first + number * size) for number in range(count)]
    names = sections[of_names][1]
    for name, begin, length in sections:
        if content[names + name : names + name + len(CODE) + 1] == CODE + b"\0":
            return begin, begin + length
    raise ValueError("no code for GPUs")


def _codes(content: mmap.mmap, at: int, end: int) -> Iterator[Code]:
    """The code of every entry between two places."""
    inside = at  # the end of the container that is being read
    while at < end:
        if at >= inside:
            mark, header, length = CONTAINER.unpack_from(content, at)
            if mark != MARK:  # padding
                at = inside = at + ALIGNMENT
                continue
            at += header
            inside = at + length
        else:
            kind, header, length, capability, flags = ENTRY.unpack_from(content, at)
            yield Code(capability, ptx=kind == PTX, specific=bool(flags & SPECIFIC))
            at += header + length
        if not header:
            raise ValueError("a header without a size")  # nothing would be passed over
