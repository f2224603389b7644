"""What is asked of the update kernel, on whatever runs it: a GPU, or Triton's interpreter in host memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch
from kernel_chunks import DTYPES, HYPER, LISTS, SIZES, Check, KernelChunk, inputs_of, step_inputs, values
from kernel_reference import bits
from torch import Tensor

from chunkc.runtime.update.rules import LION, SGD, SGD_MOMENTUM, AdamHyper, Hyper, LionHyper, SgdHyper, UpdateRule
from chunkc.runtime.update.update_inputs import StepInputs, tables_of
from chunkc.triton_kernels.cast import restore
from chunkc.triton_kernels.chunk_update import ROW_COLUMNS, chunk_update_launch
from chunkc.triton_kernels.grad_norm import MAX_RELATIVE_ERROR, grad_norm
from chunkc.triton_kernels.launch import BLOCK, MAX_NUMEL, make_tiles

OTHER_RULES: dict[str, tuple[UpdateRule, Callable[..., Hyper], tuple[tuple[float, ...], ...]]] = {
    "sgd": (SGD, partial(SgdHyper, nesterov=False),
            ((0.1, 0.0, 0.0, 0.1), (3e-3, 0.0, 0.5, 0.01), (1e-2, 0.0, 0.0, 0.0))),
    "sgd_momentum": (SGD_MOMENTUM, partial(SgdHyper, nesterov=False),
                     ((0.1, 0.9, 0.25, 0.1), (3e-3, 0.8, 0.5, 0.01), (1e-2, 0.0, 0.0, 0.0))),
    "nesterov": (SGD_MOMENTUM, partial(SgdHyper, nesterov=True),
                 ((0.1, 0.9, 0.0, 0.1), (3e-3, 0.8, 0.0, 0.01), (1e-2, 0.7, 0.0, 0.0))),
    "lion": (LION, LionHyper, ((1e-3, 0.9, 0.99, 0.1), (3e-4, 0.8, 0.95, 0.01), (1e-2, 0.9, 0.99, 0.0))),
}  # fmt: skip
"""Rule, its hyperparameters, and those of three groups, at steps 7, 1 and 9."""
OTHER_MUTATIONS: list[Callable[[Any, int], tuple[Any, int]]] = [
    lambda hyper, step: (replace(hyper, lr=hyper.lr * 0.95), step),
    lambda hyper, step: (replace(hyper, weight_decay=0.0), step),
]

FEW = (1, 17, 33, 40, 2100, 257, 9, 700)


def update(grad: torch.dtype, payload: torch.dtype, decoupled: bool, is_long: bool, device: torch.device) -> None:
    sizes, scale = SIZES if is_long else SIZES[:-1], 2.0**-10 if decoupled else 1 / 3
    chunk = KernelChunk.make(device, step_inputs(decoupled, len(sizes)), grad, payload, sizes, scale=scale)
    chunk.launch().run()
    chunk.check()


def other_groups(name: str) -> tuple[UpdateRule, list[tuple[Hyper, int]]]:
    rule, make, rows = OTHER_RULES[name]
    return rule, [(make(*row), step) for row, step in zip(rows, (7, 1, 9), strict=True)]


def other_rule(name: str, grad: torch.dtype, payload: torch.dtype, device: torch.device) -> None:
    rule, groups = other_groups(name)
    inputs, is_overlay = inputs_of(groups), grad is payload
    chunk = KernelChunk.make(device, inputs, grad, payload, SIZES[:-1], overlay=is_overlay, scale=1 / 3, rule=rule)
    chunk.launch().run()
    chunk.check()
    chunk.control[1] = 1.0
    chunk.before.update({list_name: data.cpu().clone() for list_name, data in chunk.after.items()})
    chunk.launch().run()
    chunk.check()


def other_rule_rejected(name: str, device: torch.device) -> None:
    """A kernel with another learning rate, decay or count of steps fails the comparison."""
    rule, groups = other_groups(name)
    for mutate in OTHER_MUTATIONS:
        wrong = inputs_of([mutate(hyper, step) for hyper, step in groups], len(FEW))
        if wrong == inputs_of(groups, len(FEW)):
            continue
        chunk = KernelChunk.make(device, inputs_of(groups, len(FEW)), torch.float16, torch.float16, FEW, rule=rule)
        tables = tables_of(wrong)
        chunk.tables = (tables[1].to(device), tables[0].to(device))
        chunk.launch().run()
        _must_fail(chunk)


def overlay(dtype: torch.dtype, aligned: bool, device: torch.device) -> None:
    chunk = KernelChunk.make(device, step_inputs(), dtype, dtype, FEW, aligned=aligned, overlay=True, scale=0.5)
    chunk.launch().run()
    chunk.check()


def payload_is_param32(device: torch.device) -> None:
    chunk = KernelChunk.make(device, step_inputs(), torch.bfloat16)
    chunk.after["payload"], chunk.before["payload"] = chunk.after["param32"], chunk.before["param32"]
    chunk.launch().run()
    chunk.check()


def overflow(is_overlay: bool, flag: float, device: torch.device) -> None:
    """With the flag up nothing of the gradients gets anywhere, and param16 is param32 again."""
    chunk = KernelChunk.make(device, step_inputs(), torch.float16, torch.float16, FEW, overlay=is_overlay)
    chunk.control[1] = flag
    for at, value in ((0, torch.nan), (1, torch.inf), (100, -torch.inf)):
        chunk.after["grad"][chunk.pieces[-1][0] + at] = value
        chunk.before["grad"][chunk.pieces[-1][0] + at] = value
    chunk.launch().run()
    chunk.check()


def no_row_at_all(device: torch.device) -> None:
    """Every parameter inactive, and a table without rows: nothing of it is read."""
    inputs = StepInputs({}, {}, len(FEW))
    chunk = KernelChunk.make(device, inputs, torch.float16, torch.float16, FEW, overlay=True)
    chunk.tables = (chunk.tables[0], torch.empty(0, ROW_COLUMNS, device=device))
    chunk.launch().run()
    chunk.check()


def tables_are_read_at_each_run(device: torch.device) -> None:
    """One launch, run again after its tables were written anew: the second step's row, scale and flag count."""
    chunk = KernelChunk.make(device, step_inputs(num_params=len(FEW)), torch.float32, torch.float16, FEW)
    launch = chunk.launch()
    launch.run()
    chunk.check()
    hypers = {param: replace(HYPER, lr=0.5) for param in range(len(FEW))}
    chunk.inputs = StepInputs(hypers, dict.fromkeys(hypers, 3), len(FEW))
    rows, row_of_param = tables_of(chunk.inputs)
    chunk.tables[1][:1].copy_(rows)
    chunk.tables[0].copy_(row_of_param)
    chunk.control[0] = chunk.scale = 0.25
    chunk.before.update({name: data.cpu().clone() for name, data in chunk.after.items()})
    launch.run()
    chunk.check()
    chunk.control[1] = 1.0
    chunk.before.update({name: data.cpu().clone() for name, data in chunk.after.items()})
    launch.run()
    chunk.check()


