"""What a compiled kernel needs of a GPU: registers, spilled bytes, shared memory, and how often its warps
wait for each other, from the machine code that NVIDIA's assembler makes from the PTX. Needs Triton and no
GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from runtimes.contract.tensors import Form
from xl_export.tensorrt.kernels.compile import (
    Kernel,
    Sizes,
    Tactic,
    compile_kernel,
    constants,
)
from xl_export.tensorrt.operator import Attributes

MEM_LEN = 1600
ATTRIBUTES = Attributes(full_mask=0, nearest=0, initial_masked=1, persistent=0)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a kernel needs: registers of each thread; bytes that each thread writes to memory for lack of
    registers; bytes of shared memory of a program; and, in the loop over tiles of keys, how often all warps
    of a program wait for each other.
    """

    registers: int
    spilled: int
    shared_bytes: int
    barriers: int


def resources(kernel: Kernel) -> Resources:
    """The resources of a compiled kernel, assembled for the GPU that its PTX names.

    Raises subprocess.CalledProcessError if the assembler refuses the PTX.
    """
    import triton

    target = re.search(r"\.target (sm_(\d+)a?)", kernel.ptx)
    assert target is not None, kernel.ptx[:200]
    tools = triton.knobs.nvidia
    assembler = tools.ptxas_blackwell if int(target[2]) >= 100 else tools.ptxas
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        code = Path(folder) / "kernel.cubin"
        source.write_text(kernel.ptx)
        report = _run(assembler.path, "-v", "--gpu-name", target[1], str(source), "-o", str(code))
        assembly = _run(tools.nvdisasm.path, "-c", str(code))
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    assert registers, report
    assert spilled, report
    loop = innermost_loop(assembly)
    return Resources(
        registers=int(registers[1]),
        spilled=int(spilled[1]),
        shared_bytes=kernel.shared_bytes,
        barriers=len(re.findall(r"\bBAR\.", loop)),
    )


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def innermost_loop(assembly: str) -> str:
    """The longest loop of a kernel's assembly that holds no other loop; empty if there is none."""
    lines = assembly.splitlines()
    at = {}
    loops = []
    for number, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x?_?\w+):", line):
            at[label[1]] = number
        back = re.search(r"\bBRA\b.*?`\((\.L_\w+)\)", line)
        # An endless loop of one instruction ends every kernel, for the instruction cache.
        if back and back[1] in at and number - at[back[1]] > 2:
            loops.append((at[back[1]], number))
    inner = [(a, b) for a, b in loops if not any((a <= c and d <= b and (c, d) != (a, b)) for c, d in loops)]
    start, stop = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    return "\n".join(lines[start:stop])


def compiled_for(compute_capability: int, tactic: Tactic, head_dim: int, form: Form = "shift") -> Kernel:
    """The kernel for 8 heads of this width, a table of 1,601 rows for each, no biases and no persistent
    vectors, in float16; over a ring with a memory of 1,600 tokens.
    """
    sizes = Sizes(
        heads=8,
        head_dim=head_dim,
        table_heads=8,
        table_rows=1601,
        bias_heads=1,
        bias_rows=1,
        persistent_rows=1,
    )
    fixed = constants(tactic, sizes, ATTRIBUTES, MEM_LEN if form == "ring" else None)
    return compile_kernel(tactic, fixed, compute_capability=compute_capability)
