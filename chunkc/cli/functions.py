"""A model given as ``module:function``: a function of the user's that returns it with example inputs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import TracebackType
from typing import Any

from torch import nn

from chunkc.errors import ChunkcError


def model_and_inputs(spec: str) -> tuple[nn.Module, Any]:
    """Call the function named ``module:function`` and return its model and inputs.

    Raises:
        ChunkcError: when there is no such function, it raises something, or it returns something else.
    """
    module_name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or not function_name.isidentifier():
        raise ChunkcError(f"{spec!r} is not of the form module:function, for example train:build")
    folder = _current_folder()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _imported(module_name, folder)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ChunkcError(f"module {module_name!r} has no function {function_name!r}")
    with _errors_of_users(spec, f"import {module_name}; {module_name}.{function_name}()", folder):
        result = function()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict | tuple)):
        raise ChunkcError(f"{spec} must return (model, example_inputs) with the inputs a dict or a tuple")
    if not isinstance(result[0], nn.Module):
        raise ChunkcError(f"{spec} must return (model, example_inputs) with an nn.Module first, found {result[0]!r}")
    return result


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise ChunkcError(f"the current folder, in which modules are, is no more: {error.strerror}") from error


def _imported(module_name: str, folder: str) -> Any:
    program = f"import {module_name}"
    with _errors_of_users(program, program, folder):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise ChunkcError(f"no module {error.name!r} in {folder} or the installed packages") from error


@contextmanager
def _errors_of_users(name: str, program: str, folder: str) -> Iterator[None]:
    """Raise errors of the user's code ``name`` as one error; ``program`` shows the whole traceback."""
    try:
        yield
    except ChunkcError:
        raise
    except (Exception, SystemExit) as error:  # users' code may raise anything, and exit
        raised = f"{name} raised {type(error).__name__}{_place(error.__traceback__, folder)}: {error}"
        raise ChunkcError(f"{raised}. For the whole traceback: python -c '{program}'") from error


def _place(raised: TracebackType | None, folder: str) -> str:
    """The innermost line in a file below ``folder``, else of any file; nothing without a line."""
    frames = [frame for frame in extract_tb(raised) if not _is_of_import(frame)]
    frames = [frame for frame in frames if _is_below(folder, Path(frame.filename))] or frames
    return f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _is_below(folder: str, path: Path) -> bool:
    return path.is_relative_to(folder) and "site-packages" not in path.parts


def _is_of_import(frame: FrameSummary) -> bool:
    return frame.filename == __file__ or frame.filename.startswith(("<frozen ", importlib.__file__ or "<frozen "))
