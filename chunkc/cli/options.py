"""What several commands share: kinds of arguments, checked when they are parsed, and files, read and written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.report import Plan

Planner = Callable[..., Any]

DTYPES: Final[Mapping[str, torch.dtype | str]] = MappingProxyType(
    {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def chunk_size(text: str) -> int | str:
    """Elements of a chunk, or ``auto``."""
    return text if text == "auto" else positive(text, "is neither auto nor a positive number of elements")


def positive(text: str, otherwise: str = "is not a positive number") -> int:
    """A whole number of at least one.

    Raises:
        argparse.ArgumentTypeError: for anything else; ``otherwise`` says what it is.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} {otherwise}")
    return number


def profile_path(text: str) -> str:
    """Refused before anything is measured, since measuring takes a while."""
    if Path(text).suffix.lower() != ".json":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .json, by which hw= knows a profile")
    return output_path(text)


def output_path(text: str) -> str:
    """A file that can be written, as far as folders tell."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a folder, or the folder around it is missing")
    return text


def load_plan(path: str) -> Plan:
    """The plan saved at ``path``.

    Raises:
        ChunkcError: when it cannot be read.
    """
    try:
        return Plan.load(path)
    except OSError as error:
        raise ChunkcError(f"cannot read {path}: {error.strerror}") from error


def save(result: Plan | Hardware, path: str) -> None:
    """Write ``result`` to ``path``, and say so.

    Raises:
        ChunkcError: when it cannot be written.
    """
    write(path, lambda: result.save(path))


def write(path: str, writer: Callable[[], object]) -> None:
    """Let ``writer`` write ``path``, and say so.

    Raises:
        ChunkcError: when it cannot be written.
    """
    try:
        writer()
    except OSError as error:
        raise ChunkcError(f"cannot write {path}: {error.strerror}") from error
    print(f"saved {path}", file=sys.stderr)
