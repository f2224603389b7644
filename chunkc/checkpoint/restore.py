"""Putting a run back: everything is compared with the model first, then written tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from chunkc.checkpoint.contents import MASTER, MOMENTS, Optimizer, Stateful
from chunkc.checkpoint.generators import write_generators
from chunkc.checkpoint.planners import load, stand_in
from chunkc.checkpoint.storage import SafetensorsReader
from chunkc.errors import CheckpointError
from chunkc.runtime.model import ModelRuntime
from chunkc.runtime.optimizer_state import check_options, managed
from chunkc.weights.tensors import ModelTensors

_MAX_NAMED = 5
T = TypeVar("T")


@dataclass(slots=True)
class Fit:
    """How the tensors of a checkpoint belong to a model.

    Attributes:
        shapes: of the stored tensors by key, as stand-ins.
        params: index of the parameter that each stored name (the first of a tied one) is here.
        buffers: first name here of each stored buffer.
    """

    path: Path
    runtime: ModelRuntime
    tensors: ModelTensors
    shapes: Mapping[str, torch.Tensor]
    params: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)

    def refuse(self, what: str) -> CheckpointError:
        """The error for a checkpoint of another model; nothing has changed."""
        return CheckpointError(f"{self.path} does not fit the model: {what}", path=self.path)


def stored_shapes(path: Path) -> dict[str, torch.Tensor]:
    """Stand-ins of all tensors of a checkpoint, in the order of its index."""
    found = SafetensorsReader(path).read_metadata().state_dict_metadata
    tensors = {key: m for key, m in found.items() if isinstance(m, TensorStorageMetadata)}
    return {key: stand_in(m.properties.dtype, m.size) for key, m in tensors.items()}


def fit_model(path: Path, model: nn.Module, runtime: ModelRuntime, objects: Mapping[str, Any]) -> Fit:
    """Compare names, tying and shapes.

    Raises:
        CheckpointError: naming what differs.
    """
    fit = Fit(path, runtime, ModelTensors(model), stored_shapes(path))
    ours = {info.name: (info.name, *info.aliases) for info in runtime.infos}
    indexes = {frozenset(names): index for index, names in enumerate(ours.values())}
    fit.params = _matched(fit, objects["model"]["params"], indexes, "parameters")
    by_names = {frozenset(e.names): e.name for e in fit.tensors.entries if e.param is None}
    fit.buffers = _matched(fit, objects["model"]["buffers"], by_names, "buffers")
    others = set(objects["model"]["others"]).symmetric_difference(fit.tensors.others)
    if others:
        raise fit.refuse(f"the extra states of {_listed(others)} are in one of the two only")
    shapes = {f"model.{name}": runtime.infos[index].shape for name, index in fit.params.items()}
    shapes |= {f"model.{name}": fit.tensors.entry(ours).shape for name, ours in fit.buffers.items()}
    for key, shape in shapes.items():
        if tuple(fit.shapes[key].shape) != tuple(shape):
            raise fit.refuse(f"{key} is {tuple(fit.shapes[key].shape)} there and {tuple(shape)} here")
    return fit


def _matched(fit: Fit, stored: Iterable[Sequence[str]], ours: Mapping[frozenset[str], T], what: str) -> dict[str, T]:
    """What each stored tensor is here, by its first name; tied tensors must be tied alike."""
    theirs = {frozenset(names): names[0] for names in stored}
    if theirs.keys() == ours.keys():
        return {name: ours[names] for names, name in theirs.items()}
    names_there, names_here = (frozenset().union(*keys) for keys in (theirs, ours))
    if names_there == names_here:
        loose = [name for names, name in theirs.items() if names not in ours]
        raise fit.refuse(f"{what} are tied in another way, for example {_listed(loose)}")
    only_there, only_here = names_there - names_here, names_here - names_there
    raise fit.refuse(
        f"its {what} {_listed(only_there)} are missing here, and {_listed(only_here)} here are missing in it. A "
        "checkpoint is loaded whole, into the architecture that was saved; for weights alone see chunkc.load_pretrained"
    )


def check_optimizer_fits(fit: Fit, optimizer: Optimizer, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a checkpoint in torch's layout, for those of ``optimizer``.

    Raises:
        CheckpointError: when the parameters are grouped otherwise, or one with moments is not trained here.
        ChunkcError: when the groups are of another optimizer.
    """
    runtime, groups, first = fit.runtime, [], 0
    ours = [[runtime.name_of(managed(p)[1]) for p in group["params"]] for group in optimizer.param_groups]
    theirs = [[runtime.name_of(fit.params[name]) for name in group["params"]] for group in saved["groups"]]
    if [set(names) for names in ours] != [set(names) for names in theirs]:
        raise fit.refuse(
            f"its optimizer has groups of {[len(names) for names in theirs]} parameters and the one here of "
            f"{[len(names) for names in ours]}, or other ones in a group: make the optimizer as when it was saved"
        )
    for names, group in zip(ours, saved["groups"], strict=True):
        check_options(group, bool(optimizer.defaults["decoupled_weight_decay"]))
        groups.append({**group, "params": list(range(first, first + len(names)))})
        first += len(names)
    untrained = [name for name in saved["steps"] if not runtime.is_trained(fit.params[name])]
    if untrained:
        raise fit.refuse(f"{_listed(untrained)} have optimizer states there and are not trained here")
    return groups


