"""The page of the trained models in the documentation site."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runtimes.base.errors import UserError
from xl_export.web import site
from xl_export.web.packages import UnreachableError


@pytest.fixture
def hooks() -> ModuleType:
    place = Path(__file__).parents[2] / "docs" / "hooks.py"
    spec = importlib.util.spec_from_file_location("hooks", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_demo(hooks: ModuleType, folder: Path) -> None:
    hooks.write_demo({"site_dir": str(folder)})


def test_the_demo_lists_both_models(
    hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "copy_package", lambda *given, **_: given[2].mkdir(exist_ok=True))
    monkeypatch.setattr(site, "_refuse_failing", lambda _: None)  # their checks are tests of their own
    write_demo(hooks, tmp_path)
    listed = json.loads((tmp_path / "demo" / "site.json").read_text())
    assert [model["name"] for model in listed["models"]] == ["tales", "chorales"]


def test_only_a_missing_network_leaves_the_demo_out(
    hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: UserError) -> Any:
        def write_site(*_: Any, **__: Any) -> None:
            raise error

        return write_site

    monkeypatch.setattr(site, "write_site", failing(UserError("the model is damaged; export it again.")))
    with pytest.raises(UserError, match="damaged"):
        write_demo(hooks, tmp_path)
    monkeypatch.setattr(site, "write_site", failing(UnreachableError("there is no network; connect to one.")))
    monkeypatch.delenv(hooks.REQUIRED, raising=False)
    write_demo(hooks, tmp_path)
    assert "has no demo: there is no network" in capsys.readouterr().err
    monkeypatch.setenv(hooks.REQUIRED, "1")
    with pytest.raises(UserError, match="no network"):
        write_demo(hooks, tmp_path)


def test_only_a_site_with_the_demo_links_to_it(hooks: ModuleType, tmp_path: Path) -> None:
    page = SimpleNamespace(url="guides/web/", file=SimpleNamespace(src_uri="guides/web.md"), meta={})
    text = (Path(hooks.TOP) / "docs" / page.file.src_uri).read_text("utf-8")
    config = {"site_dir": str(tmp_path)}
    assert hooks.DEMO_MARK in text
    assert "href=" not in hooks.on_page_markdown(text, page=page, config=config)
    (tmp_path / "demo").mkdir()
    assert '<a href="../../demo/">' in hooks.on_page_markdown(text, page=page, config=config)


def test_a_link_to_an_example_leads_to_its_page(hooks: ModuleType, tmp_path: Path) -> None:
    files = [SimpleNamespace(src_uri=f"source/examples/{name}") for name in ("a.py.md", "b/README.md")]
    text = "[a](../../examples/a.py) [b](../../examples/b/README.md#c) [d](../../examples/d.py) [e](e.md)"

    def shown(uri: str, text: str) -> str:
        page = SimpleNamespace(url="x/", file=SimpleNamespace(src_uri=uri), meta={})
        return str(hooks.on_page_markdown(text, page=page, config={"site_dir": str(tmp_path)}, files=files))

    guide = "[a](../source/examples/a.py.md) [b](../source/examples/b/README.md#c) `examples/d.py` [e](e.md)"
    assert shown("guides/x.md", text) == guide
    example = shown("source/examples/b/README.md", "[a](../a.py) [c](#c) [text](../../docs/guides/text.md)")
    assert example == "[a](../a.py.md) [c](#c) [text](../../../guides/text.md)"
