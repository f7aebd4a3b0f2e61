"""Run where a wheel is installed: exits with an error unless its libraries serve this processor.

It needs nothing of the tests, so that a release can run it on each machine (`[tool.cibuildwheel]`).
"""

from __future__ import annotations

import platform
import sys

import onnxruntime

from runtimes.sessions import fused_cpu
from runtimes.sessions.fused_cpu.library import LIBRARIES, packaged
from runtimes.sessions.fused_cpu.variants import VARIANTS, features

best = None
for variant in VARIANTS[platform.machine()]:
    assert (LIBRARIES / variant.file).is_file(), f"the wheel lacks {variant.file}"
    if features().issuperset(variant.features):
        best = variant
        onnxruntime.SessionOptions().register_custom_ops_library(str(LIBRARIES / variant.file))
if best is None:
    sys.exit("no library of the wheel serves this processor")
assert packaged() == LIBRARIES.resolve() / best.file, (packaged(), fused_cpu.ignored())
print(f"the wheel holds the fused operator for {best.name}")
