"""Pretrained weights into a compiled model, tensor by tensor.

All headers are compared with the model first (`match`). Then each tensor goes from the mapped file to its parameter
(staging store before the first training forward, chunks after), rounded to the dtype that was handed over. Host memory
holds the model and one tensor; a parameter put together from several takes about twice its size meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from chunkc.distributed.agreement import Kind
from chunkc.errors import ChunkcError, first_names
from chunkc.weights.files import WeightFiles
from chunkc.weights.initial import initial_values
from chunkc.weights.match import Matched, is_optional, match
from chunkc.weights.tensors import Entry, ModelTensors, memory_of

logger = logging.getLogger("chunkc")

Write = Callable[[Entry, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Names that `load_pretrained` loaded or not.

    Attributes:
        loaded_keys: names in the model that took their value from the files, tied ones once.
        tied_keys: further names of these, with the loaded name.
        missing_keys, unexpected_keys: names that only the model has, and names that only the files have.
        initialised_keys: missing ones without a value, which the model's own initialisation gave one.
    """

    loaded_keys: tuple[str, ...]
    tied_keys: Mapping[str, str]
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    initialised_keys: tuple[str, ...]


def load_pretrained(model: nn.Module, path: str | Path, *, strict: bool = False) -> LoadReport:
    """Load safetensors into a compiled model, at any time between two steps; optimizer states stay.

    Parameters that the files lack keep their values. Those without any, since the model came from the meta device, are
    initialised as the model itself would (transformers' ``_init_weights``, ``reset_parameters`` of modules), drawing
    from torch's generator; without such an initialisation, and where ranks along ``tp`` have parts, the next forward
    refuses them by name. An interrupted load leaves the tensors loaded so far. All ranks call this, and return or raise
    what rank 0 does; it reads whole tensors, of which each rank takes its part.

    Args:
        model: compiled by ``chunkc.compile``, or a part of such a model.
        path: a safetensors file, an index of shards, or the folder of either.
        strict: refuse missing and unexpected names instead of reporting them.

    Raises:
        ChunkcError: for files that are missing or damaged, for shapes and dtypes that do not fit, for tied parameters
            whose names have different values, and with ``strict`` for names that do not match; nothing has changed.
        RankError: when the ranks do not all load the same.
    """
    started_s = time.perf_counter()
    with memory_of(model).ranks.agreement_scope():
        tensors = ModelTensors(model)
        names = [entry.name for entry in tensors.entries]
        tensors.ranks.agree(Kind.LOAD, lambda: [f"{path=!s}", f"{strict=}", *names])
    report = tensors.led_write(lambda write: _read_files(model, tensors, path, write, strict=strict))
    absent = [entry for entry in tensors.entries if entry.name not in report.loaded_keys]
    initialised = _initialise(model, tensors, [entry for entry in absent if tensors.is_blank(entry)])
    report = replace(report, initialised_keys=initialised)
    if tensors.ranks.is_first_of_job:
        _log(report, Path(path), sum(tensors.entry(name).nbytes for name in report.loaded_keys), started_s)
    return report


def _read_files(model: nn.Module, tensors: ModelTensors, path: str | Path, write: Write, *, strict: bool) -> LoadReport:
    files = WeightFiles(path)
    matched = match(model, tensors, files)
    absent = [entry for entry in tensors.entries if not matched.has(entry)]
    missing = tuple(entry.name for entry in absent if not is_optional(model, entry))
    if strict and (missing or matched.unexpected):
        raise ChunkcError(
            f"{files.path} and this {type(model).__name__} do not have the same names: missing {first_names(missing)}; "
            f"unexpected {first_names(matched.unexpected)}. Load with strict=False to report them only"
        )
    _write(tensors, files, matched, write)
    loaded = [entry for entry in tensors.entries if matched.has(entry)]
    tied = {alias: entry.name for entry in loaded for alias in entry.aliases}
    return LoadReport(tuple(entry.name for entry in loaded), tied, missing, tuple(matched.unexpected), ())


def _log(report: LoadReport, path: Path, nbytes: int, started_s: float) -> None:
    seconds = time.perf_counter() - started_s
    logger.info("loaded %d tensors, %.1f MB, from %s in %.1f s", len(report.loaded_keys), nbytes / 1e6, path, seconds)
    if report.missing_keys or report.unexpected_keys:
        logger.warning(
            "names of %s and of the model differ: missing %s, of which %d were initialised anew; unexpected %s",
            *(path, first_names(report.missing_keys), len(report.initialised_keys)),
            first_names(report.unexpected_keys),
        )


def _write(tensors: ModelTensors, files: WeightFiles, matched: Matched, write: Write) -> None:
    entries = {names[0]: tensors.entry(name) for name, names in matched.sources.items()}
    for name, value in files.values(entries):
        write(entries[name], value)
    for group in matched.converted:
        made = group.convert(files.value)
        for name in list(made):
            if name in matched.made:
                write(matched.made[name], made.pop(name))


def _initialise(model: nn.Module, tensors: ModelTensors, blank: Sequence[Entry]) -> tuple[str, ...]:
    """Give ``blank`` entries initial values, drawn alike on all ranks; names of those that have one."""
    if tensors.ranks.tensor_size > 1:
        return ()  # initialisations write parameters, and modules have DTensors in their place
    values = initial_values(model, {entry.name: entry.dtype for entry in blank})
    for name, value in values.items():
        tensors.write(tensors.entry(name), value)
    return tuple(values)
