"""Putting a run back: everything is compared with the model first, then written tensor by tensor.

Each rank reads what stands in its own chunks, whoever saved it. Parameters without chunks are
read by the first rank that trains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn

from chunkc.checkpoint.contents import Stateful
from chunkc.checkpoint.generators import write_generators_of
from chunkc.checkpoint.index import DTYPES, StoredTensor
from chunkc.checkpoint.planners import Flats, Wanted, load, stand_in
from chunkc.checkpoint.shares import Share, share_of
from chunkc.checkpoint.storage import SafetensorsReader
from chunkc.errors import CheckpointError, ChunkcError, first_names
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.optim.optimizer import ChunkOptimizer
from chunkc.runtime.optim.state_dict import MASTER_PART, check_range, managed
from chunkc.runtime.storage.staging import round_to
from chunkc.weights.tensors import ModelTensors

_TITLES: Final = {"Adam": "Adam", "AdamW": "Adam", "AdamW8bit": "Adam", "SGD": "SGD", "Lion": "Lion"}
"""Titles of rules by the classes that checkpoints name; those of 8-bit states are exchanged with those in fp32."""

T = TypeVar("T")


@dataclass(slots=True)
class Fit:
    """How the ``stored`` tensors of a checkpoint, by key, belong to a model.

    Attributes:
        params: index of the parameter that each stored name (the first of a tied one) is here.
        buffers: first name here of each stored buffer.
        states: those of the optimizer given, by name; None without one.
    """

    path: Path
    reader: SafetensorsReader
    runtime: ModelRuntime
    tensors: ModelTensors
    stored: Mapping[str, StoredTensor]
    params: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    states: tuple[str, ...] | None = None

    def refuse(self, misfit: str) -> CheckpointError:
        return CheckpointError(f"{self.path} does not fit the model: {misfit}", path=self.path)


def fit_model(
    path: Path, reader: SafetensorsReader, model: nn.Module, runtime: ModelRuntime, objects: Mapping[str, Any]
) -> Fit:
    """Compare names, tying and shapes; CheckpointError names what differs."""
    fit = Fit(path, reader, runtime, ModelTensors(model), reader.index())
    ours = {info.name: (info.name, *info.aliases) for info in runtime.infos}
    indexes = {frozenset(names): index for index, names in enumerate(ours.values())}
    fit.params = _matched(fit, objects["model"]["params"], indexes, "parameters")
    by_names = {frozenset(e.names): e.name for e in fit.tensors.entries if e.param is None}
    fit.buffers = _matched(fit, objects["model"]["buffers"], by_names, "buffers")
    others = set(objects["model"]["others"]).symmetric_difference(fit.tensors.others)
    if others:
        raise fit.refuse(f"the extra states of {_listed(others)} are in one of the two only")
    steps = objects["optimizer"]["steps"]
    unknown = steps.keys() - fit.params.keys()
    if unknown:
        raise fit.refuse(f"it counts steps of {_listed(unknown)}, which are none of its parameters")
    for name, index in fit.params.items():
        for key in _keys_of(fit, name, is_stepped=False):
            _check_shape(fit, key, runtime.parameters.whole_shape(index))
    for name, name_here in fit.buffers.items():
        _check_shape(fit, f"model.{name}", fit.tensors.entry(name_here).shape)
    return fit


def _check_shape(fit: Fit, key: str, shape: Sequence[int]) -> None:
    if key not in fit.stored:
        raise fit.refuse(f"it has no {key}")
    stored_shape = fit.stored[key].shape
    if stored_shape != tuple(shape):
        raise fit.refuse(f"{key} is {stored_shape} there and {tuple(shape)} here")


def _matched(fit: Fit, stored: Iterable[Sequence[str]], ours: Mapping[frozenset[str], T], kind: str) -> dict[str, T]:
    theirs = {frozenset(names): names[0] for names in stored}
    if theirs.keys() == ours.keys():
        return {name: ours[names] for names, name in theirs.items()}
    names_there, names_here = (frozenset().union(*keys) for keys in (theirs, ours))
    if names_there == names_here:
        loose = [name for names, name in theirs.items() if names not in ours]
        raise fit.refuse(f"{kind} are tied in another way, for example {_listed(loose)}")
    only_there, only_here = names_there - names_here, names_here - names_there
    raise fit.refuse(
        f"its {kind} {_listed(only_there)} are missing here, and {_listed(only_here)} here are missing in it. A "
        "checkpoint is loaded whole, into the architecture that was saved; for weights alone see chunkc.load_pretrained"
    )


def _title_of(optimizer: ChunkOptimizer) -> str:
    return optimizer.declare(optimizer.param_groups).title.removeprefix("8-bit ")


def check_optimizer_fits(fit: Fit, optimizer: ChunkOptimizer, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a checkpoint in torch's layout, for those of ``optimizer``.

    Raises:
        CheckpointError: when it is of another rule, the parameters are grouped otherwise, a state is missing, or one
            with states is not trained here.
        ChunkcError: when the groups are of another optimizer, and where the model's plan has no room for the states.
    """
    name = type(optimizer).__name__
    if saved["class"] != name and _TITLES.get(saved["class"]) != _title_of(optimizer):
        raise fit.refuse(f"it was saved with chunkc.{saved['class']:.60}, and chunkc.{name} was given")
    runtime, groups, first = fit.runtime, [], 0
    ours = [[runtime.parameters.name_of(managed(p)[1]) for p in group["params"]] for group in optimizer.param_groups]
    unknown = {name for group in saved["groups"] for name in group["params"]} - fit.params.keys()
    if unknown:
        raise fit.refuse(f"its optimizer has {_listed(unknown)}, which are none of its parameters")
    theirs = [[runtime.parameters.name_of(fit.params[name]) for name in group["params"]] for group in saved["groups"]]
    if [set(names) for names in ours] != [set(names) for names in theirs]:
        raise fit.refuse(
            f"its optimizer has groups of {[len(names) for names in theirs]} parameters and the one here of "
            f"{[len(names) for names in ours]}, or other ones in a group: make the optimizer as when it was saved"
        )
    for names, group in zip(ours, saved["groups"], strict=True):
        _check_group(fit, group, optimizer)
        groups.append({**group, "params": list(range(first, first + len(names)))})
        first += len(names)
    untrained = [name for name in saved["steps"] if not runtime.parameters.is_trained(fit.params[name])]
    if untrained:
        raise fit.refuse(f"{_listed(untrained)} have optimizer states there and are not trained here")
    needed = optimizer.needed_rule(groups).states.names
    stored = {key.rpartition(".")[2] for key in fit.stored if key.startswith("optimizer.state.")}
    fit.states = tuple(s for s in optimizer.declare(groups).states.names if s in needed or s in stored)
    for name in saved["steps"]:
        for key in _keys_of(fit, name, is_stepped=True):
            _check_shape(fit, key, runtime.parameters.whole_shape(fit.params[name]))
    return groups


