"""The line of code that a message about a trace names."""

from __future__ import annotations

import re
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import pytest

from xl_export.tracing import refusal

OURS, CALLER, USER, HELPER, TORCH, PACKAGE = (
    FrameSummary(path, 7, name, line=path.rpartition("/")[2])
    for path, name in (
        (f"{refusal.HERE}/module.py", "__call__"),
        ("/home/user/main.py", "<module>"),
        ("/home/user/net.py", "step"),
        (refusal.RING, "ring_write"),
        ("/lib/site-packages/torch/nn/modules/rnn.py", "forward"),
        ("/lib/site-packages/transformers/mamba.py", "forward"),
    )
)
CHECK = FrameSummary("/lib/site-packages/torch/functional.py", 7, "check", line="functional.py")


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([CALLER, OURS, USER], "`net.py` (/home/user/net.py:7, your code)"),
        ([CALLER, OURS, USER, HELPER], "`net.py` (/home/user/net.py:7, your code)"),
        ([CALLER, OURS, USER, TORCH, CHECK], "`net.py` (/home/user/net.py:7, your code)"),
        ([CALLER, OURS, USER, PACKAGE, CHECK], f"`mamba.py` ({PACKAGE.filename}:7, transformers)"),
        ([CALLER, OURS, TORCH, CHECK], f"`rnn.py` ({TORCH.filename}:7, torch)"),
        ([CALLER, OURS, CHECK], ""),
        ([CALLER, OURS], ""),
    ],
)
def test_the_innermost_line_of_the_module_is_named(frames: list[FrameSummary], line: str) -> None:
    assert refusal.code_of(frames) == line


class GuardOnDataDependentError(Exception):
    """As PyTorch raises it."""


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (
            "assert (\n    value(\n    )\n), 'no'",
            r"`assert value\(\), 'no'` .*, your code\) asserts .*remove it, or run python -O",
        ),
        ("if (\n    value()\n): pass", r"`value\(\)` .*, your code\) depends on the values .*torch.where"),
    ],
)
def test_an_assert_on_values_is_explained_as_one(code: str, advice: str, tmp_path: Path) -> None:
    def value() -> Any:
        raise GuardOnDataDependentError

    path = tmp_path / "net.py"
    path.write_text(code)
    with pytest.raises(GuardOnDataDependentError) as caught:
        exec(compile(code, path, "exec"), {"value": value})
    caught.value.__traceback__ = caught.tb.tb_next
    innermost = caught.value.__traceback__
    assert innermost is not None
    innermost.tb_next = None  # as if PyTorch's own code had raised it
    assert re.search(advice, refusal.why(caught.value, [], None))  # type: ignore[arg-type]
