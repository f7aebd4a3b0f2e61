"""Faults put into the kernels' PTX are found by executing it (`tests/ptx`)."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import pytest

from tests.ptx.driver import EmulatedDriver
from tests.ptx.program import Program
from tests.xl_export.tensorrt.kernels.test_emulated import MIDDLE, check
from xl_export.tensorrt.kernels.cases import Case
from xl_export.tensorrt.kernels.compile import Kernel, Tactic, tactics

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("compiled_once", "short_parts")
SEGMENT = next(t for t in tactics(16, 90) if t.block_t == 64)
TOKEN = tactics(16, 90)[0]
# Its last queries are fewer than a tile.
SHORT = dataclasses.replace(MIDDLE, T=41)


@dataclass(frozen=True)
class Fault:
    """A text that replaces a pattern in PTX. found: the start of the message by which it is found."""

    pattern: str
    text: str
    found: str
    tactic: Tactic = SEGMENT
    case: Case = MIDDLE


FAULTS = {
    "no-barrier": Fault(r"(cp\.async\.wait_group\s+0;\s+)bar\.sync\s+0;", r"\1", "a race"),
    "no-wait-for-products": Fault(
        r"wgmma\.wait_group\.sync\.aligned 0;", "", r"%r\d+.* is used by a product"
    ),
    "no-wait-for-copies": Fault(r"cp\.async\.wait_group\s+0;", "", "a byte that nothing has written"),
    "no-fence-of-memory": Fault(r"fence\.proxy\.async\.shared::cta;", "", "a product reads shared"),
    "no-fence-of-registers": Fault(r"wgmma\.fence\.sync\.aligned;", "", r"%r\d+ was written after"),
    "store-without-mask": Fault(
        r"@%p\d+ (st\.global)", r"\1", "(an access outside|several threads)", case=SHORT
    ),
    "register-not-set": Fault(r"mov\.b32\s+%r\d+, 0f00000000;", "", r"%r\d+ is undefined", TOKEN),
}
BY_DEFAULT = ("no-barrier",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAULTS]
)
def test_a_fault_in_a_kernel_is_found(name: str) -> None:
    fault = FAULTS[name]

    class Faulty(EmulatedDriver):
        def load(self, kernel: Kernel) -> Program:
            if kernel.name != "join_parts":
                ptx, count = re.subn(fault.pattern, fault.text, kernel.ptx)
                assert count
                kernel = dataclasses.replace(kernel, ptx=ptx)
            return super().load(kernel)

    with pytest.raises(AssertionError) as raised:
        check(fault.case, fault.tactic, 90, driver=Faulty)
    assert re.match(fault.found, str(raised.value)), raised.value
