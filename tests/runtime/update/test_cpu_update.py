"""The host update against torch.optim, against float64, and against itself under every way to cut a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chunkc.runtime.update import cpu_update as module
from chunkc.runtime.update.cpu_update import PARALLEL_NUMEL, ChunkUpdate, Piece
from chunkc.runtime.update.rules import ADAM, AdamHyper
from chunkc.runtime.update.update_inputs import StepInputs

HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True)
SENTINEL = 12345.0
MEDIUM_NUMEL = 4096
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Adjust = Callable[[AdamHyper, int], tuple[AdamHyper, int]]


@pytest.fixture(autouse=True)
def keep_num_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def values(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Chunk:
    payload: Tensor
    param32: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    pieces: list[Piece]
    update: ChunkUpdate
    gradient: Tensor | None = None

    @classmethod
    def make(cls, numel: int, pieces: list[Piece], dtype: torch.dtype = torch.float32, overlay: bool = True) -> Chunk:
        payload = torch.full((numel,), SENTINEL, dtype=dtype)
        gradient = None if overlay else payload.clone()
        triple = [torch.full((numel,), SENTINEL) for _ in range(3)]
        return cls(payload, *triple, pieces, ChunkUpdate(ADAM, payload, triple, pieces, gradient=gradient), gradient)

    def put(self, target: Tensor, data: Mapping[int, Tensor]) -> None:
        taken = dict.fromkeys(data, 0)
        for piece in self.pieces:
            size = piece.end - piece.start
            target[piece.start : piece.end] = data[piece.param][taken[piece.param] :][:size]
            taken[piece.param] += size

    def take(self, source: Tensor, param: int) -> Tensor:
        return torch.cat([source[p.start : p.end] for p in self.pieces if p.param == param])

    def step(self, gradients: Mapping[int, Tensor], hypers: Mapping[int, AdamHyper], steps: Mapping[int, int]) -> None:
        self.put(self.payload if self.gradient is None else self.gradient, gradients)
        self.update.update(StepInputs(hypers, steps, num_params=len(gradients)))

    def gaps(self) -> list[Tensor]:
        inside = torch.zeros(self.payload.numel(), dtype=torch.bool)
        for piece in self.pieces:
            inside[piece.start : piece.end] = True
        return [t[~inside] for t in (self.payload, self.param32, self.exp_avg, self.exp_avg_sq)]


def pack(sizes: list[int], gap: int) -> tuple[int, list[Piece]]:
    pieces, at = [], 3
    for param, size in enumerate(sizes):
        pieces.append(Piece(param, at, at + size))
        at += size + gap
    return at + 5, pieces


def float64_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, hyper: AdamHyper, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's definition in float64; see the docstring of chunkc.runtime.update.cpu_update."""
    p, g, m, v = p.double(), g.double(), m.double(), v.double()
    if hyper.decoupled:
        p = p * (1 - hyper.lr * hyper.weight_decay)
    else:
        g = g + hyper.weight_decay * p
    m = hyper.beta1 * m + (1 - hyper.beta1) * g
    v = hyper.beta2 * v + (1 - hyper.beta2) * g * g
    m_hat, v_hat = m / (1 - hyper.beta1**step), v / (1 - hyper.beta2**step)
    return p - hyper.lr * m_hat / (v_hat.sqrt() + hyper.eps), m, v


def check_against_torch(decoupled: bool, adjust: Adjust | None = None) -> None:
    sizes = [1, 53, 13 * 7, 5000, PARALLEL_NUMEL + 77]
    groups = {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}
    base = [replace(HYPER, decoupled=decoupled), replace(HYPER, lr=3e-3, weight_decay=0.0, decoupled=decoupled)]
    numel, pieces = pack(sizes, gap=9)
    chunk = Chunk.make(numel, pieces)
    start = {i: values(size, i) for i, size in enumerate(sizes)}
    chunk.put(chunk.param32, start)
    plain = {i: torch.nn.Parameter(t.clone()) for i, t in start.items()}
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = make(
        [
            {"params": [plain[i] for i in plain if groups[i] == k], "lr": h.lr, "weight_decay": h.weight_decay}
            for k, h in enumerate(base)
        ]
    )
    counts = dict.fromkeys(plain, 0)
    for step in range(20):
        lr_factor = 1.0 - step / 40
        active = [i for i in plain if not (i == 2 and step % 3 == 1)]
        gradients = {i: values(size, 100 * step + i, 1e-2) for i, size in enumerate(sizes)}
        for k, group in enumerate(optimizer.param_groups):
            group["lr"] = base[k].lr * lr_factor
        for i in plain:
            plain[i].grad = gradients[i].clone() if i in active else None
            counts[i] += i in active
        optimizer.step()
        hypers = {i: replace(base[groups[i]], lr=base[groups[i]].lr * lr_factor) for i in active}
        steps = {i: counts[i] for i in active}
        for i in active if adjust else []:
            hypers[i], steps[i] = adjust(hypers[i], steps[i])
        chunk.step(gradients, hypers, steps)
    for i, p in plain.items():
        state = optimizer.state[p]
        torch.testing.assert_close(chunk.take(chunk.exp_avg, i), state["exp_avg"], rtol=2e-6, atol=5e-9)
        torch.testing.assert_close(chunk.take(chunk.exp_avg_sq, i), state["exp_avg_sq"], rtol=2e-6, atol=1e-12)
        torch.testing.assert_close(chunk.take(chunk.param32, i), p.detach(), rtol=2e-6, atol=1e-6)
        assert torch.equal(chunk.take(chunk.payload, i), chunk.take(chunk.param32, i))
    assert all(bool((gap == SENTINEL).all()) for gap in chunk.gaps())


