"""What an error says that pip should install."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, metadata

import pytest

from runtimes.base import extras

METADATA = [
    "numpy>=1.26",
    'onnxruntime>=1.25; python_version >= "3.11" and extra == "cpu"',
    'onnxruntime>=1.23; python_version < "3.11" and extra == "cpu"',
    "starlette>=0.46; extra == 'serve'",
    'uvloop>=0.21; sys_platform != "win32" and extra == "serve"',
    'genai; (sys_platform == "linux" and platform_machine == "riscv") and extra == "serve"',
    'ray[data]>=2.60; extra == "all"',
    'xl-export[cpu,serve]; extra == "all"',
]


@pytest.mark.parametrize(
    ("wanted", "absent", "expected"),
    [
        ("cpu", ["onnxruntime"], "`pip install 'onnxruntime>=1.25'`"),
        ("serve", ["starlette"], "`pip install 'starlette>=0.46'`"),
        ("cpu,serve", ["uvloop", "onnxruntime"], "`pip install 'onnxruntime>=1.25' 'uvloop>=0.21'`"),
        ("all", ["ray", "uvloop"], "`pip install 'ray[data]>=2.60' 'uvloop>=0.21'`"),
        ("serve", [], "`pip install -U 'starlette>=0.46' 'uvloop>=0.21'`"),  # one of them is broken
    ],
)
def test_only_missing_packages_are_named(
    wanted: str, absent: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "requires", lambda name: METADATA)
    monkeypatch.setattr(sys, "version_info", (3, 11))
    for module in ("onnxruntime", "starlette", "uvloop", "ray"):
        monkeypatch.setitem(sys.modules, module, None if module in absent else sys)
    assert extras.command(wanted) == expected


def test_a_checkout_without_metadata_is_installed_with_its_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", unknown)
    assert extras.command("cpu,export") == "`pip install '.[cpu,export]'` in the checkout of xl-export"


def test_every_extra_of_ours_is_understood() -> None:
    extras_of_ours = metadata("xl-export").get_all("Provides-Extra")
    assert {"cpu", "serve", "dev"} <= set(extras_of_ours)
    for extra in extras_of_ours:
        names = [extras.name_of(line) for line in extras.requirements(extra)]
        assert all(name.replace("-", "").isalnum() for name in names), names
    assert len(list(extras.requirements("cpu"))) == 1  # of two, one for each Python
    assert {"onnxruntime", "torch", "onnx"} <= {extras.name_of(line) for line in extras.requirements("demo")}
