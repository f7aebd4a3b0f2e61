"""Which package may import which: lower layers never import higher ones, and there are no cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("runtimes", "trainer", "xl_export", "benchmarks")  # from the lowest to the highest
# The rooms of a folder in levels, from the lowest to the highest. Rooms of one level do not import each
# other, but for the pairs in NEIGHBOURS. Files beside the rooms, such as `runtimes/__init__.py`, stand above
# all rooms of their folder.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "runtimes": (("base",), ("contract",), ("sessions",), ("tasks",), ("cli",)),
    "trainer": (("model",), ("run",), ("data",), ("training",)),
    "xl_export": (
        ("graph", "importers", "plots"),
        ("tracing",),
        ("adapters",),
        ("artefact", "tensorrt"),
        ("deployment", "web", "serve", "offline", "demo"),
        ("cli",),
    ),
    "xl_export.serve": (("core",), ("streams",), ("http",)),
    "xl_export.serve.http": (("base",), ("openai",), ("streams",)),
}
# Graphs for TensorRT are graphs: the exporter of an artefact writes them too.
# The page of a server has the style and the colours of the page of a site.
NEIGHBOURS = {("xl_export.artefact", "xl_export.tensorrt"), ("xl_export.serve", "xl_export.web")}
# These modules import nothing of the project, so that every other module may import them.
ALONE = ("xl_export.shadow",)
MAX_COLUMNS = 110


def modules() -> dict[str, Path]:
    """Every module of the four packages by its dotted name."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str, known: Mapping[str, object], own: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each module in `known` that a source imports: in functions and under
    TYPE_CHECKING, too.
    """
    for node in ast.walk(ast.parse(source)):
        names: Sequence[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{own}, line {node.lineno}: imports are absolute here"
            # `from package import module` imports the module; `from module import name` the module itself.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else str(node.module) for name in inside]
        yield from ((node.lineno, name) for name in names if name in known and name != own)


def upward(importer: str, imported: str) -> bool:
    """Whether an import goes from a lower folder or room to a higher one, or between rooms of one level."""
    if imported in ALONE:
        return False
    folders = importer.partition(".")[0], imported.partition(".")[0]
    if folders[0] != folders[1]:
        return FOLDERS.index(folders[0]) < FOLDERS.index(folders[1])
    folder = folders[0]
    while folder in ROOMS:  # the innermost folder that has both decides by the rooms in it
        rooms = _inside(importer, folder), _inside(imported, folder)
        if rooms[0] != rooms[1]:
            levels = _level(folder, rooms[0]), _level(folder, rooms[1])
            neighbours = (f"{folder}.{rooms[0]}", f"{folder}.{rooms[1]}") in NEIGHBOURS
            same = levels[0] == levels[1] < len(ROOMS[folder])
            return levels[0] < levels[1] or (same and not neighbours)
        folder = f"{folder}.{rooms[0]}"
    return False


def _inside(module: str, folder: str) -> str:
    """The room or the file of a folder that a module is in; empty for the folder itself."""
    return module.removeprefix(folder).removeprefix(".").partition(".")[0]


def _level(folder: str, room: str) -> int:
    levels = ROOMS[folder]
    return next((number for number, level in enumerate(levels) if room in level), len(levels))


def circle(graph: Mapping[str, Sequence[str]]) -> list[str]:
    """The modules of one import circle in order, the first again at the end; empty where there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in graph[name]:
                if found := visit(other, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in graph if (found := visit(name, []))), [])


@pytest.fixture(scope="module")
def graph() -> dict[str, list[tuple[int, str]]]:
    known = modules()
    return {
        name: list(imports(path.read_text(encoding="utf-8"), known, name)) for name, path in known.items()
    }


def test_no_import_goes_up(graph: dict[str, list[tuple[int, str]]]) -> None:
    found = [
        f"{name}, line {line}: {other}"
        for name, edges in graph.items()
        for line, other in edges
        if upward(name, other)
    ]
    assert found == []


def test_what_everybody_may_import_imports_nothing_of_the_project(
    graph: dict[str, list[tuple[int, str]]],
) -> None:
    assert {name: graph[name] for name in ALONE} == {name: [] for name in ALONE}


def test_no_imports_go_in_a_circle(graph: dict[str, list[tuple[int, str]]]) -> None:
    assert circle({name: [other for _, other in edges] for name, edges in graph.items()}) == []


def test_every_room_is_known() -> None:
    rooms = {
        f"{folder}.{path.name}"
        for folder in ROOMS
        for path in (ROOT / folder.replace(".", "/")).iterdir()
        if (path / "__init__.py").is_file()
    }
    assert rooms == {
        f"{folder}.{room}" for folder, levels in ROOMS.items() for level in levels for room in level
    }


def test_no_line_of_the_web_is_too_long_to_read() -> None:
    """Ruff sees to Python, and clang-format to C++."""
    files = [
        path
        for folder in ("web/page", "web/src", "web/test")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".js", ".css", ".html")
    ]
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*files, ROOT / "web" / "index.d.ts"]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > MAX_COLUMNS
    ]
    assert len(files) > 50, "the folders are where the test looks"
    assert long == []
