"""Runs kernel checks by Triton's interpreter in one child process, since ``TRITON_INTERPRET`` counts at import."""

import importlib
import json
import subprocess
import sys
import traceback
from collections.abc import Callable

import torch
from child_environment import environment

TIMEOUT_S = 500


def checks_of(module: str) -> dict[str, Callable[[torch.device], None]]:
    """``CHECKS`` of a module, which run anywhere, and its ``HOST_CHECKS``, if any."""
    found = importlib.import_module(module)
    return {**found.CHECKS, **getattr(found, "HOST_CHECKS", {})}


def run_interpreted(module: str) -> dict[str, str]:
    """The traceback of each check of ``module``, empty where it passed; AssertionError when the child fails."""
    env = environment(TRITON_INTERPRET="1")
    child = subprocess.run(
        [sys.executable, __file__, module], env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert child.returncode == 0, child.stderr
    faults: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return faults


def main() -> None:
    """Run every check in host memory and print the faults as JSON."""
    torch.set_num_threads(1)
    faults = {}
    for name, check in checks_of(sys.argv[1]).items():
        try:
            check(torch.device("cpu"))
            faults[name] = ""
        except Exception:
            faults[name] = traceback.format_exc()
    print(json.dumps(faults))


if __name__ == "__main__":
    main()
