"""Modules of the package as text, and what each of them imports."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]

# Folder -> package it installs as.
FOLDERS = {"chunkc": "chunkc", "passes": "chunkc.passes", "triton_kernels": "chunkc.triton_kernels"}


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    at_import: bool


def read_modules() -> dict[str, str]:
    modules = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join([package, *parts]).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return modules


MODULES = read_modules()


def imports_of(module: str, modules: Mapping[str, str]) -> Iterator[Import]:
    """All imports of a module; ``from package import name`` counts as the submodule where there is one."""
    is_package = any(other.startswith(f"{module}.") for other in modules)
    for node, at_import in _walk(ast.parse(modules[module]), True):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
            base = ".".join([*parents, node.module or ""]).strip(".") if node.level else str(node.module)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                foreign = base.split(".")[0] not in ("chunkc", *FOLDERS)
                yield Import(name if foreign or name in modules else base, node.lineno, at_import)


def _walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, at_import
    lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, at_import and not lazy and not typing_only)
