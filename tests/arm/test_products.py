"""Every variant for ARM multiplies whole numbers to the same bits, on processors with its instructions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from runtimes.sessions.fused_cpu.library import FOLDER
from runtimes.sessions.fused_cpu.variants import FLAGS, VARIANTS
from tests.arm.emulator import PROCESSORS, ROOT, TOOLS

pytestmark = [pytest.mark.arm, pytest.mark.timeout(600)]
SOURCE = ROOT / "tests" / "runtimes" / "sessions" / "fused_cpu_products.cpp"


def test_all_variants_print_the_same_bits(tmp_path: Path) -> None:
    if any(shutil.which(tool) is None for tool in TOOLS):
        pytest.fail(f"the ARM tests need {' and '.join(TOOLS)}", pytrace=False)
    processors = {processor.variant: name for name, processor in PROCESSORS.items()}
    printed = {}
    for variant in VARIANTS["aarch64"]:
        program = tmp_path / variant.name
        command = [TOOLS[1], *FLAGS, *variant.flags, "-static", "-I", FOLDER, SOURCE, "-o", program]
        subprocess.run([str(word) for word in command], check=True)
        emulated = [TOOLS[0], "-cpu", processors[variant.name], program]
        printed[variant.name] = subprocess.run(
            [str(word) for word in emulated], check=True, capture_output=True, text=True
        ).stdout
    assert printed["neon"].count("\n") == 36
    assert printed["dotprod"] == printed["neon"]
    assert printed["i8mm"] == printed["neon"]
