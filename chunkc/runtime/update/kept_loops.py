"""Compiled loops are found again without Inductor, which takes most of a second to look one up.

A document beside Inductor's cache names the library, its digest, and the order of its arguments, by all that the loop
follows from. Whoever takes a loop checks what it computes, and goes on to the next one where that is wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from chunkc._torch_compat.inductor import inductor_cache_folder
from chunkc.files import KeptDocuments
from chunkc.files.decoding import Decoder
from chunkc.files.reading import FormatError
from chunkc.files.sources import package_digest


@dataclass(frozen=True, slots=True)
class CompiledLoop:
    """A shared library, its symbol, and its arguments in order, as of `inductor_loop`."""

    library: str
    symbol: str
    order: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Document:
    """``library`` by its path below Inductor's cache, with its SHA-256."""

    library: str
    sha256: str
    symbol: str
    order: tuple[tuple[str, int], ...]


def kept_or_compiled(facts: str, compile_loop: Callable[[], CompiledLoop]) -> Iterator[CompiledLoop]:
    """The loop that an earlier run kept under ``facts``, if any; then a compiled one, kept from now on."""
    cache = Path(inductor_cache_folder())
    store, key = KeptDocuments(cache / "chunkc"), hashlib.sha256((package_digest() + facts).encode()).hexdigest()[:32]
    found = _find(store, key, cache)
    if found is not None:
        yield found
    loop = compile_loop()
    if Path(loop.library).is_relative_to(cache):
        library = str(Path(loop.library).relative_to(cache))
        store.keep(key, asdict(_Document(library, _digest(Path(loop.library)), loop.symbol, tuple(loop.order))))
    yield loop


def _find(store: KeptDocuments, key: str, cache: Path) -> CompiledLoop | None:
    document = store.find(key)
    if document is None:
        return None
    try:
        kept = Decoder().decode(_Document, document)
        path = cache / kept.library
        return CompiledLoop(str(path), kept.symbol, kept.order) if _digest(path) == kept.sha256 else None
    except (FormatError, OSError):
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
