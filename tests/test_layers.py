"""The floors of the package, read from its imports: who may know whom, no circles, nothing private.

The table below is the architecture's: a module may import from its own group and from the groups named beside it,
anywhere in its text. Circles are looked for among imports that run when a module is imported.
"""

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from package_imports import MODULES, imports_of

BOTTOM = {"errors", "files", "progress"}
FOUNDATION = BOTTOM | {"_torch_compat", "ir", "hardware", "distributed"}
KERNELS = FOUNDATION | {"triton_kernels"}
MIDDLE = FOUNDATION | {"triton_kernels", "capture", "cost", "runtime"}
UPPER = MIDDLE | {"report", "passes", "checkpoint", "compiler", "scenarios", "baselines", "weights"}
MAY_IMPORT: Mapping[str, set[str]] = {
    "_checkout": set(),
    "errors": set(),
    "files": {"errors"},
    "progress": {"errors"},
    "ir": BOTTOM | {"ir.verify"},
    "ir.verify": BOTTOM | {"ir"},
    "hardware": BOTTOM,
    "_torch_compat": BOTTOM,
    "distributed": BOTTOM | {"_torch_compat", "hardware"},
    "triton_kernels": set(),
    "capture": BOTTOM | {"ir", "_torch_compat", "capture.attention", "capture.rewrites"},
    "capture.layers": BOTTOM | {"ir", "capture"},
    "capture.attention": BOTTOM | {"_torch_compat"},
    "capture.rewrites": BOTTOM | {"_torch_compat"},
    "cost": FOUNDATION,
    "baselines": FOUNDATION | {"cost"},
    "runtime": set(),
    "runtime.update": FOUNDATION,
    "runtime.devices": KERNELS | {"runtime.update"},
    "runtime.storage": KERNELS | {"runtime.update", "runtime.devices"},
    "runtime.params": KERNELS | {"runtime.update", "runtime.storage"},
    "runtime.execution": KERNELS | {"runtime.update", "runtime.devices", "runtime.storage"},
    "runtime.optim": KERNELS | {"runtime"},
    "runtime.model": KERNELS
    | {"runtime.update", "runtime.devices", "runtime.storage", "runtime.params", "runtime.execution"},
    "passes": BOTTOM | {"ir", "hardware", "cost", "passes.lower"},
    "passes.lower": BOTTOM | {"ir", "hardware", "cost", "passes", "_torch_compat"},
    "report": MIDDLE,
    "compiler": MIDDLE | {"passes", "report", "compiler.memory"},
    "compiler.memory": FOUNDATION | {"capture", "runtime"},
    "weights": FOUNDATION | {"runtime"},
    "checkpoint": MIDDLE | {"weights"},
    "scenarios": MIDDLE | {"compiler", "passes", "report", "scenarios.models"},
    "scenarios.models": FOUNDATION,
    "calibrate": MIDDLE | {"compiler", "report"},
    "exit_signals": {"errors"},
    "api": UPPER,
    "observability": UPPER | {"api"},
    "_public": UPPER | {"api", "exit_signals", "observability"},
    "": {"_checkout", "_public"},  # chunkc/__init__.py
    "cli": UPPER | {"api", "", "calibrate"},
    "__main__": {"cli"},
    "integrations": UPPER | {"api", ""},
}


def group_of(module: str) -> str:
    inside = module.removeprefix("chunkc").removeprefix(".")
    while inside not in MAY_IMPORT and "." in inside:
        inside = inside.rpartition(".")[0]
    return inside


def floor_faults(modules: Mapping[str, str]) -> list[str]:
    """Imports that point sideways or upwards, and modules without a floor."""
    faults = []
    for module in modules:
        group = group_of(module)
        if group not in MAY_IMPORT:
            faults.append(f"{module} has no floor: give it a row in MAY_IMPORT")
            continue
        for found in imports_of(module, modules):
            if found.target.split(".")[0] in ("passes", "triton_kernels"):
                faults.append(f"{module}:{found.line} imports {found.target}, which is chunkc.{found.target}")
            elif found.target.split(".")[0] == "chunkc":
                target = group_of(found.target)
                if target != group and not {target, target.split(".")[0]} & MAY_IMPORT[group]:
                    faults.append(f"{module}:{found.line} imports {found.target}: {group or 'chunkc'} may not")
    return faults


