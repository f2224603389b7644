"""What is asked of the update over quantised states, on whatever runs it: a GPU, or Triton's interpreter."""

from dataclasses import replace
from functools import partial

import torch
from kernel_chunks import DTYPES, HYPER, Check, values
from kernel_reference import assert_near, exact_update, expected_cast, num_ulp
from torch import Tensor

from chunkc.ir.state_spec import BLOCK_NUMEL
from chunkc.runtime.update.block_quantisation import (
    code_borders,
    code_tables,
    dequantise,
    is_signed,
    quantise,
    read_list,
    write_list,
)
from chunkc.runtime.update.rules import ADAM_8BIT
from chunkc.runtime.update.update_inputs import StepInputs, tables_of
from chunkc.triton_kernels.block_update import block_update_launch
from chunkc.triton_kernels.launch import make_tiles

SPEC = ADAM_8BIT.states
SIZES = (1, 17, 255, 256, 257, 1024, 1500, 4096 + 40)
STEPS = {param: step for param, step in enumerate((7, 1, 9, 2, 1, 5, 3, 10)) if param not in (2, 6)}
Lists = dict[str, Tensor]


def chunk_of(grad: torch.dtype, payload: torch.dtype, scale: float) -> tuple[Lists, list[tuple[int, int, int]]]:
    """Lists with parameters of awkward sizes, each at a block; NaN or 255 in between."""
    pieces, at = [], BLOCK_NUMEL
    for param, size in enumerate(SIZES):
        pieces.append((at, at + size, param))
        at += -(-size // BLOCK_NUMEL) * BLOCK_NUMEL
    numel = at + 7
    lists = {
        "grad": torch.full((numel,), torch.nan, dtype=grad),
        "payload": torch.full((numel,), torch.nan).to(payload),
    }
    for entry in SPEC.lists():
        fill = 255 if entry.dtype == "uint8" else torch.nan
        lists[entry.name] = torch.full((entry.entries(0, numel).stop,), fill, dtype=getattr(torch, entry.dtype))
    for start, end, param in pieces:
        lists["param32"][start:end] = values(end - start, 10 * param, 0.02)
        lists["grad"][start:end] = (values(end - start, 10 * param + 1, 1e-2) / scale).to(grad)
        for position, name in enumerate(SPEC.names, 1):
            state = values(end - start, 10 * param + 1 + position, 1e-2)
            write_list(SPEC, states_of(lists), position, start, end, state if is_signed(name) else state.square())
    return lists, pieces


def states_of(lists: Lists) -> list[Tensor]:
    return [lists[entry.name] for entry in SPEC.lists()]


def run(
    lists: Lists, pieces: list[tuple[int, int, int]], scale: float, device: torch.device, flag: float = 0.0
) -> Lists:
    """The lists after one update, on the host; payload and gradient are one where they were."""
    is_overlay = lists["payload"] is lists["grad"]
    after = {name: data.to(device, copy=True) for name, data in lists.items()}
    after["payload"] = after["grad"] if is_overlay else after["payload"]
    rows, row_of_param = (
        table.to(device) for table in tables_of(StepInputs({p: HYPER for p in STEPS}, STEPS, len(SIZES)))
    )
    control = torch.tensor([scale, flag], device=device)
    states = [*states_of(after), *code_tables(device)]
    tiles = make_tiles(pieces, device)
    tables = (tiles, row_of_param, rows, control)
    block_update_launch("adam_8bit", states, after["grad"], after["payload"], *tables).run()
    return {name: data.cpu() for name, data in after.items()}


def update(grad: torch.dtype, payload: torch.dtype, device: torch.device) -> None:
    """Parameters as Adam's from the decoded states; codes are those of the exact states, or the next on a border."""
    scale = 0.5 if grad is torch.float16 else 1 / 3
    scale = float(torch.tensor(scale, dtype=torch.float32))
    before, pieces = chunk_of(grad, payload, scale)
    if grad is payload:
        before["payload"] = before["grad"]
    after = run(before, pieces, scale, device)
    rows, row_of_param = tables_of(StepInputs({p: HYPER for p in STEPS}, STEPS, len(SIZES)))
    for start, end, param in pieces:
        new = {n: read_list(SPEC, states_of(after), i, start, end) for i, n in enumerate(("param32", *SPEC.names))}
        old = {n: read_list(SPEC, states_of(before), i, start, end) for i, n in enumerate(("param32", *SPEC.names))}
        cast = expected_cast(new["param32"], payload, device)
        assert torch.equal(after["payload"][start:end], cast), f"param16 of {param} is not param32 rounded"
        if param not in STEPS:
            assert all(torch.equal(new[name], old[name]) for name in new), f"{param} has changed"
            continue
        row = rows[int(row_of_param[param])]
        gradient, moments = before["grad"][start:end], [old[name] for name in SPEC.names]
        exact = exact_update("adam", old["param32"], gradient, moments, row, scale)
        assert_near("param32", new["param32"], exact["param32"], num_ulp(device))
        for position, name in enumerate(SPEC.names, 1):
            _check_codes(name, states_of(after), position, (start, end), exact[name].value)
    _check_gaps(before, after, pieces)


def _check_codes(name: str, lists: list[Tensor], position: int, piece: tuple[int, int], exact: Tensor) -> None:
    """The code of the exact quotient, or its neighbour where this is within 2^-20 of their border."""
    start, end = piece
    codes, signed = lists[position][start:end].long(), is_signed(name)
    scales = lists[position + len(SPEC.names)][start // BLOCK_NUMEL : -(-end // BLOCK_NUMEL)].double()
    padded = torch.zeros(len(scales) * BLOCK_NUMEL, dtype=torch.float64)
    padded[: end - start] = exact
    largest = padded.view(-1, BLOCK_NUMEL).abs().amax(dim=1)
    assert bool(((scales - largest).abs() <= 2.0**-21 * largest).all()), f"scales of {name} are off"
    quotients = exact / largest.repeat_interleave(BLOCK_NUMEL)[: end - start]
    borders = code_borders(signed).double()
    margin = 2.0**-20 * quotients.abs() + 2.0**-40
    least, most = (torch.searchsorted(borders, quotients + sign * margin) for sign in (-1, 1))
    assert bool(((codes >= least) & (codes <= most)).all()), f"codes of {name} are off"
    assert float((least != most).double().mean()) < 0.01, "the bound asks for nothing"


def _check_gaps(before: Lists, after: Lists, pieces: list[tuple[int, int, int]]) -> None:
    for entry in SPEC.lists():
        outside = torch.ones(len(before[entry.name]), dtype=torch.bool)
        for start, end, _ in pieces:
            outside[entry.entries(start, end)] = False
        old, new = (data[entry.name][outside] for data in (before, after))
        assert torch.equal(old.nan_to_num(nan=-7.0), new.nan_to_num(nan=-7.0)), f"padding of {entry.name} has changed"


def overflow(device: torch.device) -> None:
    before, pieces = chunk_of(torch.float16, torch.float16, 1.0)
    before["payload"] = before["grad"]
    after = run(before, pieces, 1.0, device, flag=1.0)
    for start, end, _ in pieces:
        assert torch.equal(after["payload"][start:end], before["param32"][start:end].half())
        for position in range(3):
            found, wanted = (read_list(SPEC, states_of(data), position, start, end) for data in (after, before))
            assert torch.equal(found, wanted)


def encoding(device: torch.device) -> None:
    """With betas of 0 in a first step an update encodes gradients: beside `quantise`, code for code."""
    hyper = replace(HYPER, beta1=0.0, beta2=0.0, lr=0.0, weight_decay=0.0)
    gradient = torch.cat([
        values(BLOCK_NUMEL, 1) * torch.exp2(torch.linspace(0, -60, BLOCK_NUMEL)), torch.zeros(BLOCK_NUMEL),
        torch.full((BLOCK_NUMEL,), 2.0**-101), -values(BLOCK_NUMEL, 2).abs(), values(100, 3) * 1e-9,
    ])  # fmt: skip
    numel = len(gradient)
    rows, row_of_param = (table.to(device) for table in tables_of(StepInputs({0: hyper}, {0: 1}, 1)))
    lists = {
        entry.name: torch.zeros(entry.entries(0, numel).stop, dtype=getattr(torch, entry.dtype), device=device)
        for entry in SPEC.lists()
    }
    tables = (make_tiles([(0, numel, 0)], device), row_of_param, rows, torch.tensor([1.0, 0.0], device=device))
    states = [*states_of(lists), *code_tables(device)]
    block_update_launch("adam_8bit", states, gradient.to(device), torch.zeros(numel, device=device), *tables).run()
    for name, state in (("exp_avg", gradient), ("exp_avg_sq", gradient * gradient)):
        codes, scales = quantise(state, signed=is_signed(name))
        assert torch.equal(lists[name].cpu(), codes) and torch.equal(lists[f"{name}_scale"].cpu(), scales), name


def nan_takes_its_block(device: torch.device) -> None:
    before, pieces = chunk_of(torch.float32, torch.float32, 1.0)
    start = pieces[-1][0]
    before["grad"][start + 300] = torch.inf
    after = run(before, pieces, 1.0, device)
    codes, scales = after["exp_avg"][start : start + 768], after["exp_avg_scale"][start // 256 : start // 256 + 3]
    found = dequantise(codes, scales, signed=True).view(3, BLOCK_NUMEL).isnan()
    assert found.any(dim=1).tolist() == found.all(dim=1).tolist() == [False, True, False]


CHECKS: dict[str, Check] = {
    **{
        f"update[{grad}-{payload}]": partial(update, DTYPES[grad], DTYPES[payload])
        for grad, payload in (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("fp32", "bf16"))
    },
    "overflow": overflow,
    "encoding": encoding,
    "nan_takes_its_block": nan_takes_its_block,
}