def write_model(fit: Fit, objects: Mapping[str, Any], model: nn.Module, *, with_moments: bool) -> None:
    """Write parameters, moments and buffers, one parameter at a time."""
    steps = objects["optimizer"]["steps"] if with_moments else {}
    writer = _Writer(fit, {name: set(_keys_of(fit, name, name in steps)) for name in fit.params})
    wanted = {key: shape for key, shape in fit.shapes.items() if key in writer.owners}
    load(SafetensorsReader(fit.path), wanted, writer.take)
    others = objects["model"]["others"]
    if others:
        model.load_state_dict(others, strict=False)


def _keys_of(fit: Fit, name: str, is_stepped: bool) -> list[str]:
    """Keys of the tensors of one parameter."""
    keys = [f"model.{name}"]
    keys += [f"optimizer.state.{name}.{moment}" for moment in MOMENTS if is_stepped]
    master = f"optimizer.state.{name}.{MASTER}"
    return [*keys, master] if master in fit.shapes else keys


class _Writer:
    """Collects the tensors of one parameter and writes them together."""

    def __init__(self, fit: Fit, keys: Mapping[str, set[str]]) -> None:
        self.owners = {key: name for name, found in keys.items() for key in found}
        self.owners |= {f"model.{name}": name for name in fit.buffers}
        self._fit = fit
        self._keys = keys
        self._held: dict[str, dict[str, torch.Tensor]] = {}

    def take(self, key: str, value: torch.Tensor) -> None:
        """One tensor of the checkpoint."""
        name, fit = self.owners[key], self._fit
        if name in fit.buffers:
            fit.tensors.write(fit.tensors.entry(fit.buffers[name]), value)
            return
        held = self._held.setdefault(name, {})
        held[key] = value
        if held.keys() == self._keys[name]:
            _write_param(fit.runtime, fit.params[name], name, self._held.pop(name))


def _write_param(runtime: ModelRuntime, index: int, name: str, held: Mapping[str, torch.Tensor]) -> None:
    """The finest value that was stored, and moments where there are any."""
    prefix = f"optimizer.state.{name}"
    value = held.get(f"{prefix}.{MASTER}", held[f"model.{name}"])
    exp_avg, exp_avg_sq = (held.get(f"{prefix}.{moment}") for moment in MOMENTS)
    handed_over = runtime.staging.dtypes[index]
    is_finer = torch.promote_types(value.dtype, handed_over) is not handed_over
    if not runtime.is_trained(index) or (exp_avg is None and not is_finer):
        runtime.write_param(index, value, keep_finer=False)
        return
    if exp_avg is None or exp_avg_sq is None:
        exp_avg, exp_avg_sq = _moments_here(runtime, index, value)
    runtime.write_state(index, exp_avg, exp_avg_sq, value.float())


def _moments_here(runtime: ModelRuntime, index: int, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments that the parameter has now."""
    if runtime.staging.is_blank(index):
        return torch.zeros(value.shape), torch.zeros(value.shape)
    return runtime.read_state(index)[:2]


def resume(
    fit: Fit,
    objects: Mapping[str, Any],
    optimizer: Optimizer,
    scheduler: Stateful | None,
    groups: list[dict[str, Any]],
) -> None:
    """What is not the model: step counts, hyperparameters, the scheduler, the loss scale where it is dynamic on both
    sides, and generators, which come last."""
    steps = {fit.params[name]: count for name, count in objects["optimizer"]["steps"].items()}
    optimizer.continue_from(groups, steps)
    if scheduler is not None:
        scheduler.load_state_dict(objects["scheduler"])
    scale, saved = fit.runtime.loss_scale, objects["loss_scale"]
    if scale is not None and scale.is_dynamic and saved is not None:
        scale.load_state_dict(saved)
    write_generators(objects["generators"]["0"])


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return (", ".join(found[:_MAX_NAMED]) or "none") + more
