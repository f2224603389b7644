"""Load, from a checkout, the two packages that install below chunkc but lie beside its folder there.

    checkout                     installed
    chunkc/                      chunkc/
    passes/                      chunkc/passes/
    triton_kernels/              chunkc/triton_kernels/

No name becomes importable at top level. An installation (also an editable one) finds the packages by itself: nothing is
loaded here then.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

PACKAGE: Final = "chunkc"
BESIDE: Final = ("passes", "triton_kernels")


def load_beside(package: str, names: tuple[str, ...], root: Path) -> None:
    """Load the packages ``names`` as parts of ``package`` from the checkout ``root``, unless found.

    Raises:
        ImportError: where one is missing and ``root`` is no checkout that has it.
    """
    for name in names:
        full_name = f"{package}.{name}"
        if importlib.util.find_spec(full_name) is None:
            setattr(sys.modules[package], name, _load(full_name, root))


def _load(full_name: str, root: Path) -> ModuleType:
    is_checkout = (root / "pyproject.toml").is_file()  # site-packages may have a triton_kernels of somebody else
    spec = PathFinder.find_spec(full_name, [str(root)]) if is_checkout else None
    if spec is None or spec.loader is None:
        raise ImportError(f"{full_name} is missing, and {root} is no checkout that has it: reinstall", name=full_name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full_name]
        raise
    return module


load_beside(PACKAGE, BESIDE, Path(__file__).resolve().parent.parent)
