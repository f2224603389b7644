"""Names of the package import what they need, and never torch's compiler; type checkers see a class."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import chunkc

ROOT = Path(__file__).parent.parent
FOR_TYPE_CHECKERS = importlib.import_module("chunkc._public")
HEAVY = (
    *("torch", "torch._dynamo", "torch._inductor", "torch._functorch.partitioners", "triton", "sympy", "networkx"),
    *("torch.distributed.checkpoint", "tabulate", "matplotlib", "transformers", "accelerate"),
    *(
        "peft",
        "chunkc.capture",
        "chunkc.checkpoint",
        "chunkc.compiler",
        "chunkc.runtime",
        "chunkc.triton_kernels.launch",
    ),
)
STAGES = {
    "import chunkc": [],
    "chunkc.BudgetError": [],
    "chunkc.graceful_exit": [],
    "chunkc.Hardware": ["torch"],
    "chunkc.Plan": ["torch", "tabulate"],
    "chunkc.compile": ["torch", "tabulate", "chunkc.capture", "chunkc.compiler", "chunkc.runtime"],
    "chunkc.AdamW": ["torch", "tabulate", "chunkc.capture", "chunkc.compiler", "chunkc.runtime"],
}


def test_names_import_no_more_than_they_need(tmp_path: Path) -> None:
    """Each stage in one process after the others, whose modules stay imported."""
    program = (
        "import json, sys\nfound = []\n"
        f"for stage in {list(STAGES)}:\n"
        f"    exec(stage)\n    found.append([name for name in {HEAVY} if name in sys.modules])\n"
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert dict(zip(STAGES, json.loads(done.stdout), strict=True)) == STAGES


def test_a_name_is_that_of_type_checkers() -> None:
    public = {name for name in vars(FOR_TYPE_CHECKERS) if not name.startswith("_")} - {"annotations"}
    assert public == set(chunkc.__all__)
    assert [name for name in sorted(public) if getattr(chunkc, name) is not getattr(FOR_TYPE_CHECKERS, name)] == []


def test_a_module_whose_name_the_package_does_not_offer_is_imported_when_asked_for() -> None:
    assert chunkc.errors is importlib.import_module("chunkc.errors")
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = chunkc.absent


TORCH = {
    "torch/__init__.pyi": "from typing import Any\ndef __getattr__(name: str) -> Any: ...",
    "torch/nn.pyi": "class Module: ...",
    "user.py": """
import chunkc
from torch import nn

class Net(nn.Module):
    pass

reveal_type(chunkc.compile(Net(), hw="emulated-1m-16m"))
chunkc.compile(Net()).decode
chunkc.compile(Net(), chunks=3)
chunkc.compile("a name")
""",
}
TOLD = [
    '8: note: Revealed type is "user.Net"',
    '9: error: "Net" has no attribute "decode"  [attr-defined]',
    '10: error: Unexpected keyword argument "chunks" for "compile"  [call-arg]',
    '11: error: Value of type variable "M" of "compile" cannot be "str"  [type-var]',
]


def test_a_type_checker_sees_the_users_class_behind_compile(tmp_path: Path) -> None:
    """It reads the modules named and a stand-in of torch, no others, so that this takes seconds."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    settings = ("follow_imports = skip", "ignore_missing_imports = true", "incremental = false")
    for name, text in (TORCH | {"mypy.ini": "\n".join(["[mypy]", f"mypy_path = {ROOT}", *settings])}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini"]
    modules = ("user", "torch", "torch.nn", "chunkc", "chunkc._public", "chunkc.api")
    command += [word for module in modules for word in ("-m", module)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = [line.removeprefix("user.py:") for line in done.stdout.splitlines() if line.startswith("user.py:")]
    assert [line for line in lines if "defined in" not in line] == TOLD, done.stdout + done.stderr
