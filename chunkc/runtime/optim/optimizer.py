"""The common base of chunkc's optimizers: torch's interface, run by the compiled model's step program.

The optimizer holds parameter groups and step counts; parameters, gradients and states stay in the model's chunks.
``step()`` snapshots the hyperparameters, advances the counts of the parameters that have a gradient (torch skips the
others) and launches the step program; updates run on workers while the caller goes on. Counts and values change in one
transaction (`chunkc.runtime.storage.transaction`): an exception leaves the step undone or all of it taken.

States exist once per model, so a parameter is stepped by one optimizer at a time. A new optimizer may take it over: it
starts from states of zero, and the optimizer before it is refused from then on. The first plan of a model makes room
for the states of the optimizer that was made last before it, or that ``compile(optimizer=)`` names.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from chunkc.errors import ChunkcError
from chunkc.runtime.model.optimizer_steps import OptimizerSteps
from chunkc.runtime.optim.state_dict import (
    Groups,
    check_range,
    check_states,
    find_runtime,
    managed,
    read_states,
    write_states,
)
from chunkc.runtime.optim.state_mapping import OptimizerState
from chunkc.runtime.optim.step_counts import StepCounts, names_of
from chunkc.runtime.update.rules import Hyper, UpdateRule, rule_of

UNSUPPORTED_OPTIONS: Final = ("amsgrad", "maximize", "differentiable")
"""Options of torch's optimizers that change what a step computes; others that chunkc lacks choose an implementation."""