def no_elements(device: torch.device) -> None:
    rows, row_of_param = (table.to(device) for table in tables_of(StepInputs({}, {}, 1)))
    control = torch.tensor([1.0, 0.0], device=device)
    for numel in (0, 40):
        lists = [torch.full((numel,), torch.nan, device=device) for _ in range(5)]
        tables = (make_tiles([(7, 7, 0)], device), row_of_param, rows, control)
        chunk_update_launch("adam", lists[2:], *lists[:2], *tables).run()
        assert all(bool(data.isnan().all()) for data in lists)


def misaligned_lists(device: torch.device) -> None:
    chunk = KernelChunk.make(device, step_inputs(), torch.bfloat16, torch.float16, FEW, offset=1)
    chunk.launch().run()
    chunk.check()


def nan_stays_in_its_element(device: torch.device) -> None:
    chunk = KernelChunk.make(device, step_inputs(), torch.float16, torch.float16, FEW)
    at = chunk.pieces[-1][0] + 50
    chunk.after["grad"][at] = torch.nan
    chunk.launch().run()
    inside = torch.zeros(chunk.before["grad"].numel(), dtype=torch.bool)
    for start, end, param in chunk.pieces:
        inside[start:end] = param in chunk.inputs.hypers
    inside[at] = False
    for name in (*LISTS, "payload"):
        found = chunk.after[name].cpu()
        assert bool(found[at].isnan()) and bool(found[inside].isfinite().all())