def _check_group(fit: Fit, group: Mapping[str, Any], optimizer: ChunkOptimizer) -> None:
    try:
        check_range(group)
        optimizer.check_group(group)
    except ChunkcError:
        raise
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        raise fit.refuse(f"its optimizer has a group without usable options ({error!s:.200})") from error


def load_states(fit: Fit, objects: Mapping[str, Any], model: nn.Module, scheduler: Stateful | None) -> None:
    """Hand modules with extra states, and the scheduler, their saved states, before any tensor.

    Raises:
        CheckpointError: one does not take its state; all have their own again, as far as they take these.
    """
    others = objects["model"]["others"]
    taken: list[Callable[[], object]] = []
    try:
        if others:
            values = model.state_dict(keep_vars=True)
            before = {name: values[name] for name in others}
            taken.append(lambda: model.load_state_dict(before, strict=False))
            model.load_state_dict(others, strict=False)
        if scheduler is not None:
            taken.append(partial(scheduler.load_state_dict, scheduler.state_dict()))
            scheduler.load_state_dict(objects["scheduler"])
    except Exception as error:  # modules and schedulers are the user's: each fails in its own way
        for give_back in taken:
            give_back()
        refuser = "the scheduler" if len(taken) == bool(others) + 1 else "a module with an extra state"
        raise fit.refuse(f"{refuser} does not take its state ({type(error).__name__}: {error!s:.200})") from error


def write_model(fit: Fit, objects: Mapping[str, Any]) -> None:
    """Write parameters, optimizer states and buffers, one parameter at a time; on every rank its own part."""
    steps = objects["optimizer"]["steps"]
    writer = _Writer(fit, {name: set(_keys_of(fit, name, is_stepped=name in steps)) for name in fit.params})
    load(fit.reader, writer.wanted(), writer.take)