class ChunkOptimizer(torch.optim.Optimizer):
    """An optimizer over chunks; subclasses say their rule, and what it makes of a group.

    Args:
        rule: of groups by default.
        defaults: hyperparameters, and the options of torch's optimizer, so that states can be exchanged with it.
        max_grad_norm: as of `chunkc.AdamW`.
    """

    def __init__(
        self, rule: UpdateRule, params: ParamsT, defaults: dict[str, Any], max_grad_norm: float | None
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self._check_max_norm()
        self._counts = StepCounts(rule)
        self._has_warned = False
        super().__init__(params, defaults)

    def needed_rule(self, groups: Groups) -> UpdateRule:
        """The rule of an optimizer made with ``groups``."""
        return self._counts.rule

    def _rule_of(self, groups: Groups) -> UpdateRule:
        """The rule of ``groups``, with the states that this optimizer keeps already."""
        kept, needed = self._counts.rule, self.needed_rule(groups)
        return kept if set(needed.states.names) <= set(kept.states.names) else needed

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        """Hyperparameters of a group as the rule takes them; every optimizer has its own."""
        raise NotImplementedError

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse options of torch's that would change what a step computes, and those that no group has."""
        if "max_grad_norm" in group:
            raise ChunkcError(
                "max_grad_norm bounds the norm of all gradients together and is no option of a group; pass it to the "
                "optimizer: chunkc.AdamW(groups, max_grad_norm=...)"
            )
        for name in UNSUPPORTED_OPTIONS:
            if group.get(name):
                raise ChunkcError(
                    f"{name}={group[name]} is not supported by chunkc's optimizers; leave it out of the group or the "
                    "state"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does.

        Raises:
            ChunkcError: for parameters of no or another compiled model, or states that its plan has no room for.
            ValueError: for hyperparameters out of range, as torch.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_range(group)
            self.check_group(group)
            runtime = self._common_runtime(group)
            if runtime is not None:
                self._declare(runtime, self.param_groups)
            if runtime is not None and self.max_grad_norm is not None:
                runtime.clipping.wants_norms = True
        except (ChunkcError, ValueError):
            self.param_groups.pop()
            raise
        self._counts.hold(runtime, group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Launch one update of every parameter that has a gradient, and return the closure's loss.

        Raises:
            ChunkcError: for a gradient already stepped, gradients of parameters not stepped here, or parameters that
                another optimizer has begun to step since. Nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ranks = self.runtime.ranks
        with (ranks if self.max_grad_norm is None else ranks.of_job).agreement_scope():
            hypers, steps = self._begin_step()
        if hypers:
            with ranks.agreement_scope():
                self.runtime.prepare_step(hypers)
                self.runtime.transactions.run(partial(self._take_step, hypers, steps))
        return loss

    def _begin_step(self) -> tuple[dict[int, Hyper], dict[int, int]]:
        """Return the inputs of a step, once all stages agree on how to clip; none without gradients."""
        self._counts.settle()
        runtime, groups = self.runtime, self._groups_by_index()
        self._declare(runtime, self.param_groups)
        active = runtime.check_step()
        if not active:
            self._warn_without_gradients()
            return {}, {}
        self._check_covered(active, groups.keys())
        self._counts.check_owned(active)
        inputs = self._inputs(active, groups)
        if self.max_grad_norm is not None:
            self._check_max_norm()
            runtime.clipping.agree_to_clip(self.max_grad_norm)
        return inputs

    def _inputs(
        self, active: Collection[int], groups: Mapping[int, dict[str, Any]]
    ) -> tuple[dict[int, Hyper], dict[int, int]]:
        """Hyperparameters and counts of a step of ``active`` now, by parameter."""
        snapshots = {id(group): self._hyper_of(group) for group in self.param_groups}
        hypers = {index: snapshots[id(groups[index])] for index in sorted(active)}
        return hypers, self._counts.following(hypers)

    def inputs_of_next_step(self, active: Set[int]) -> tuple[dict[int, Hyper], dict[int, int]] | None:
        """Inputs of a step of ``active`` now, by parameter; None where it would be refused."""
        try:
            groups = self._groups_by_index()
            return self._inputs(active, groups) if groups.keys() >= active else None
        except (ChunkcError, ValueError):  # the step says it
            return None

    def _take_step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> None:
        if self.max_grad_norm is not None:
            self.runtime.clipping.clip(self.max_grad_norm)
        self._counts.advance(steps, self.runtime.step(hypers, steps))
        self.runtime.expected_inputs = partial(_expected_inputs, weakref.ref(self))

    def state_dict(self) -> dict[str, Any]:
        """States in torch's layout: float32 copies, in 16-bit modes with ``master_param``."""
        counts, rule = self.step_counts, self._counts.rule

        def add_states(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {**state_dict, "state": read_states(rule, self.runtime, state_dict, self.param_groups, counts)}

        handle = self.register_state_dict_post_hook(add_states, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups, states and step counts of ``state_dict()``, here or of torch's optimizer.

        Raises:
            ChunkcError: for a state that does not fit, is of an untrained parameter, or asks for an unsupported option;
                ValueError, as torch, when the groups differ. Nothing has changed then.
        """
        self.runtime.transactions.run(partial(self._load, state_dict))

    def _load(self, state_dict: dict[str, Any]) -> None:
        loaded: dict[int, dict[str, Any]] = {}

        def take(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            loaded.update(self._check_loaded(state_dict))
            return {**state_dict, "state": {}}

        def write(_: torch.optim.Optimizer) -> None:
            write_states(self._counts.rule, self.runtime, loaded)
            steps = {index: state["step"] for index, state in loaded.items() if state["step"]}
            self._counts.replace(steps, owned=loaded)

        handles = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(write, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    @property
    def step_counts(self) -> dict[int, int]:
        """Steps of every stepped parameter, by index; ChunkcError when another optimizer took one over."""
        return dict(self._counts.current())

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """Mapping from each parameter that was ever stepped to its state; see `state_mapping`.

        Raises:
            ChunkcError: on access when another optimizer has begun to step the parameter since.
        """
        return OptimizerState(self._counts)

    @state.setter  # type: ignore[override]
    def state(self, value: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        if self._counts.runtime is not None:  # torch's own constructor assigns an empty one first
            self.state.replace(value)

    def continue_from(self, groups: Sequence[Mapping[str, Any]], steps: Mapping[int, int]) -> None:
        """Go on from states that the model was given: ``groups`` in torch's layout, step counts by index."""
        self.load_state_dict({"state": {}, "param_groups": list(groups)})
        self._counts.replace(steps)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give loaded groups the options that older states lack; torch calls this."""
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
        if state.get("state"):
            self.state = state["state"]
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ChunkcError(
            f"chunkc.{type(self).__name__} cannot be copied or pickled: its states live in the compiled model. "
            "Save optimizer.state_dict(), and load it into an optimizer of the other model"
        )

    def _check_max_norm(self) -> None:
        if self.max_grad_norm is not None and not self.max_grad_norm > 0.0:
            raise ValueError(f"max_grad_norm must be positive, found {self.max_grad_norm}; None clips nothing")

    @property
    def runtime(self) -> OptimizerSteps:
        """The compiled model that all its parameters belong to."""
        if self._counts.runtime is None:
            raise ChunkcError(f"chunkc.{type(self).__name__} has no parameters")
        return self._counts.runtime

    def _common_runtime(self, group: Mapping[str, Any]) -> OptimizerSteps | None:
        """Runtime of the group's parameters, the same as of the groups before; None while there are none."""
        runtime = self._counts.runtime
        names = group.get("param_names", [f"number {i}" for i in range(len(group["params"]))])
        for param, name in zip(group["params"], names, strict=True):
            found = find_runtime(param)
            if found is None:
                raise ChunkcError(
                    f"chunkc.{type(self).__name__} steps parameters of a compiled model, but parameter {name} of the "
                    f"group (shape {tuple(param.shape)}) is a plain tensor: compile the model before making the "
                    "optimizer, or pass its parameters"
                )
            if runtime is not None and found[0] is not runtime:
                name = found[0].parameters.name_of(found[1])
                raise ChunkcError(
                    f"all parameters of an optimizer belong to one compiled model, but {name!r} "
                    "belongs to another than those before: make one optimizer for each model"
                )
            runtime = found[0]
        return runtime

    def _check_loaded(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The loaded states by parameter; nothing where torch will refuse the groups."""
        sizes = [[len(g["params"]) for g in groups] for groups in (self.param_groups, state_dict["param_groups"])]
        if sizes[0] != sizes[1]:
            return {}
        for group in state_dict["param_groups"]:
            self.check_group(group)
        rule = self._rule_of(state_dict["param_groups"])
        self._has_room(self.runtime, rule)
        states = check_states(rule, state_dict, self.param_groups)
        self.declare(state_dict["param_groups"])
        return states

    def _groups_by_index(self) -> dict[int, dict[str, Any]]:
        """The group of every parameter; ChunkcError for one that no compiled model manages any more."""
        store = self.runtime.parameters
        pairs = [(param, group) for group in self.param_groups for param in group["params"]]
        if all(getattr(param, "chunkc_store", None) is store for param, _ in pairs):
            return {param.chunkc_index: group for param, group in pairs}
        return {managed(param)[1]: group for param, group in pairs}

    def _hyper_of(self, group: Mapping[str, Any]) -> Hyper:
        self.check_group(group)
        return self._hyper(group)

    def declare(self, groups: Groups) -> UpdateRule:
        """Let the first plan make room for the states of ``groups``; ChunkcError where it has none."""
        return self._declare(self.runtime, groups)

    def _declare(self, runtime: OptimizerSteps, groups: Groups) -> UpdateRule:
        rule = self._rule_of(groups)
        if not self._has_room(runtime, rule):
            runtime.parameters.state_spec = rule.states
        self._counts.rule = rule
        return rule

    def _has_room(self, runtime: OptimizerSteps, rule: UpdateRule) -> bool:
        """Whether plans make room for the states of ``rule``; ChunkcError where it is too late for that."""
        planned = rule_of(runtime.parameters.state_spec)
        has_room = planned.title == rule.title and set(rule.states.names) <= set(planned.states.names)
        if not has_room and runtime.parameters.layout is not None:
            name = type(self).__name__
            raise ChunkcError(
                f"the model's plan has room for the states of {planned.title} ({planned.states}), and chunkc.{name} "
                f"keeps {rule.states}: make the optimizer before the first forward, or name it: "
                f"chunkc.compile(..., optimizer={name.lower()!r})"
            )
        return has_room

    def _warn_without_gradients(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logging.getLogger("chunkc").warning(
                "%s.step() did nothing: no parameter has a gradient (said once per optimizer)", type(self).__name__
            )

    def _check_covered(self, active: frozenset[int], covered: Collection[int]) -> None:
        missing = sorted(active.difference(covered))
        if missing:
            raise ChunkcError(
                "a step updates the whole model, so one optimizer must hold every parameter that has a gradient; "
                f"{names_of(self.runtime, missing)} are not in its groups: add them with add_param_group, freeze them "
                "with requires_grad_(False) before compiling, or set their .grad to None"
            )


def _expected_inputs(
    optimizer: weakref.ref[ChunkOptimizer], active: Set[int]
) -> tuple[dict[int, Hyper], dict[int, int]] | None:
    """`ChunkOptimizer.inputs_of_next_step`, which keeps no optimizer alive."""
    found = optimizer()
    return None if found is None else found.inputs_of_next_step(active)
