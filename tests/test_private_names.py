"""Tests use no private name of the package, except in the files that are listed here."""

import ast
from collections.abc import Iterator

from package_imports import MODULES, ROOT

MAY_USE = {
    "_torch_compat/test_cuda.py": "a double stands for those names of torch that the module asks for",
    "_torch_compat/test_inductor.py": "patches of Inductor are tested one by one, without a compilation",
    "acceptance/test_accumulation.py": "a mutant forgets gradients between two parts of a backward",
    "acceptance/test_interrupts.py": "a mutant leaves the counts of one optimizer behind its values",
    "acceptance/test_scaled_steps.py": "mutants multiply gradients by wrong factors where all factors meet",
    "runtime/devices/test_cuda.py": "the double of CUDA notes streams by number, which must be told apart",
    "runtime/devices/test_cuda_order.py": "mutants leave out waits between two streams",
    "runtime/devices/test_cuda_streams.py": "the double of CUDA notes streams by number, which must be told apart",
    "runtime/model/test_device_placement.py": "fake insides of a parameter are traced, never dispatched to its filling",
    "runtime/storage/test_transaction.py": "no caller is interrupted at a time that a test can choose",
    "runtime/update/test_cpu_update_kernel.py": "the two ways of one update are compared, of which a machine takes one",
    "support/distributed/rank_replicas.py": "a mutant cuts off one dimension of the mesh; groups must be let go of",
    "support/distributed/rank_steady.py": "what process groups send is counted at the process group",
    "support/distributed/rank_windows.py": "programs are noted where they are launched",
}
"""File below tests -> why it cannot do without."""
LIBRARIES_NAME = {
    "_buffers",
    "_compiled_call_impl",
    "_get_grad_norm",
    "_is_view",
    "_load_scaler",
    "_repr_html_",
    "_save_optimizer_and_scheduler",
}
"""Names that torch, transformers and IPython have too."""
PATCHING = {"setattr", "delattr", "getattr", "hasattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in ("_", "_checkout", "_torch_compat")


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def is_of_super(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "super"


def defined_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def used_in(tree: ast.Module, package_names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each attribute, import and patch by which a test reaches a private name of the package."""
    others = package_names - set(defined_in(tree))
    for node in ast.walk(tree):
        names = list[str]()
        if isinstance(node, ast.Attribute) and not is_of_self(node):
            names = [node.attr] if node.attr in (package_names if is_of_super(node) else others) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "chunkc":
            names = [part for alias in node.names for part in f"{node.module}.{alias.name}".split(".")]
        elif isinstance(node, ast.Import):
            names = [p for alias in node.names if alias.name.startswith("chunkc.") for p in alias.name.split(".")]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in PATCHING:
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names = [part for text in texts for part in text.split(".") if part in others]
        yield from ((node.lineno, name) for name in names if is_private(name))


def test_tests_need_no_private_name_except_in_files_with_a_reason() -> None:
    defined = {name for source in MODULES.values() for name in defined_in(ast.parse(source)) if is_private(name)}
    paths = {str(path.relative_to(ROOT / "tests")): path for path in sorted((ROOT / "tests").rglob("*.py"))}
    used = {
        name: found
        for name, path in paths.items()
        if (found := list(used_in(ast.parse(path.read_text(encoding="utf-8")), defined - LIBRARIES_NAME)))
    }
    assert {name: found for name, found in used.items() if name not in MAY_USE} == {}
    assert set(MAY_USE) <= set(used), "these need no entry any more"
