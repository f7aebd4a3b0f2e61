"""The tests for a GPU are collected where no more is installed than docs/guides/first-hour.md says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.steps import tests

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guides" / "first-hour.md"
# What the development environment has in the place of what is installed for a GPU.
IN_PLACE_OF = {"onnxruntime-gpu": "onnxruntime", "tensorrt": "tensorrt-cu13-bindings"}
EVERYWHERE = {"pip", "setuptools", "xl-export"}
MARKED = "mark" + ".gpu"  # in two parts, so that this file is none of those that it looks for


def documented() -> list[Requirement]:
    """What the first line of the guide installs, with this project as what it depends on."""
    line = next(line for line in GUIDE.read_text("utf-8").splitlines() if line.startswith("$ pip install"))
    project, *others = shlex.split(line)[3:]
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = re.fullmatch(r"\.\[(.+)\]", project)
    assert extras is not None, line
    lists = [facts["dependencies"], *(facts["optional-dependencies"][name] for name in extras[1].split(","))]
    return [Requirement(text) for text in [*others, *(text for each in lists for text in each)]]


def installed_by(requirements: list[Requirement]) -> set[str]:
    """The names of all that these requirements bring, themselves included, as far as it is installed here."""
    found, todo = set(EVERYWHERE), list(requirements)
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        name = canonicalize_name(IN_PLACE_OF.get(name, name))
        extras = ("", *asked.extras)
        if name in found or (asked.marker and not any(asked.marker.evaluate({"extra": e}) for e in extras)):
            continue
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for each in map(Requirement, needed):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                todo.append(each)
    return found


def missing_modules() -> list[str]:
    """The modules of the development environment that the documented installation does not bring."""
    brought = installed_by(documented())
    return sorted(
        module
        for module, names in metadata.packages_distributions().items()
        if not any(canonicalize_name(name) in brought for name in names)
    )


def collected(folder: Path, words: list[str], missing: list[str]) -> subprocess.CompletedProcess[str]:
    """What pytest says of these words where these modules are not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({missing!r}))\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(folder), str(ROOT)))
    if missing:  # plugins of pytest are among them
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", *words, "--collect-only", "-q", "-q"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_every_test_for_a_gpu_is_collected_with_the_documented_packages_alone(tmp_path: Path) -> None:
    missing = missing_modules()
    assert {"hypothesis", "pytest_timeout", "httpx", "yaml", "matplotlib"} <= set(missing)
    assert not {"torch", "onnx", "onnxruntime", "triton", "pytest", "numpy"} & set(missing)
    done = collected(tmp_path, tests.words_of(ROOT, tmp_path / "base"), missing)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if MARKED in path.read_text("utf-8")
    }
    assert len(marked) > 4
    assert names == marked, done.stdout[-3000:]


def test_a_file_that_cannot_be_imported_is_a_failure_and_ends_no_other(
    record: Record, tmp_path: Path
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    marked = f"import pytest\n\n\n@pytest.{MARKED}\ndef test_right():\n    pass\n"
    (folder / "test_right.py").write_text(marked)
    (folder / "test_wrong.py").write_text("import a_package_that_nobody_has\n" + marked)
    (folder / "test_other.py").write_text("import a_package_that_nobody_has\n")
    reporter = tests.Reporter(record)
    words = [*tests.words_of(tmp_path, tmp_path / "base"), "-c", os.devnull, "--rootdir", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        reporter.finish(int(pytest.main(words, plugins=[reporter])))
    names = [(check.name, check.passed) for check in record.result.checks]
    assert names == [("tests/test_wrong.py", False), ("tests on the GPU", False)]
    assert "a_package_that_nobody_has" in record.result.checks[0].sentence
    assert record.result.sentence == "1 passed, 1 failed, 0 skipped of the tests that need a GPU"


@pytest.mark.slow  # it imports every file of the tests
def test_no_test_for_a_gpu_is_left_out(tmp_path: Path) -> None:
    usual = ["tests", "-m", "gpu", "-v", "-W", "default", "--continue-on-collection-errors"]
    chosen = tests.words_of(ROOT, tmp_path / "base")
    every, few = (collected(tmp_path, words, []) for words in (usual, chosen))
    found = [sorted(line for line in done.stdout.splitlines() if "::" in line) for done in (every, few)]
    assert found[0] == found[1]
    assert len(found[0]) > 50