def offsets_beyond_32_bits(make: Callable[[str, torch.dtype], Tensor], device: torch.device) -> None:
    """The last elements of the largest chunk (`MAX_NUMEL`) get the bits that a small chunk gives."""
    used = 3000
    triple = [values(used, 1, 0.02), values(used, 2, 0.02), values(used, 3, 0.02).square()]
    sources = [values(used, 4).half(), *triple]
    rows, row_of_param = (t.to(device) for t in tables_of(StepInputs({0: HYPER}, {0: 5}, 1)))
    control = torch.tensor([1.0, 0.0], device=device)
    small = [torch.zeros_like(data, device=device) for data in sources]
    large = [make(name, data.dtype) for name, data in zip(("payload", *LISTS), sources, strict=True)]
    for lists, end in ((small, used), (large, MAX_NUMEL)):
        for data, source in zip(lists, sources, strict=True):
            data[end - used :] = source.to(device)
        tiles = make_tiles([(end - used, end, 0)], device)
        tables = (tiles, row_of_param, rows, control)
        chunk_update_launch("adam", lists[1:], lists[0], lists[0], *tables).run()
        restore(lists[1], lists[0], tiles)
        out = torch.zeros(2, device=device)
        grad_norm(lists[1], tiles, out)
        exact = float(lists[1][-used:].double().square().sum())
        assert abs(float(out[0]) - exact) <= MAX_RELATIVE_ERROR * exact
    for a, b, source in zip(small, large, sources, strict=True):
        assert torch.equal(bits(a), bits(b[-used:])) and not torch.equal(a.cpu(), source)
        assert not bool(b[:used].any()) and not bool(b[-2 * used : -used].any())


def sparse_offsets_beyond_32_bits(device: torch.device) -> None:
    """The same in sparse files, which take no room where nothing is written."""
    with TemporaryDirectory() as folder:
        offsets_beyond_32_bits(
            lambda name, dtype: torch.from_file(f"{folder}/{name}", shared=True, size=MAX_NUMEL, dtype=dtype), device
        )


def place_does_not_change_bits(decoupled: bool, device: torch.device) -> None:
    """The same elements in vectors, in edges, and cut at other places, over two steps."""
    numel = BLOCK + 177
    whole = _two_steps(device, decoupled, [0, numel])
    for cuts in (
        [0, 1, 9, 40, 41, 1000, numel],
        [0, 15, 16, 31, 33, 1024, 1100, numel],
        [*range(0, 140, 7), numel],
    ):
        found = _two_steps(device, decoupled, cuts)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(whole, found, strict=True)), cuts


def _two_steps(device: torch.device, decoupled: bool, cuts: list[int]) -> list[Tensor]:
    numel = cuts[-1]
    start = [values(numel, 1, 0.02), values(numel, 2, 0.02), values(numel, 3, 0.02).square()]
    ranges = _spread(cuts)
    lists = [torch.zeros(ranges[-1][1] + 3, device=device) for _ in range(3)]
    grad, payload = torch.zeros_like(lists[0]), torch.zeros_like(lists[0], dtype=torch.float16)
    tiles = make_tiles([(a, b, 0) for a, b in ranges], device)
    for step in (2, 3):
        inputs = StepInputs({0: replace(HYPER, decoupled=decoupled)}, {0: step}, 1)
        rows, row_of_param = (table.to(device) for table in tables_of(inputs))
        gradient = values(numel, 10 + step, 1e-2)
        for data, source in ((grad, gradient), *(zip(lists, start, strict=True) if step == 2 else ())):
            for (a, b), (c, d) in zip(pairwise(cuts), ranges, strict=True):
                data[c:d] = source[a:b].to(device)
        control = torch.tensor([1 / 3, 0.0], device=device)
        chunk_update_launch("adam", lists, grad, payload, tiles, row_of_param, rows, control).run()
    return [torch.cat([data[a:b] for a, b in ranges]).cpu() for data in (*lists, payload)]


def _spread(cuts: list[int]) -> list[tuple[int, int]]:
    ranges, at = [], 0 if len(cuts) == 2 else 3
    for i, (a, b) in enumerate(pairwise(cuts)):
        ranges.append((at, at + b - a))
        at += b - a + 1 + 5 * i % 11
    return ranges


