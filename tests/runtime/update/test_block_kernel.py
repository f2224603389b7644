"""The host update over 8-bit states: the compiled loop beside the eager formula, and the formula beside float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from chunkc.ir.state_spec import BLOCK_NUMEL
from chunkc.runtime.update import block_kernel as module
from chunkc.runtime.update.block_quantisation import code_borders, is_signed, read_list, write_list
from chunkc.runtime.update.cpu_update import PARALLEL_NUMEL, ChunkUpdate, Piece
from chunkc.runtime.update.rules import ADAM_8BIT, AdamHyper
from chunkc.runtime.update.update_inputs import StepInputs

SPEC = ADAM_8BIT.states
HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)


def values(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Chunk:
    payload: Tensor
    states: list[Tensor]
    pieces: list[Piece]

    @classmethod
    def make(cls, pieces: list[Piece], numel: int, dtype: torch.dtype = torch.float32) -> Chunk:
        states = [
            torch.full((entry.entries(0, numel).stop,), 99, dtype=getattr(torch, entry.dtype)) for entry in SPEC.lists()
        ]
        return cls(torch.full((numel,), 99.0, dtype=dtype), states, pieces)

    def put(self, position: int, param: int, data: Tensor) -> None:
        first = 0
        for piece in (p for p in self.pieces if p.param == param):
            part = data[first : first + piece.end - piece.start]
            write_list(SPEC, self.states, position, piece.start, piece.end, part)
            first += len(part)

    def get(self, position: int, param: int) -> Tensor:
        pieces = [p for p in self.pieces if p.param == param]
        return torch.cat([read_list(SPEC, self.states, position, p.start, p.end) for p in pieces])

    def step(self, gradients: list[Tensor], step: int, target: Chunk | None = None) -> None:
        gradient = torch.zeros_like(self.payload)
        for param, data in enumerate(gradients):
            first = 0
            for piece in (p for p in self.pieces if p.param == param):
                gradient[piece.start : piece.end] = data[first : first + piece.end - piece.start]
                first += piece.end - piece.start
        to = None if target is None else (target.payload, target.states)
        update = ChunkUpdate(ADAM_8BIT, self.payload, self.states, self.pieces, gradient=gradient, target=to)
        params = range(len(gradients))
        update.update(StepInputs(dict.fromkeys(params, HYPER), dict.fromkeys(params, step), len(gradients)))


def train(chunk: Chunk, sizes: list[int], num_steps: int = 3) -> list[Tensor]:
    for param, size in enumerate(sizes):
        chunk.put(0, param, values(size, param))
    for step in range(1, num_steps + 1):
        chunk.step([values(size, 10 * step + param, 1e-2) for param, size in enumerate(sizes)], step)
    return [chunk.get(position, param) for position in range(3) for param in range(len(sizes))]


@pytest.mark.long(but="dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loop_is_compiled_and_has_the_bits_of_the_formula(dtype: torch.dtype) -> None:
    """`block_kernel` compares them; what it returns when they differ is not the loop."""
    kernel = module.block_kernel(ADAM_8BIT, dtype, dtype, is_parallel=False)
    assert isinstance(kernel, module.BlockLoop)
    assert module.agree(kernel, module.BlockEager(ADAM_8BIT), dtype, dtype)


@pytest.mark.long(but="False")
@pytest.mark.parametrize("signed", [True, False])
def test_codes_beside_every_border_are_those_of_the_formula(signed: bool) -> None:
    """New states are gradients, or their squares, a few units in the last place from a border; scales are 1."""
    near = code_borders(signed).view(torch.int32)[:, None] + torch.arange(-16, 17, dtype=torch.int32)
    gradient = near.view(torch.float32).flatten()
    gradient = gradient.clamp(-1, 1) if signed else gradient.sqrt()
    rows = gradient[: len(gradient) // (BLOCK_NUMEL - 1) * (BLOCK_NUMEL - 1)].view(-1, BLOCK_NUMEL - 1)
    gradient = torch.cat([torch.ones(len(rows), 1), rows], dim=1).flatten()
    coefficients = torch.tensor([1.0, 1e-3, 1e-8, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    eager, compiled = (
        module.BlockEager(ADAM_8BIT),
        module.block_kernel(ADAM_8BIT, torch.float32, None, is_parallel=False),
    )
    assert isinstance(compiled, module.BlockLoop)
    found, wanted = (Chunk.make([], len(gradient)) for _ in range(2))
    for kernel, chunk in ((compiled, found), (eager, wanted)):
        for state in chunk.states[1:]:
            state.zero_()
        kernel([gradient, *chunk.states], chunk.states, 0, len(gradient), coefficients)()
    assert all(torch.equal(a, b) for a, b in zip(found.states, wanted.states, strict=True))
    assert len(wanted.states[1 if signed else 2].unique()) == 256


@pytest.mark.long
def test_another_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    source = module.SOURCE.replace("quotients[i] > above[i]", "quotients[i] >= 1.01f * above[i]")
    assert source != module.SOURCE
    monkeypatch.setattr(module, "SOURCE", source)
    make = module.block_kernel.__wrapped__
    assert isinstance(make(ADAM_8BIT, torch.float32, None, is_parallel=False), module.BlockEager)


def test_neither_cuts_nor_threads_change_bits() -> None:
    """A parameter in one piece, in pieces cut at blocks behind others, and with two threads."""
    size = PARALLEL_NUMEL + 3 * BLOCK_NUMEL + 77
    whole = train(Chunk.make([Piece(0, 0, size)], size), [size])
    cut, behind = PARALLEL_NUMEL // 2, 3 * BLOCK_NUMEL
    pieces = [Piece(1, 0, 100), Piece(0, behind, behind + cut), Piece(0, 2 * behind + cut, 2 * behind + size)]
    found = train(Chunk.make(pieces, pieces[-1].end + 5), [size, 100])
    assert all(torch.equal(a, b) for a, b in zip(whole, found[::2], strict=True))
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if num_threads == 1 else 1)
        again = train(Chunk.make([Piece(0, 0, size)], size), [size])
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_beside_float64() -> None:
    """Decode, update and encode in float64: codes are equal, or neighbours where the quotient is on their border."""
    size = 5 * BLOCK_NUMEL + 19
    chunk = Chunk.make([Piece(0, 0, size)], size)
    states = [values(size, 1), values(size, 2, 1e-2), values(size, 3, 1e-2).square()]
    for position, state in enumerate(states):
        chunk.put(position, 0, state)
    p, m, v = (chunk.get(position, 0).double() for position in range(3))
    gradient = values(size, 4, 1e-2)
    chunk.step([gradient], 5)
    g = gradient.double()
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    p = p * (1 - 1e-3) - 1e-2 / (1 - 0.9**5) * m / (v.sqrt() / (1 - 0.999**5) ** 0.5 + 1e-8)
    torch.testing.assert_close(chunk.get(0, 0).double(), p, rtol=1e-6, atol=1e-8)
    for position, (name, exact) in enumerate(zip(SPEC.names, (m, v), strict=True), 1):
        largest = torch.cat([part.abs().max().expand(len(part)) for part in exact.split(BLOCK_NUMEL)])
        borders, quotients = code_borders(is_signed(name)).double(), exact / largest
        margin = 2.0**-20 * quotients.abs()
        least, most = (torch.searchsorted(borders, quotients + sign * margin) for sign in (-1, 1))
        codes = chunk.states[position].long()
        assert bool(((least <= codes) & (codes <= most)).all())
        assert float((least != most).double().mean()) < 0.01


def test_a_second_home_gets_what_an_update_in_place_does() -> None:
    size = 2 * BLOCK_NUMEL + 5
    for first in (1, 4):
        here, there = (Chunk.make([Piece(0, 0, size)], size) for _ in range(2))
        other = Chunk.make([Piece(0, 0, size)], size)
        for chunk in (here, there):
            for position, state in enumerate((values(size, 1), values(size, 2), values(size, 3).square())):
                chunk.put(position, 0, state)
        before = [t.clone() for t in there.states]
        here.step([values(size, 4)], first)
        there.step([values(size, 4)], first, other)
        assert all(torch.equal(a, b) for a, b in zip(here.states, other.states, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(there.states, before, strict=True))


@pytest.mark.parametrize("start", [1, BLOCK_NUMEL // 2])
def test_pieces_begin_at_blocks(start: int) -> None:
    with pytest.raises(ValueError, match=f"begins within a block of {BLOCK_NUMEL} elements"):
        Chunk.make([Piece(0, start, 400)], 400).step([values(400 - start, 0)], 1)
