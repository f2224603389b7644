"""Arguments that several commands share, checked when they are parsed; files, read and written."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from chunkc.cli.output import tell
from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.report import Plan
from chunkc.report.columns import shorten

Planner = Callable[..., Any]

DTYPES: Final[Mapping[str, torch.dtype | str]] = MappingProxyType(
    {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


MAX_CHUNK_NUMEL: Final = 2**40
MAX_RANKS: Final = 2**20
MAX_BATCH: Final = 2**20
MAX_SEQUENCE: Final = 2**24


def chunk_size(text: str) -> int | str:
    """Elements of a chunk, or ``auto``."""
    return text if text == "auto" else _whole(text, MAX_CHUNK_NUMEL, "auto or a whole number of elements")


def up_to(most: int) -> Callable[[str], int]:
    """Return a reader of a whole number from 1 to ``most``."""

    def read(text: str) -> int:
        return _whole(text, most, "a whole number")

    return read


def _whole(text: str, most: int, kind: str) -> int:
    """A whole number from 1 to ``most``; argparse.ArgumentTypeError for what is no ``kind`` of these."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise argparse.ArgumentTypeError(f"{shorten(text, 40)!r} is not {kind} from 1 to {most:,}")
    return number


def positive(text: str) -> float:
    """A finite number above zero; argparse.ArgumentTypeError for anything else."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{shorten(text, 40)!r} is not a positive number")
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
    try:
        return Plan.load(path)
    except OSError as error:
        raise ChunkcError(f"cannot read {path}: {error.strerror}") from error


def save(result: Plan | Hardware, path: str) -> None:
    write(path, lambda: result.save(path))


def write(path: str, writer: Callable[[], object]) -> None:
    """Let ``writer`` write ``path`` (ChunkcError when it cannot), and say so."""
    writer()
    tell(f"saved {path}")
