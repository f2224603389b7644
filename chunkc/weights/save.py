"""Weights of a compiled model as safetensors files in the layout of Hugging Face.

``safetensors.torch.save_file`` wants all tensors at once. The format's header needs names, dtypes and shapes only, so
each value is gathered, written and forgotten: saving takes the memory of one tensor. Wider dtypes come first, so that
every tensor is aligned.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from torch import nn

from chunkc.distributed.agreement import Kind
from chunkc.errors import ChunkcError
from chunkc.files import flush_folder, synced_file
from chunkc.weights.files import DTYPES, INDEX_NAME, WEIGHTS_NAME, bytes_of, encode_header
from chunkc.weights.tensors import Entry, ModelTensors, memory_of

logger = logging.getLogger("chunkc")

_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_PARTIAL: Final = ".partial"
Read = Callable[[Entry], torch.Tensor]
Shard = dict[str, Entry]  # entries of one file by saved name
_OUR_NAME: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def save_safetensors(model: nn.Module, directory: str | Path, *, max_shard_size: int | str = "5GB") -> tuple[Path, ...]:
    """Write the weights of a compiled model into ``directory``, gathering one tensor at a time.

    Values are those of ``model.state_dict()``, in the dtype that each parameter was handed over in. Tied parameters are
    written once, under the name that transformers expects; the header names the others. The files load with
    ``chunkc.load_pretrained``, ``from_pretrained`` (which also wants ``model.config.save_pretrained(directory)``) and
    ``safetensors.torch.load_model``. They replace those of an earlier save when all are whole; a killed save leaves the
    earlier one, or, while several shards take their names, no index. All ranks call this, and rank 0 writes: whole
    tensors, also where ranks along ``tp`` have parts.

    Args:
        max_shard_size: most bytes of values in a file, as a number or like ``"5GB"`` (powers of 1000). A larger tensor
            has a file of its own.

    Returns:
        the files written; the index, if there is one, comes last.

    Raises:
        ChunkcError: for parameters without a value, for other state (``get_extra_state``), and for dtypes that
            safetensors cannot hold; nothing is written then.
        OSError: when the files cannot be written, on all ranks; those of an earlier save are still there.
        RankError: when the ranks do not all save the same.
    """
    started_s = time.perf_counter()
    with memory_of(model).ranks.agreement_scope():
        tensors, folder = ModelTensors(model), Path(directory)
        limit_nbytes = _parse_size(max_shard_size)
        entries = _saved_entries(model, tensors)
        tensors.ranks.agree(Kind.SAVE, lambda: [f"{directory=!s}", f"{limit_nbytes=}", *entries])
    shards = _split(entries, limit_nbytes)
    names = [WEIGHTS_NAME] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(len(shards))]
    names = tensors.led_read(lambda read: _write_files(folder, names, shards, read))
    if tensors.ranks.is_first_of_job:
        nbytes, seconds = sum(entry.nbytes for entry in entries.values()), time.perf_counter() - started_s
        logger.info("saved %d tensors, %.1f MB, to %s in %.1f s", len(entries), nbytes / 1e6, folder, seconds)
    return tuple(folder / name for name in names)


def _write_files(folder: Path, shard_names: Sequence[str], shards: Sequence[Shard], read: Read) -> list[str]:
    names = list(shard_names)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleanup:
        written = []
        for name, shard in zip(names, shards, strict=True):
            written.append(_temporary(folder / name, cleanup))
            _write_shard(written[-1], shard, read)
        if len(shards) > 1:
            names.append(INDEX_NAME)
            written.append(_temporary(folder / INDEX_NAME, cleanup))
            with synced_file(written[-1]) as file:
                file.write(_index(shards, names).encode())
        _put_in_place(folder, dict(zip(names, written, strict=True)))
    _remove_others(folder, names)
    return names


def _saved_entries(model: nn.Module, tensors: ModelTensors) -> dict[str, Entry]:
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    others = [name for name in tensors.others if name not in ignored]
    if others:
        raise ChunkcError(
            f"the state of {others[0]} ({len(others)} in all) is neither parameter nor buffer (get_extra_state); save "
            "it beside the weights, for example with chunkc.save_checkpoint"
        )
    entries = {name: entry for entry in tensors.entries if (name := saved_name(model, entry)) not in ignored}
    wrong = [f"{name} ({entry.dtype})" for name, entry in entries.items() if entry.dtype not in DTYPES.values()]
    if wrong:
        raise ChunkcError(f"{', '.join(wrong[:5])} cannot be saved as safetensors, which has {', '.join(DTYPES)}")
    check_values(tensors, entries)
    return entries


def check_values(tensors: ModelTensors, entries: Mapping[str, Entry]) -> None:
    """Refuse parameters without a value, by name."""
    blank = [name for name, entry in entries.items() if tensors.is_blank(entry)]
    if blank:
        raise ChunkcError(
            f"{', '.join(blank[:5])} ({len(blank)} in all) came on the meta device and have no value to be saved; "
            "give them one first (chunkc.load_pretrained, load_state_dict, torch.nn.init)"
        )


def saved_name(model: nn.Module, entry: Entry) -> str:
    """The first name of ``entry`` that transformers does not tie to another; else the first name."""
    targets = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in entry.names if name not in targets), entry.name)


def _split(entries: dict[str, Entry], limit_nbytes: int) -> list[Shard]:
    shards, fill_nbytes = list[Shard]([{}]), 0
    for name, entry in entries.items():
        if shards[-1] and fill_nbytes + entry.nbytes > limit_nbytes:
            shards.append({})
            fill_nbytes = 0
        shards[-1][name] = entry
        fill_nbytes += entry.nbytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_shard(path: Path, shard: Shard, read: Read) -> None:
    entries = dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize))
    aliases = {alias: name for name, entry in entries.items() for alias in entry.names if alias != name}
    with synced_file(path) as file:
        file.write(encode_header({name: (entry.dtype, entry.shape) for name, entry in entries.items()}, aliases))
        for entry in entries.values():
            file.write(bytes_of(read(entry)))


def _temporary(path: Path, cleanup: ExitStack) -> Path:
    """Name of a file until it is whole; ``cleanup`` removes the file."""
    temporary = path.with_name(f".{path.name}{_PARTIAL}")
    cleanup.callback(temporary.unlink, missing_ok=True)
    return temporary


def _put_in_place(folder: Path, written: Mapping[str, Path]) -> None:
    """Give whole files their names, the index last: it must never name shards of two saves."""
    if len(written) > 1 and any((folder / name).exists() for name in written if name != INDEX_NAME):
        (folder / INDEX_NAME).unlink(missing_ok=True)
        flush_folder(folder)
    for name, file in written.items():
        if name == INDEX_NAME:
            flush_folder(folder)
        os.replace(file, folder / name)
    flush_folder(folder)


def _index(shards: Sequence[Shard], names: Sequence[str]) -> str:
    places = {entry: file for shard, file in zip(shards, names, strict=False) for entry in shard}
    entries = [entry for shard in shards for entry in shard.values()]
    metadata = {
        "total_parameters": sum(torch.Size(entry.shape).numel() for entry in entries if entry.param is not None),
        "total_size": sum(entry.nbytes for entry in entries),
    }
    return json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True) + "\n"


def _remove_others(folder: Path, names: Sequence[str]) -> None:
    """Remove files of earlier or killed saves that this save did not replace."""
    for path in list(folder.iterdir()):
        is_ours = _OUR_NAME.fullmatch(path.name.removeprefix(".").removesuffix(_PARTIAL)) is not None
        if is_ours and path.name not in names:
            path.unlink()


def _parse_size(size: int | str) -> int:
    spelled = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)?\s*", str(size), re.IGNORECASE)
    nbytes = int(float(spelled[1]) * _UNITS.get((spelled[2] or "").upper(), 1)) if spelled else 0
    if nbytes < 1:
        raise ChunkcError(f"max_shard_size={size!r}: give a number of bytes, or one with KB, MB, GB or TB like '5GB'")
    return nbytes
