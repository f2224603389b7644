"""Chunks for kernels: parameters of awkward sizes and places, NaN in all padding, tables from a step's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from kernel_reference import assert_near, bits, exact_update, expected_cast, num_ulp
from torch import Tensor

from chunkc.runtime.update.rules import ADAM, AdamHyper, Hyper, UpdateRule
from chunkc.runtime.update.update_inputs import StepInputs, tables_of
from chunkc.triton_kernels.chunk_update import chunk_update_launch
from chunkc.triton_kernels.launch import Launch, make_tiles

Check = Callable[[torch.device], None]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = (1, 15, 16, 17, 127, 128, 129, 2048, 100003)
HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
LISTS = ("param32", "exp_avg", "exp_avg_sq")
"""Of Adam."""


def values(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


def place(sizes: Sequence[int], aligned: bool = False) -> tuple[int, list[tuple[int, int, int]]]:
    """Elements of a chunk and its pieces, with gaps; as `chunk_mapping` aligns them, or at odd places."""
    pieces, at = [], 0 if aligned else 5
    for param, size in enumerate(sizes):
        pieces.append((at, at + size, param))
        at += size if not aligned else -(-size // 128) * 128
        at += 0 if aligned else 1 + 6 * param % 19
    return at + 7, pieces


@dataclass
class KernelChunk:
    """Lists in host memory as they were (``before``), and on the device as the kernel leaves them; gaps hold NaN."""

    rule: UpdateRule
    pieces: list[tuple[int, int, int]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    inputs: StepInputs
    scale: float
    device: torch.device
    tables: tuple[Tensor, Tensor]
    control: Tensor

    @classmethod
    def make(
        cls,
        device: torch.device,
        inputs: StepInputs,
        grad: torch.dtype = torch.float32,
        payload: torch.dtype = torch.float32,
        sizes: Sequence[int] = SIZES,
        *,
        aligned: bool = False,
        overlay: bool = False,
        scale: float = 1.0,
        offset: int = 0,
        rule: UpdateRule = ADAM,
    ) -> KernelChunk:
        """Random contents; states are NaN where a parameter is in its first step; lists start ``offset`` elements
        into their memory."""
        scale = float(torch.tensor(scale, dtype=torch.float32))
        numel, pieces = place(sizes, aligned)
        lists = [entry.name for entry in rule.states.lists()]
        dtypes = {"grad": grad, "payload": payload, **dict.fromkeys(lists, torch.float32)}
        before = {name: torch.full((numel,), torch.nan, dtype=dtype) for name, dtype in dtypes.items()}
        for start, end, param in pieces:
            size, first = end - start, inputs.steps.get(param) == 1
            before["param32"][start:end] = values(size, 10 * param, 0.02)
            before["grad"][start:end] = values(size, 10 * param + 1, 0.1 / scale).to(grad)
            for k, name in enumerate(rule.states.names):
                state = values(size, 10 * param + 2 + k, 0.03)
                before[name][start:end] = torch.nan if first else state.square() if k else state
        if overlay:
            before["payload"] = before["grad"]
        after = {name: _at_offset(data, offset, device) for name, data in before.items()}
        if overlay:
            after["payload"] = after["grad"]
        rows, row_of_param = tables_of(inputs)
        tables = (row_of_param.to(device), rows.to(device))
        return cls(
            rule, pieces, before, after, inputs, scale, device, tables, torch.tensor([scale, 0.0], device=device)
        )

    @property
    def lists(self) -> list[str]:
        return [entry.name for entry in self.rule.states.lists()]

    def launch(self, pieces: Sequence[tuple[int, int, int]] | None = None) -> Launch:
        tiles = make_tiles(self.pieces if pieces is None else pieces, self.device)
        states = [self.after[name] for name in self.lists]
        grad, payload = self.after["grad"], self.after["payload"]
        return chunk_update_launch(self.rule.name, states, grad, payload, tiles, *self.tables, self.control)

    def check(self, inputs: StepInputs | None = None) -> None:
        inputs = self.inputs if inputs is None else inputs
        rows, row_of_param = tables_of(inputs)
        found, ulps = {name: data.cpu() for name, data in self.after.items()}, num_ulp(self.device)
        for start, end, param in self.pieces:
            old = {name: data[start:end] for name, data in self.before.items()}
            new = {name: data[start:end] for name, data in found.items()}
            if param not in inputs.hypers or float(self.control[1]) != 0:
                assert all(torch.equal(bits(new[name]), bits(old[name])) for name in self.lists), f"{param} has changed"
            else:
                row = rows[int(row_of_param[param])]
                param32, *states = (old[name] for name in self.lists)
                exact = exact_update(self.rule.name, param32, old["grad"], states, row, self.scale)
                for name in self.lists:
                    assert_near(name, new[name], exact[name], ulps)
            cast = expected_cast(new["param32"], new["payload"].dtype, self.device)
            assert torch.equal(bits(new["payload"]), bits(cast)), f"param16 of {param} is not param32 rounded"
        self.check_untouched(found)

    def check_untouched(self, found: Mapping[str, Tensor]) -> None:
        """Padding has the bits it had, and so has a gradient chunk."""
        gaps = torch.ones(self.before["param32"].numel(), dtype=torch.bool)
        for start, end, _ in self.pieces:
            gaps[start:end] = False
        assert bool(gaps.any())
        for name, data in found.items():
            assert torch.equal(bits(data)[gaps], bits(self.before[name])[gaps]), f"padding of {name} has changed"
        if self.after["grad"] is not self.after["payload"]:
            assert torch.equal(bits(found["grad"]), bits(self.before["grad"])), "the gradient chunk has changed"


def _at_offset(data: Tensor, offset: int, device: torch.device) -> Tensor:
    memory = torch.full((data.numel() + offset,), torch.nan, dtype=data.dtype, device=device)
    memory[offset:] = data
    return memory[offset:]


def step_inputs(decoupled: bool = True, num_params: int = len(SIZES)) -> StepInputs:
    """Three groups of Adam at steps 1, 7 and 10000, and one of them without decay; see `inputs_of`."""
    groups = (
        (replace(HYPER, decoupled=decoupled), 7),
        (replace(HYPER, lr=3e-4, beta1=0.8, beta2=0.95, weight_decay=0.01, decoupled=decoupled), 1),
        (replace(HYPER, lr=1e-2, eps=1e-6, weight_decay=0.0, decoupled=decoupled), 10_000),
    )
    return inputs_of(groups, num_params)


def inputs_of(groups: Sequence[tuple[Hyper, int]], num_params: int = len(SIZES)) -> StepInputs:
    """Three groups, each with its step; parameters 2 and 6 inactive."""
    active = [param for param in range(num_params) if param not in (2, 6)]
    chosen = {param: groups[0 if param == num_params - 1 else param % 3] for param in active}
    return StepInputs(
        hypers={param: hyper for param, (hyper, _) in chosen.items()},
        steps={param: step for param, (_, step) in chosen.items()},
        num_params=num_params,
    )
