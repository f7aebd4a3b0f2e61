"""Faults put into the kernels' PTX or source are found by executing them (`tests/ptx`)."""

from __future__ import annotations

import dataclasses
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.ptx.driver import EmulatedDriver
from tests.ptx.program import Program
from tests.xl_export.tensorrt.kernels.test_emulated import MIDDLE, RING, check
from xl_export.tensorrt import kernels
from xl_export.tensorrt.kernels import compile as module
from xl_export.tensorrt.kernels.cases import Case
from xl_export.tensorrt.kernels.compile import Kernel, Tactic, tactics

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("compiled_once")
SEGMENT = next(t for t in tactics(16, 90) if t.block_t == 64)
LARGE = next(t for t in tactics(16, 90) if t.block_t == 128)
TOKEN = tactics(16, 90)[0]
# Its last queries are fewer than a tile.
SHORT = dataclasses.replace(MIDDLE, T=41)


@dataclass(frozen=True)
class Fault:
    """Texts that replace patterns in PTX, or other texts in a source file of the kernels. found: the start of
    the message by which it is found; by default, that of a comparison with the naive operator.
    """

    where: Literal["ptx", "common.py", "segment.py", "token.py", "skew.py", "join.py"]
    changes: dict[str, str]
    found: str = "assert"
    tactic: Tactic = SEGMENT
    case: Case = MIDDLE


FAULTS = {
    "no-barrier": Fault("ptx", {r"(cp\.async\.wait_group\s+0;\s+)bar\.sync\s+0;": r"\1"}, "a race"),
    "no-wait-for-products": Fault(
        "ptx", {r"wgmma\.wait_group\.sync\.aligned 0;": ""}, r"%r\d+.* is used by a product"
    ),
    "no-wait-for-copies": Fault(
        "ptx", {r"cp\.async\.wait_group\s+0;": ""}, "a byte that nothing has written"
    ),
    "no-fence-of-memory": Fault("ptx", {r"fence\.proxy\.async\.shared::cta;": ""}, "a product reads shared"),
    "no-fence-of-registers": Fault("ptx", {r"wgmma\.fence\.sync\.aligned;": ""}, r"%r\d+ was written after"),
    "store-without-mask": Fault(
        "ptx", {r"@%p\d+ (st\.global)": r"\1"}, "(an access outside|several threads)", case=SHORT
    ),
    "register-not-set": Fault("ptx", {r"mov\.b32\s+%r\d+, 0f00000000;": ""}, r"%r\d+ is undefined", TOKEN),
    "row-beyond-the-table": Fault(
        "common.py",
        {"0), rows - 1)": "0), rows)"},
        "an access outside",
        TOKEN,
        dataclasses.replace(MIDDLE, R=60),
    ),
    "ring-not-wrapped": Fault(
        "common.py",
        {"place < 0, place + J, place": "place < 0, place, place"},
        "an access outside",
        TOKEN,
        RING,
    ),
    "one-key-too-many": Fault("segment.py", {"< count[:, None]": "<= count[:, None]"}),
    "lowest-value-that-rounds": Fault(
        "segment.py",
        {
            "tl.full([BLOCK_T], LOWEST, tl.float32)": "tl.full([BLOCK_T], -1.0e30, tl.float32)",
            "tl.max(scores, axis=1) * LOG2E": "tl.max(scores, axis=1)",
            "tl.exp2(highest - peak)": "tl.exp2(highest * LOG2E - peak * LOG2E)",
            "scores * LOG2E - peak[:, None]": "scores * LOG2E - (peak * LOG2E)[:, None]",
            "level_of(highest, total)": "level_of(highest * LOG2E, total)",
        },
        tactic=LARGE,
    ),
    "column-of-another-thread": Fault("skew.py", {"(c - ways[0]) & 3": "(c + ways[0]) & 3"}),
    "part-that-is-none": Fault(
        "join.py", {"(part + j < parts)": "(part + j < parts + 1)"}, "a byte that nothing has written"
    ),
}
BY_DEFAULT = ("no-barrier", "no-wait-for-products")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_in_a_kernel_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]

    class Faulty(EmulatedDriver):
        def load(self, kernel: Kernel) -> Program:
            if fault.where == "ptx" and kernel.name != "join_parts":
                ((old, new),) = fault.changes.items()
                ptx, count = re.subn(old, new, kernel.ptx)
                assert count
                kernel = dataclasses.replace(kernel, ptx=ptx)
            return super().load(kernel)

    if fault.where != "ptx":
        use_source(fault, tmp_path, monkeypatch)
    with pytest.raises(AssertionError) as raised:
        check(fault.case, fault.tactic, 90, driver=Faulty)
    assert re.match(fault.found, str(raised.value)), raised.value


def use_source(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets kernels be compiled from a copy of their source with the fault."""
    package = folder / "faulty"
    package.mkdir()
    original = Path(kernels.__file__).parent
    for name in ("common.py", "segment.py", "token.py", "skew.py", "join.py"):
        source = (original / name).read_text()
        for old, new in fault.changes.items() if name == fault.where else ():
            assert source.count(old) == 1
            source = source.replace(old, new)
        (package / name).write_text(source.replace(kernels.__name__, package.name))
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        monkeypatch.delitem(sys.modules, name)

    def function(name: str) -> Any:
        return getattr(import_module(f"{package.name}.{name.partition('_')[0]}"), name)

    monkeypatch.setattr(module, "kernel_function", function)
