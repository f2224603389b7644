"""The folders of the package: packaged, small, listed, without circles; docstrings that begin with a short line."""

import ast
import tomllib
from graphlib import TopologicalSorter

from package_imports import FOLDERS, MODULES, ROOT, imports_of

MAX_LINES = 400
MAX_FIRST_LINE = 100
MAX_MODULES = 20
MAX_ROOT_MODULES = 8
MAX_ROOMS = 26
MAX_FLOORS = 11


def test_every_folder_is_packaged() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert set(setup["packages"]) == packages
    assert setup["package-dir"] == {FOLDERS[f]: f for f in FOLDERS if (ROOT / f).is_dir() and FOLDERS[f] in packages}


def rooms() -> dict[str, set[str]]:
    """The folders of the package, and the folders that each imports from, by the name of the package."""
    folders = {module for module in MODULES if any(other.startswith(f"{module}.") for other in MODULES)}
    found: dict[str, set[str]] = {folder: set() for folder in folders - {"chunkc"}}
    for module in MODULES:
        room = module if module in found else module.rpartition(".")[0]
        targets = [f.target for f in imports_of(module, MODULES) if f.target in MODULES and room in found]
        for target in targets:
            other = target if target in found else target.rpartition(".")[0]
            found[room].update({other} & found.keys() - {room})
    return found


def test_rooms_are_small_and_know_each_other_in_one_direction() -> None:
    """A module of a folder inside another may be read by both, so those two count as one."""
    outer = {room: room.rpartition(".")[0] for room in rooms()}
    graph = {room: {o for o in others if outer[o] != room and outer[room] != o} for room, others in rooms().items()}
    floors: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        floors[room] = 1 + max((floors[other] for other in graph[room]), default=0)
    assert max(floors.values()) <= MAX_FLOORS, sorted(floors.items(), key=lambda item: item[1])
    sizes = {room: sum(m.rpartition(".")[0] == room for m in MODULES) for room in graph}
    assert {room: size for room, size in sizes.items() if size > MAX_MODULES} == {}
    assert sum(size > 0 and not sizes.get(outer[room]) for room, size in sizes.items()) <= MAX_ROOMS
    assert sum(path.suffix == ".py" for path in (ROOT / "chunkc").iterdir()) <= MAX_ROOT_MODULES


def test_contributing_lists_every_room_with_what_it_is_for() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    docs = {room: (ast.get_docstring(ast.parse(MODULES[room])) or "").splitlines()[0] for room in rooms()}
    table = [f"| `{room.removeprefix('chunkc.').replace('.', '/')}` | {docs[room]} |" for room in sorted(docs)]
    assert [line for line in text.splitlines() if line.startswith("| `")] == table, "\n".join(table)


def test_docstrings_begin_with_a_short_line() -> None:
    """A verb and its object, or a noun phrase: what a reader sees of a module in a list."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = [
        (module, (ast.get_docstring(node) or "").partition("\n")[0])
        for module, source in MODULES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds)
    ]
    assert [found for found in firsts if len(found[1]) > MAX_FIRST_LINE or found[1].startswith("What ")] == []


def test_files_are_short() -> None:
    folders = (*FOLDERS, "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}