def _each(inputs: StepInputs, hyper: Callable[[AdamHyper], AdamHyper], step: Callable[[int], int] = int) -> StepInputs:
    hypers = {param: hyper(old) for param, old in inputs.hypers.items()}
    return StepInputs(hypers, {param: step(old) for param, old in inputs.steps.items()}, inputs.num_params)


MUTATIONS: dict[str, Callable[[StepInputs], StepInputs]] = {
    "no bias correction": lambda inputs: _each(inputs, lambda h: h, lambda step: step if step == 1 else 10**7),
    "bias correction one step late": lambda inputs: _each(inputs, lambda h: h, lambda step: step + (step == 7)),
    "no weight decay": lambda inputs: _each(inputs, lambda h: replace(h, weight_decay=0.0)),
    "lr 5 % stale": lambda inputs: _each(inputs, lambda h: replace(h, lr=h.lr * 0.95)),
    "other kind of decay": lambda inputs: _each(inputs, lambda h: replace(h, decoupled=not h.decoupled)),
    "eps forgotten": lambda inputs: _each(inputs, lambda h: replace(h, eps=0.0)),
    "first step not first": lambda inputs: _each(inputs, lambda h: h, lambda step: max(step, 2)),
}


def rejected(mutation: str, decoupled: bool, device: torch.device) -> None:
    right = step_inputs(decoupled, len(FEW))
    chunk = KernelChunk.make(device, right, torch.float16, torch.float16, FEW)
    tables = tables_of(MUTATIONS[mutation](right))
    chunk.tables = (tables[1].to(device), tables[0].to(device))
    chunk.launch().run()
    _must_fail(chunk)


def dropped_tile_rejected(device: torch.device) -> None:
    chunk = KernelChunk.make(device, step_inputs(), torch.float16, torch.float16, FEW, overlay=True)
    start, end, param = chunk.pieces[-1]
    chunk.launch([*chunk.pieces[:-1], (start, end - 1, param)]).run()
    _must_fail(chunk)


def wrong_scale_rejected(device: torch.device) -> None:
    chunk = KernelChunk.make(device, step_inputs(), torch.float16, torch.float16, FEW, scale=0.5)
    chunk.control[0] = 0.5 * (1 + 2e-6)
    chunk.launch().run()
    _must_fail(chunk)


def _must_fail(chunk: KernelChunk) -> None:
    try:
        chunk.check()
    except AssertionError as error:
        assert "exactly" in str(error), error
        return
    raise AssertionError("the comparison passed")


CHECKS: dict[str, Check] = {
    **{
        f"update[{grad}-{payload}-{'AdamW' if decoupled else 'Adam'}]": partial(
            update, DTYPES[grad], DTYPES[payload], decoupled, decoupled == ((i + j) % 2 == 0)
        )
        for i, grad in enumerate(DTYPES)
        for j, payload in enumerate(DTYPES)
        for decoupled in (True, False)
    },
    **{
        f"other_rule[{name}-{grad}-{payload}]": partial(other_rule, name, DTYPES[grad], DTYPES[payload])
        for name in OTHER_RULES
        for grad, payload in (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32"))
    },
    **{f"other_rule_rejected[{name}]": partial(other_rule_rejected, name) for name in OTHER_RULES},
    **{
        f"overlay[{name}-{aligned}]": partial(overlay, DTYPES[name], aligned)
        for name in DTYPES
        for aligned in (True, False)
    },
    "payload_is_param32": payload_is_param32,
    **{f"overflow[{o}-{flag}]": partial(overflow, o, flag) for o in (True, False) for flag in (1.0, torch.nan)},
    "no_row_at_all": no_row_at_all,
    "tables_are_read_at_each_run": tables_are_read_at_each_run,
    "no_elements": no_elements,
    "misaligned_lists": misaligned_lists,
    "nan_stays_in_its_element": nan_stays_in_its_element,
    **{f"place_does_not_change_bits[{d}]": partial(place_does_not_change_bits, d) for d in (True, False)},
    **{f"rejected[{m}-{d}]": partial(rejected, m, d) for m in MUTATIONS for d in (True, False)},
    "dropped_tile_rejected": dropped_tile_rejected,
    "wrong_scale_rejected": wrong_scale_rejected,
}

HOST_CHECKS: dict[str, Check] = {"sparse_offsets_beyond_32_bits": sparse_offsets_beyond_32_bits}
"""What makes sense in host memory only."""