def _keys_of(fit: Fit, name: str, *, is_stepped: bool) -> list[str]:
    keys = [f"model.{name}"]
    keys += [f"optimizer.state.{name}.{state}" for state in fit.states or () if is_stepped]
    master = f"optimizer.state.{name}.{MASTER_PART}"
    return [*keys, master] if master in fit.stored else keys


class _Writer:
    """Collects what this rank reads of the tensors of one parameter and writes it together."""

    def __init__(self, fit: Fit, keys: Mapping[str, set[str]]) -> None:
        self._owners = {key: name for name, of_param in keys.items() for key in of_param}
        self._owners |= {f"model.{name}": name for name in fit.buffers}
        self._fit = fit
        self._keys = keys
        self._held: dict[str, dict[str, Flats]] = {}

    def wanted(self) -> dict[str, Wanted]:
        """Shares that this rank reads, by key, in the order of the checkpoint's index."""
        return {
            key: Wanted(DTYPES[stored.dtype], self._share(self._owners[key], stored.shape))
            for key, stored in self._fit.stored.items()
            if key in self._owners
        }

    def _share(self, name: str, shape: Sequence[int]) -> Share:
        fit = self._fit
        if name in fit.buffers:
            return Share.whole(shape)
        index, parameters = fit.params[name], fit.runtime.parameters
        return share_of(parameters, index, parameters.own_ranges(index))

    def take(self, key: str, flats: Flats) -> None:
        """Take one tensor, and write its parameter or buffer once all of it is there."""
        name, fit = self._owners[key], self._fit
        if name in fit.buffers:
            fit.tensors.write(fit.tensors.entry(fit.buffers[name]), Share.whole(fit.stored[key].shape).tensor(flats))
            return
        held = self._held.setdefault(name, {})
        held[key] = flats
        if held.keys() == self._keys[name]:
            self._write_param(name, self._held.pop(name))

    def _write_param(self, name: str, held: Mapping[str, Flats]) -> None:
        """Write the finest stored value and, for an optimizer, its states: zeros where none are stored."""
        fit, prefix = self._fit, f"optimizer.state.{name}"
        runtime, index = fit.runtime, fit.params[name]
        source = f"{prefix}.{MASTER_PART}" if f"{prefix}.{MASTER_PART}" in held else f"model.{name}"
        states = {state: held[key] for state in fit.states or () if (key := f"{prefix}.{state}") in held}
        handed_over = runtime.parameters.staging.dtypes[index]
        is_finer = torch.promote_types(DTYPES[fit.stored[source].dtype], handed_over) is not handed_over
        is_exact = runtime.parameters.is_trained(index) and (fit.states is not None or is_finer)
        if runtime.parameters.staging.holds(index):
            known = None if fit.states is None else states
            _stage(runtime, index, self._share(name, ()), held[source], known, is_exact=is_exact)
            return
        value = [flat.float() if is_exact else round_to(flat, handed_over) for flat in held[source]]
        runtime.parameters.write_own(index, value, None if fit.states is None else states)


def _stage(
    runtime: ModelRuntime, index: int, share: Share, value: Flats, states: Mapping[str, Flats] | None, *, is_exact: bool
) -> None:
    """Write a parameter without chunks: the first rank keeps it, the others learn that it has a value.

    Without ``states`` the old ones stay.
    """
    if not share.ranges:
        runtime.parameters.write_param(index, stand_in(runtime.parameters.staging.dtypes[index], share.shape))
        return
    whole = share.tensor(value)
    if not is_exact:
        runtime.parameters.write_param(index, whole, keep_finer=False)
        return
    kept = runtime.parameters.staging.kept(index)[1]
    lists = {} if kept is None else dict(kept.lists)
    if states is not None:
        lists = {name: share.tensor(flats) for name, flats in states.items()}
    runtime.parameters.write_state(index, lists, whole.float())


def resume(fit: Fit, objects: Mapping[str, Any], optimizer: ChunkOptimizer, groups: list[dict[str, Any]]) -> None:
    """Restore step counts, hyperparameters, a loss scale that is dynamic on both sides, then generators."""
    steps = {fit.params[name]: count for name, count in objects["optimizer"]["steps"].items()}
    optimizer.continue_from(groups, steps)
    scale, saved = fit.runtime.clipping.loss_scale, objects["loss_scale"]
    if scale is not None and scale.is_dynamic and saved is not None:
        scale.load_state_dict(saved)
    write_generators_of(fit.runtime.ranks, objects["generators"])


def _listed(names: Iterable[str]) -> str:
    return first_names(sorted(names))
