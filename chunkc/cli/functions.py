"""A model given as ``module:function``: a function of the user's that returns it with example inputs."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from chunkc.errors import ChunkcError


def model_and_inputs(spec: str) -> tuple[Any, Any]:
    """What the function named ``module:function`` returns; errors inside the user's module are the user's to see.

    Raises:
        ChunkcError: when there is no such function, or it returns something else.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise ChunkcError(f"{spec!r} is not of the form module:function, for example train:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ChunkcError(f"no module {error.name!r} in {os.getcwd()} or the installed packages") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ChunkcError(f"module {module_name!r} has no function {function_name!r}")
    pair = function()
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], dict | tuple)):
        raise ChunkcError(f"{spec} must return (model, example_inputs) with the inputs a dict or a tuple")
    return pair[0], pair[1]
