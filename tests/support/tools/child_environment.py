"""Environments of child processes that import what their parent can."""

import os
import sys


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with ``changes``; the child finds modules where this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **changes}
