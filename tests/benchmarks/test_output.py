"""Where results go: the history never into an installed package, --csv and --plot over no other file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import Result

from benchmarks import machine
from benchmarks.machine import checkout, commit, history_folder
from tests.benchmarks.shown import call

ROOT = Path(__file__).parent.parent.parent


def measure(*arguments: object) -> Result:
    return call("run", "decode", "--config", "tiny", "--threads", "1", *arguments)


def test_in_a_checkout_the_history_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (ROOT, ROOT / "docs"):
        monkeypatch.chdir(folder)
        assert history_folder() == ROOT / "benchmarks" / "history"


def test_outside_a_checkout_the_history_is_local(
    instant: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = measure()
    assert result.exit_code == 0, result.output
    file = Path("benchmark-history") / "decode.jsonl"
    assert f"appended to {file}\n" in result.stdout
    assert len((tmp_path / file).read_text(encoding="utf-8").splitlines()) == 1
    compared = call("compare", "2", "2", "--json")
    assert "neither a file nor a commit or date with results in benchmark-history" in compared.stderr


def test_an_installed_package_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment often lies in the checkout of another project, whose commit says nothing here."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n', encoding="utf-8")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "benchmarks" / "machine.py"))
    assert (checkout(), commit(), history_folder()) == (None, None, Path("benchmark-history"))


def test_measurements_alone_are_no_change_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measurement adds to the history, and the next one is of the same code."""
    (tmp_path / "benchmarks/history").mkdir(parents=True)
    for name in ("code.py", "benchmarks/history/serve.jsonl"):
        (tmp_path / name).write_text("1\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for arguments in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "a")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr("benchmarks.machine.checkout", lambda: tmp_path)
    clean = commit()
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "benchmarks/history/serve.jsonl").write_text("1\n2\n")
    assert commit() == clean
    (tmp_path / "code.py").write_text("2\n")
    assert commit() == f"{clean}+"


@pytest.mark.parametrize(("option", "name"), [("--csv", "rows.csv"), ("--plot", "decode.png")])
def test_a_file_is_replaced_only_with_force(option: str, name: str, instant: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, history = tmp_path / name, tmp_path / "history.jsonl"
    file.write_text("mine")
    result = measure("--history", history, option, file)
    assert result.exit_code == 2
    assert file.read_text() == "mine"
    assert not history.exists()
    assert measure("--history", history, option, file, "--force").exit_code == 0
    assert file.read_bytes() != b"mine"
