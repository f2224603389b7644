"""Steps of several micro-batches, whose losses are divided by their number: loops, references and plans."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from models import Batch, Case, loss_of
from placements import cuts_of, options_of
from plan_runner import PlanRunner, Setup
from torch import nn
from training import Recipe, Trained, cast, read_state, to_host

import chunkc
from chunkc.ir.plan import Plan
from chunkc.passes import PlanOptions

Norms = list[float]


def micro_batches(batches: Sequence[Batch], step: int, num: int) -> list[Batch]:
    return [batches[(step * num + i) % len(batches)] for i in range(num)]


def large(parts: Sequence[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def norm_of(model: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def train_in_parts(
    model: nn.Module, batches: Sequence[Batch], optimizer: torch.optim.Optimizer, recipe: Recipe, num: int
) -> tuple[Trained, Norms]:
    """The usual loop with ``num`` micro-batches a step, and the norm of the gradients after each of the first step."""
    found, norms = Trained(), Norms()
    torch.manual_seed(recipe.seed)
    for step in range(recipe.num_steps):
        losses = []
        for part in micro_batches(batches, step, num):
            loss = loss_of(model(**part)) / num
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                norms.append(norm_of(model))
        if step == 0:
            found.gradients = {n: to_host(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(sum(losses))
    read_state(found, model, optimizer)
    return found, norms


def train_runner(runner: PlanRunner, setup: Setup, recipe: Recipe) -> tuple[Trained, Norms]:
    """`train_in_parts` of the runner's model with the micro-batches that ``setup`` is planned for."""
    runner.reset(setup)
    optimizer = chunkc.AdamW(runner.model.parameters(), **recipe.options)
    found, norms = train_in_parts(runner.model, runner.batches, optimizer, recipe, setup.options.accumulate)
    found.params = {
        info.name: runner.compiled.runtime.parameters.read_exact(i) for i, info in enumerate(runner.plan.layout.params)
    }
    return found, norms


def train_large(case: Case, recipe: Recipe, num: int) -> Trained:
    """Eager PyTorch in fp32 with one batch of all samples a step; measures the largest update."""
    model, batches = case.build(), case.batches()
    optimizer = recipe.plain(model.parameters())
    found = Trained()
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(recipe.num_steps):
        loss = loss_of(model(**large(micro_batches(batches, step, num))))
        loss.backward()
        if step == 0:
            found.gradients = {n: to_host(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        for p, q in zip(model.parameters(), before, strict=True):
            change = float((p.detach() - q).abs().max()) if p.numel() else 0.0
            found.largest_update = max(found.largest_update, change)
            q.copy_(p.detach())
        found.losses.append(loss.item())
    read_state(found, model, optimizer)
    return found


def train_plain_16_in_parts(case: Case, recipe: Recipe, num: int, dtype: torch.dtype = torch.bfloat16) -> Trained:
    """Eager PyTorch in ``dtype``, gradients added up by autograd in it, with an fp32 master that AdamW steps."""
    model = case.build()
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    masters = {n: nn.Parameter(p.detach().float().clone()) for n, p in names.items()}
    for p in model.parameters():
        p.data = p.data.to(dtype)
    optimizer = torch.optim.AdamW(masters.values(), **recipe.options)
    batches, found = [cast(batch, dtype) for batch in case.batches()], Trained()
    for step in range(recipe.num_steps):
        losses = []
        for part in micro_batches(batches, step, num):
            loss = loss_of(model(**part)) / num
            loss.backward()
            losses.append(loss.item())
        for n, p in names.items():
            masters[n].grad = None if p.grad is None else p.grad.float()
        if step == 0:
            found.gradients = {n: to_host(m.grad) for n, m in masters.items() if m.grad is not None}
        optimizer.step()
        with torch.no_grad():
            for n, p in names.items():
                p.copy_(masters[n])
        model.zero_grad()
        found.losses.append(sum(losses))
    found.params = {n: to_host(p) for n, p in model.named_parameters()}
    found.params.update({n: to_host(m) for n, m in masters.items()})
    return found


def tightest(runner: PlanRunner, num: int) -> Setup:
    options = replace(options_of(runner), accumulate=num)
    device_nbytes, host_nbytes = runner.smallest(options)
    return Setup(options, device_nbytes=device_nbytes, host_nbytes=host_nbytes)


def tightest_plan(runner: PlanRunner, num: int) -> Plan:
    key = f"tightest {num}"
    if key not in runner.plans:
        runner.reset(tightest(runner, num))
        runner.plans[key] = runner.next_plan
    return runner.plans[key]


def _like_tightest(runner: PlanRunner, num: int, **wishes: object) -> Setup:
    plan = tightest_plan(runner, num)
    options = PlanOptions(chunk_numel=plan.layout.chunk_numel, cuts=cuts_of(plan), accumulate=num)
    return Setup(replace(options, **wishes), host_arithmetic=True)  # type: ignore[arg-type]


PLACEMENTS: dict[str, Callable[[PlanRunner, int], Setup]] = {
    "smallest": tightest,
    "all_on_host": lambda runner, num: _like_tightest(runner, num, os_home="host"),
    "some_of_each": lambda runner, num: _like_tightest(
        runner, num, os_home="host", num_resident_states=1, streamed_share=0.4
    ),
    "whole_and_streamed": lambda runner, num: _like_tightest(
        runner, num, os_home="host", num_resident_states=2, keeps_payloads=True, streamed_share=0.4
    ),
    "all_streamed": lambda runner, num: _like_tightest(runner, num, os_home="host", streamed_share=1.0),
}


def all_on_device(runner: PlanRunner, num: int) -> Setup:
    return _like_tightest(runner, num, os_home="device", chunk_numel=None)