@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_torch_over_20_steps(decoupled: bool) -> None:
    check_against_torch(decoupled)


MUTATIONS: dict[str, Adjust] = {
    "no bias correction": lambda hyper, step: (hyper, 10**7),
    "bias correction one step late": lambda hyper, step: (hyper, step + 1),
    "no weight decay": lambda hyper, step: (replace(hyper, weight_decay=0.0), step),
    "lr 5 % stale": lambda hyper, step: (replace(hyper, lr=hyper.lr * 0.95), step),
    "other kind of decay": lambda hyper, step: (replace(hyper, decoupled=not hyper.decoupled), step),
}


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_comparison_with_torch_detects(mutation: str, decoupled: bool) -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_against_torch(decoupled, MUTATIONS[mutation])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "hyper",
    [
        HYPER,
        replace(HYPER, decoupled=False),
        replace(HYPER, weight_decay=0.0),
        replace(HYPER, lr=0.0),
        replace(HYPER, eps=1e-20),
        replace(HYPER, beta1=0.0, eps=1e-4),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_one_step_against_float64(hyper: AdamHyper, dtype: torch.dtype, step: int) -> None:
    numel = MEDIUM_NUMEL + 1003
    chunk = Chunk.make(numel, [Piece(0, 0, numel)], dtype)
    p, g = values(numel, 1), values(numel, 2).to(dtype)
    m, v = values(numel, 3), values(numel, 4).square()
    for target, data in ((chunk.param32, p), (chunk.exp_avg, m), (chunk.exp_avg_sq, v)):
        chunk.put(target, {0: data})
    if step == 1:
        m, v = torch.zeros(numel), torch.zeros(numel)
    expected = float64_step(p, g, m, v, hyper, step)
    chunk.step({0: g}, {0: hyper}, {0: step})
    for found, want in zip((chunk.param32, chunk.exp_avg, chunk.exp_avg_sq), expected, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(chunk.payload, chunk.param32.to(dtype))
    if hyper.lr == 0:
        assert torch.equal(chunk.param32, p)


@pytest.mark.parametrize("overlay", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inactive_parameters_keep_their_state_and_lose_their_gradient(dtype: torch.dtype, overlay: bool) -> None:
    sizes = [70, PARALLEL_NUMEL * 2 + 5, 33, MEDIUM_NUMEL + 1]
    numel, pieces = pack(sizes, gap=0)
    chunk = Chunk.make(numel, pieces, dtype, overlay)
    for seed, target in enumerate((chunk.param32, chunk.exp_avg, chunk.exp_avg_sq)):
        chunk.put(target, {i: values(s, 10 * seed + i).abs() for i, s in enumerate(sizes)})
    before = [t.clone() for t in (chunk.param32, chunk.exp_avg, chunk.exp_avg_sq)]
    gradients = {i: values(s, 50 + i) for i, s in enumerate(sizes)}
    chunk.step(gradients, {0: HYPER, 3: HYPER}, {0: 4, 3: 9})
    for i in range(4):
        for old, new in zip(before, (chunk.param32, chunk.exp_avg, chunk.exp_avg_sq), strict=True):
            same = chunk.take(old, i) == chunk.take(new, i)
            assert bool(same.all()) == (i in (1, 2)) and (i in (1, 2) or not bool(same.any()))
    assert torch.equal(chunk.payload[3:-5], chunk.param32[3:-5].to(dtype))
    if chunk.gradient is not None:
        assert torch.equal(chunk.take(chunk.gradient, 1), gradients[1].to(dtype))


def test_a_dropped_update_is_seen() -> None:
    """The comparison of bits that the tests below use tells an updated chunk from one that was left out."""
    done, left_out = (one_parameter([0, 6000], torch.float32, 1, active) for active in (True, False))
    assert all(not torch.equal(a, b) for a, b in zip(done, left_out, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_restore_writes_param16_only(dtype: torch.dtype) -> None:
    numel, pieces = pack([100, 5000], gap=7)
    chunk = Chunk.make(numel, pieces, dtype)
    data = {0: values(100, 0), 1: values(5000, 1)}
    chunk.put(chunk.param32, data)
    chunk.put(chunk.payload, {i: torch.full_like(t, float("nan")) for i, t in data.items()})
    chunk.update.restore()
    for i, t in data.items():
        assert torch.equal(chunk.take(chunk.payload, i), t.to(dtype))
        assert torch.equal(chunk.take(chunk.param32, i), t)
    assert all(bool((gap == torch.tensor(SENTINEL, dtype=gap.dtype)).all()) for gap in chunk.gaps())
    assert bool((chunk.exp_avg == SENTINEL).all()) and bool((chunk.exp_avg_sq == SENTINEL).all())


def test_padding_is_never_read() -> None:
    """NaN in the gaps of every tensor, which would spread if a gap took part in anything."""
    sizes = [17, 5000, 1]
    numel, pieces = pack(sizes, gap=11)
    chunk = Chunk.make(numel, pieces)
    for tensor in (chunk.payload, chunk.param32, chunk.exp_avg, chunk.exp_avg_sq):
        tensor.fill_(float("nan"))
    chunk.put(chunk.param32, {i: values(s, i) for i, s in enumerate(sizes)})
    gradients = {i: values(s, 9 + i) for i, s in enumerate(sizes)}
    chunk.step(gradients, dict.fromkeys(range(3), HYPER), dict.fromkeys(range(3), 1))
    for i in range(3):
        for t in (chunk.payload, chunk.param32, chunk.exp_avg, chunk.exp_avg_sq):
            assert bool(chunk.take(t, i).isfinite().all())
    assert all(bool(gap.isnan().all()) for gap in chunk.gaps())


def one_parameter(cuts: list[int], dtype: torch.dtype, num_threads: int, active: bool = True) -> list[Tensor]:
    torch.set_num_threads(num_threads)
    numel = cuts[-1]
    whole = [values(numel, 1).to(dtype), values(numel, 2), values(numel, 3), values(numel, 4, 1e-2).square()]
    chunks = []
    for i, (start, end) in enumerate(pairwise(cuts)):
        before, after = i * 3 % 5, 1 + i % 3
        tensors = [torch.zeros(before + end - start + after, dtype=t.dtype) for t in whole]
        for source, t in zip(whole, tensors, strict=True):
            t[before : before + end - start] = source[start:end]
        piece = Piece(0, before, before + end - start)
        chunks.append((tensors, piece, ChunkUpdate(ADAM, tensors[0], tensors[1:], [piece])))
    for step in (2, 3, 4):
        gradient = values(numel, 10 + step).to(dtype)
        for (start, end), (tensors, piece, update) in zip(pairwise(cuts), chunks, strict=True):
            tensors[0][piece.start : piece.end] = gradient[start:end]
            update.update(StepInputs({0: HYPER} if active else {}, {0: step}, 1))
    return [torch.cat([tensors[k][piece.start : piece.end] for tensors, piece, _ in chunks]) for k in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_cuts_do_not_change_bits(dtype: torch.dtype, data: st.DataObject) -> None:
    """Odd pieces, small and large ones, unaligned ones and another number of threads give the same bits."""
    numel = 2 * PARALLEL_NUMEL + 1237
    inner = data.draw(st.lists(st.integers(1, numel - 1), unique=True, max_size=6))
    cuts = [0, *sorted(inner), numel]
    expected = one_parameter([0, numel], dtype, 1)
    found = one_parameter(cuts, dtype, data.draw(st.integers(1, 3)))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_small_size_gives_the_bits_of_the_large_range(dtype: torch.dtype) -> None:
    sizes = [*range(1, 70), PARALLEL_NUMEL - 1, PARALLEL_NUMEL, PARALLEL_NUMEL + 1, PARALLEL_NUMEL + 31]
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    expected, found = one_parameter([0, cuts[-1]], dtype, 2), one_parameter(cuts, dtype, 2)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def library_kernel(read: list[Tensor], written: list[Tensor], start: int, end: int, coefficients: Tensor) -> None:
    """PyTorch's fused kernel, which gives other bits to the rest of a range than to full vectors."""
    g, p, m, v, payload = (t[start:end] for t in (*read, written[-1]))
    step = torch.tensor(2.0)
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [step], lr=1e-2, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False,
        maximize=False,
    )  # fmt: skip
    payload.copy_(p)


def test_comparison_of_bits_detects_partial_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("PyTorch runs without AVX here, and its rests were not seen to differ from its vectors")
    cuts = [*range(0, 7001, 7)]
    expected, found = one_parameter([0, 7000], torch.float32, 1), one_parameter(cuts, torch.float32, 1)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    kernel = partial(partial, library_kernel)
    monkeypatch.setattr(module, "host_kernel", lambda *made_for, is_parallel: kernel)
    whole, apart = one_parameter([0, 7000], torch.float32, 1), one_parameter(cuts, torch.float32, 1)
    assert not torch.equal(whole[3], apart[3])


def test_a_large_range_gives_the_bits_of_small_chunks() -> None:
    numel = 600_000
    cuts = [*range(0, numel, 100_003), numel]
    expected, found = one_parameter([0, numel], torch.bfloat16, 3), one_parameter(cuts, torch.bfloat16, 2)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_neighbours_do_not_change_bits() -> None:
    sizes = [1 + 37 * i % 900 for i in range(120)]
    numel, pieces = pack(sizes, gap=2)
    together = Chunk.make(numel, pieces)
    start = {i: values(s, i) for i, s in enumerate(sizes)}
    gradients = {i: values(s, 500 + i) for i, s in enumerate(sizes)}
    together.put(together.param32, start)
    together.step(gradients, dict.fromkeys(start, HYPER), dict.fromkeys(start, 1))
    for i, size in enumerate(sizes):
        alone = Chunk.make(size, [Piece(i, 0, size)])
        alone.put(alone.param32, start)
        alone.step({i: gradients[i]}, {i: HYPER}, {i: 1})
        for a, b in ((alone.param32, together.param32), (alone.exp_avg_sq, together.exp_avg_sq)):
            assert torch.equal(a, together.take(b, i))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_payload_that_is_param32_gives_the_same_bits(dtype: torch.dtype) -> None:
    """One memory for param16 and param32, with the gradient in a chunk of its own, in fp32 or in 16 bits."""
    numel = 2 * PARALLEL_NUMEL + 777
    g, p, m, v = values(numel, 1).to(dtype), values(numel, 2), values(numel, 3), values(numel, 4).square()
    apart = [p.clone(), m.clone(), v.clone()]
    ChunkUpdate(ADAM, torch.zeros(numel), apart, [Piece(0, 3, numel - 5)], gradient=g).update(
        StepInputs({0: HYPER}, {0: 3}, 1)
    )
    update = ChunkUpdate(ADAM, p, (p, m, v), [Piece(0, 3, numel - 5)], gradient=g)
    update.update(StepInputs({0: HYPER}, {0: 3}, 1))
    assert all(torch.equal(a, b) for a, b in zip(apart, (p, m, v), strict=True))
    update.restore()
    assert torch.equal(apart[0], p)


def test_bad_input_is_refused_and_changes_nothing() -> None:
    f32, f16 = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="same number of elements"):
        ChunkUpdate(ADAM, f16, (f32, f32, torch.zeros(9)), [])
    with pytest.raises(ValueError, match="float32"):
        ChunkUpdate(ADAM, f16, (f32, f16, f32), [])
    with pytest.raises(ValueError, match="floating point"):
        ChunkUpdate(ADAM, torch.zeros(8, dtype=torch.int32), (f32, f32, f32), [])
    with pytest.raises(ValueError, match="memory of its own"):
        ChunkUpdate(ADAM, f32, (f32, torch.zeros(8), torch.zeros(8)), [])
    for pieces in ([Piece(0, 0, 5), Piece(1, 4, 8)], [Piece(0, 4, 9)], [Piece(0, 5, 4)]):
        with pytest.raises(ValueError, match="overlaps another piece or leaves"):
            ChunkUpdate(ADAM, f16, (f32, f32, f32), pieces)
    chunk = Chunk.make(8, [Piece(0, 0, 4), Piece(1, 4, 8)])
    with pytest.raises(ValueError, match="start at 1"):
        chunk.update.update(StepInputs({0: HYPER, 1: HYPER}, {0: 1, 1: 0}, 2))
    assert bool((chunk.param32 == SENTINEL).all()) and bool((chunk.payload == SENTINEL).all())