def circles(modules: Mapping[str, str]) -> list[str]:
    graph = {
        module: {found.target for found in imports_of(module, modules) if found.at_import and found.target in modules}
        for module in modules
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def eager_triton_faults(modules: Mapping[str, str]) -> list[str]:
    """Imports of Triton or of our kernels, outside them, that run when the module is imported."""
    heavy = ("triton", "chunkc.triton_kernels")
    return [
        f"{module}:{found.line} imports {found.target} when it is imported"
        for module in modules
        if group_of(module) != "triton_kernels"
        for found in imports_of(module, modules)
        if found.at_import and any(found.target == name or found.target.startswith(f"{name}.") for name in heavy)
    ]


def private_torch_faults(modules: Mapping[str, str]) -> list[str]:
    """Uses of ``torch._something`` outside the files that are checked against every torch version."""
    faults = []
    for module in modules:
        if module.startswith("chunkc._torch_compat") and module != "chunkc._torch_compat.distributed":
            continue
        lines = {found.line for found in imports_of(module, modules) if _is_private_torch(found.target)}
        for node in ast.walk(ast.parse(modules[module])):
            if isinstance(node, ast.Attribute) and _is_private_torch(ast.unparse(node)):
                lines.add(node.lineno)
        faults += [f"{module}:{line} uses a private torch API" for line in sorted(lines)]
    return faults


def finalizer_faults(modules: Mapping[str, str]) -> list[str]:
    """``__del__``, ``weakref.finalize`` and callbacks of weak references, outside of `Finalizer`."""
    faults = []
    for module in modules:
        if module == "chunkc._torch_compat.core":
            continue
        for node in ast.walk(ast.parse(modules[module])):
            named = isinstance(node, ast.FunctionDef) and node.name == "__del__"
            imported = isinstance(node, ast.ImportFrom) and node.module == "weakref"
            hidden = imported and {"finalize", "ref", "WeakMethod"} & {alias.name for alias in node.names}
            if named or hidden or (isinstance(node, ast.Call) and _calls_back(node)):
                faults.append(f"{module}:{node.lineno} is called when an object goes, where Dynamo may trace it")
    return faults


def _calls_back(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    num_given = len(call.args) + len(call.keywords)
    return function == "weakref.finalize" or (function in ("weakref.ref", "weakref.WeakMethod") and num_given > 1)


def _is_private_torch(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


# --- the package ------------------------------------------------------------------------------------------------------


def test_imports_point_downwards() -> None:
    assert floor_faults(MODULES) == []


def test_no_import_circles() -> None:
    assert circles(MODULES) == []


def test_triton_is_imported_lazily() -> None:
    assert eager_triton_faults(MODULES) == []


def test_private_torch_apis_stand_in_one_room() -> None:
    assert private_torch_faults(MODULES) == []


def test_dynamo_sees_no_finalizer() -> None:
    assert finalizer_faults(MODULES) == []


# --- the checks themselves --------------------------------------------------------------------------------------------

PACKAGE = {"chunkc.ir": "", "chunkc.ir.plan": "", "chunkc.ir.layout": "", "chunkc.runtime": "", "chunkc.passes": ""}

# module -> source, with the piece of a fault that must be found
FLOOR_FAULTS = [
    ("chunkc.passes.prefetch", "from chunkc.runtime.devices.protocol import Device", "passes may not"),
    ("chunkc.passes.prefetch", "def run():\n    import chunkc.capture.backend", "passes may not"),
    ("chunkc.passes.prefetch", "from chunkc._torch_compat.core import x", "passes may not"),
    ("chunkc.passes.prefetch", "from chunkc import runtime", "imports chunkc.runtime: passes may not"),
    ("chunkc.passes.prefetch", "from chunkc import compile", "imports chunkc: passes may not"),
    ("chunkc.runtime.execution.executor", "from ...cost.rates import adam", "chunkc.cost.rates: runtime.execution may"),
    ("chunkc.runtime.execution.executor", "from chunkc import passes", "chunkc.passes: runtime.execution may not"),
    ("chunkc.runtime.execution.executor", "from chunkc.capture import graphs", "runtime.execution may not"),
    ("chunkc.capture.backend", "from chunkc.hardware import Hardware", "capture may not"),
    ("chunkc.ir.verify.replay", "from chunkc.hardware import Hardware", "ir.verify may not"),
    ("chunkc.hardware", "import chunkc.ir.plan", "hardware may not"),
    ("chunkc.hardware.catalogue", "import chunkc.ir.plan", "hardware may not"),
    ("chunkc.triton_kernels.cast", "from chunkc.errors import ChunkcError", "triton_kernels may not"),
    ("chunkc.report.text", "from chunkc.passes import pipeline", "report may not"),
    ("chunkc.api", "from chunkc.cli import main", "api may not"),
    ("chunkc.api", "from passes import pipeline", "which is chunkc.passes"),
    ("chunkc.api", "import triton_kernels", "which is chunkc.triton_kernels"),
    ("chunkc.surprise", "", "has no floor"),
]


@pytest.mark.parametrize(("module", "source", "piece"), FLOOR_FAULTS)
def test_a_fault_is_found(module: str, source: str, piece: str) -> None:
    faults = floor_faults({**PACKAGE, module: source})
    assert len(faults) == 1
    assert piece in faults[0]


LEGAL = [
    ("chunkc.passes.lower", "from chunkc._torch_compat.core import x\nfrom chunkc.passes.contract import Pass"),
    ("chunkc.passes.contract", "from chunkc.passes.lower import lower\nfrom chunkc.cost import rates"),
    (
        "chunkc.runtime.execution.executor",
        "from . import binder\nfrom ...ir.plan import Plan\nimport chunkc.triton_kernels.cast",
    ),
    ("chunkc.cli", "import chunkc\nfrom chunkc import api"),
    (
        "chunkc.compiler.compiled_model",
        "from chunkc.passes.lower import lower\nimport chunkc.compiler.segment_compiler",
    ),
    (
        "chunkc.hardware",
        "from chunkc.hardware.catalogue import gpus\nfrom chunkc.errors import HardwareError\nimport torch",
    ),
]


@pytest.mark.parametrize(("module", "source"), LEGAL)
def test_legal_imports_pass(module: str, source: str) -> None:
    assert floor_faults({**PACKAGE, module: source}) == []


def test_a_circle_is_found() -> None:
    back = "from chunkc.ir import plan"
    assert circles({"chunkc.ir": "", "chunkc.ir.plan": "from . import layout", "chunkc.ir.layout": back})
    assert circles({"chunkc.ir": "from chunkc.ir.plan import Plan", "chunkc.ir.plan": "from chunkc.ir import Slot"})
    lazy = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {back}\ndef f():\n    {back}"
    assert not circles({"chunkc.ir": "", "chunkc.ir.plan": "from . import layout", "chunkc.ir.layout": lazy})


def test_an_eager_triton_import_is_found() -> None:
    assert eager_triton_faults({"chunkc.runtime.devices.cuda": "import triton.language as tl"})
    assert eager_triton_faults({"chunkc.runtime.devices.cuda": "from chunkc.triton_kernels import cast"})
    assert not eager_triton_faults({"chunkc.runtime.devices.cuda": "def f():\n    import triton"})
    assert not eager_triton_faults({"chunkc.triton_kernels.cast": "import triton"})


PRIVATE_TORCH = [
    "from torch._dynamo import x",
    "from torch.utils import _pytree as pytree",
    "import torch._C",
    "y = torch._fused_adamw_(p)",
]


@pytest.mark.parametrize("source", PRIVATE_TORCH)
def test_a_private_torch_use_is_found(source: str) -> None:
    assert private_torch_faults({"chunkc.api": source})
    assert not private_torch_faults({"chunkc._torch_compat.core": source})


def test_public_torch_uses_pass() -> None:
    assert not private_torch_faults({"chunkc.api": "import torch\nv = torch.__version__\nx = self._torch.nn._x"})


FINALIZERS = [
    "class A:\n    def __del__(self): pass",
    "import weakref\nweakref.finalize(a, print)",
    "import weakref\nweakref.ref(a, print)",
    "import weakref\nweakref.WeakMethod(a.b, callback=print)",
    "from weakref import finalize",
]


@pytest.mark.parametrize("source", FINALIZERS)
def test_a_finalizer_is_found(source: str) -> None:
    assert finalizer_faults({"chunkc.api": source})
    assert not finalizer_faults({"chunkc._torch_compat.core": source})


def test_weak_references_without_a_call_pass() -> None:
    assert not finalizer_faults({"chunkc.api": "import weakref\nfrom weakref import WeakSet\na = weakref.ref(b)"})
