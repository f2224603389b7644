"""Pretrained weights into a compiled model, tensor by tensor.

All headers are read and compared with the model first (`match`); what does not fit is refused by name before anything
is written. Then each tensor goes from the mapped file to where its parameter stands (the staging store before the first
training forward, chunks after it), rounded to the dtype that the parameter was handed over in. So host memory holds the
model and at most one tensor beside it; a parameter that is put together from several (fused experts) takes about twice
its size meanwhile. Optimizer states stay as they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from chunkc.errors import ChunkcError
from chunkc.weights.files import WeightFiles
from chunkc.weights.initial import initial_values
from chunkc.weights.match import Matched, is_optional, match, tied_names
from chunkc.weights.tensors import Entry, ModelTensors

logger = logging.getLogger("chunkc")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_pretrained` did.

    Attributes:
        loaded_keys: names in the model that took their value from the files, tied ones once.
        tied_keys: further names that share the memory of one of these, and which.
        missing_keys: names in the model for which the files hold nothing.
        unexpected_keys: names in the files for which the model has nothing.
        initialised_keys: those that had no value, found none, and were given one by the model's own initialisation.
    """

    loaded_keys: tuple[str, ...]
    tied_keys: Mapping[str, str]
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    initialised_keys: tuple[str, ...]


def load_pretrained(model: nn.Module, path: str | Path, *, strict: bool = False) -> LoadReport:
    """Load safetensors into a compiled model, at any time between two steps.

    Parameters that the files lack keep their values. Those that have none, since the model came from the meta device,
    are initialised as the model itself would (``_init_weights`` of transformers' models, ``reset_parameters`` of
    modules), with random numbers of torch's generator; where there is no such initialisation they stay without a value,
    and the next forward refuses them by name. An interrupted load leaves the tensors loaded so far.

    Args:
        model: compiled by ``chunkc.compile``, or a part of such a model.
        path: a safetensors file, an index of shards, or the folder of either.
        strict: refuse missing and unexpected names instead of reporting them.

    Raises:
        ChunkcError: for files that are missing or damaged, for shapes and dtypes that do not fit, for tied parameters
            whose names have different values, and with ``strict`` for names that do not match; nothing has changed.
    """
    started_s = time.perf_counter()
    tensors, files = ModelTensors(model), WeightFiles(path)
    matched = match(model, tensors, files)
    absent = [entry for entry in tensors.entries if not matched.has(entry)]
    missing = tuple(entry.name for entry in absent if not is_optional(model, entry))
    if strict and (missing or matched.unexpected):
        raise ChunkcError(
            f"{files.path} and this {type(model).__name__} do not have the same names: missing {_some(missing)}; "
            f"unexpected {_some(matched.unexpected)}. Load with strict=False to report them only"
        )
    _write(tensors, files, matched)
    initialised = _initialise(model, tensors, [entry for entry in absent if tensors.is_blank(entry)])
    loaded = tuple(entry.name for entry in tensors.entries if matched.has(entry))
    tied = tied_names(tensors, loaded)
    report = LoadReport(loaded, tied, missing, tuple(matched.unexpected), initialised)
    logger.info(
        "loaded %d tensors, %.1f MB, from %s in %.1f s",
        *(len(loaded), sum(tensors.entry(name).nbytes for name in loaded) / 1e6),
        *(files.path, time.perf_counter() - started_s),
    )
    if report.missing_keys or report.unexpected_keys:
        logger.warning(
            "names of %s and of the model differ: missing %s, of which %d were initialised anew; unexpected %s",
            *(files.path, _some(missing), len(initialised), _some(report.unexpected_keys)),
        )
    return report


def _write(tensors: ModelTensors, files: WeightFiles, matched: Matched) -> None:
    """File by file what is taken as it is, then what is put together."""
    entries = {names[0]: tensors.entry(name) for name, names in matched.sources.items()}
    for name, value in files.values(entries):
        tensors.write(entries[name], value)
    for group in matched.converted:
        made = group.convert(files.value)
        for name in list(made):
            if name in matched.made:
                tensors.write(matched.made[name], made.pop(name))


def _initialise(model: nn.Module, tensors: ModelTensors, blank: Sequence[Entry]) -> tuple[str, ...]:
    """Give these entries the values of the model's own initialisation; the names of those that have one."""
    values = initial_values(model, {entry.name: entry.dtype for entry in blank})
    for name, value in values.items():
        tensors.write(tensors.entry(name), value)
    return tuple(values)


def _some(names: Sequence[str]) -> str:
    """The first names of a list, and how many there are."""
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
