"""Cases 8, 11 and 12 on a GPU: what is measured stays within what is planned, and that within the budget."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from llamas import ids, llama, sized, step
from machines import Machine
from torch import nn
from torch.utils.data import DataLoader

import chunkc

pytestmark = pytest.mark.gpu
Note = Callable[[str, object], None]
MIB, GIB = 1 << 20, 1 << 30
MAX_UNUSED = 0.10  # of the budget
NUM_STEPS = 3
OPTIONS = {"lr": 1e-3, "eps": 1e-4}


def compiled(machine: Machine, nbytes: int, dtype: torch.dtype, backend: str) -> nn.Module:
    return chunkc.compile(sized(machine), machine.named(nbytes, 2 * GIB), dtype=dtype, backend=backend)


@pytest.mark.parametrize("placement", ["smallest", "resident"])
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float32, "eager"),
        (torch.bfloat16, "eager"),
        pytest.param(torch.bfloat16, "inductor", marks=pytest.mark.slow),
    ],
)
def test_measured_within_planned_within_budget(
    dtype: torch.dtype, backend: str, placement: str, machine: Machine, note: Note
) -> None:
    """At every step, at the least budget that works and with everything resident; and close, by torch's allocator.

    A step's outputs, logits and cache, are held until the next one has its own, as in usual loops, and as plans count.
    """
    nbytes = machine.overhead_nbytes + GIB
    if placement == "smallest":
        with pytest.raises(chunkc.BudgetError) as caught:
            compiled(machine, machine.overhead_nbytes + 1, dtype, backend)(input_ids=ids(machine), labels=ids(machine))
        nbytes = caught.value.min_device_nbytes
    model = compiled(machine, nbytes, dtype, backend)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-4)
    for number in range(NUM_STEPS):
        output = model(input_ids=ids(machine), labels=ids(machine))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        found = chunkc.stats(model)
        assert found["planned_peak_nbytes"] <= found["budget_nbytes"]
        if number and machine.kind == "cuda":
            assert found["measured_peak_nbytes"] <= found["planned_peak_nbytes"]
    note(f"{placement} {dtype} {backend}", {k: found[k] for k in sorted(found) if "peak" in k or "budget" in k})
    assert (found["h2d_nbytes"] == 0) == (placement == "resident")
    assert found["host_nbytes"] == chunkc.plan_of(model).memory.host_nbytes
    if machine.kind == "cuda":
        assert found["planned_peak_nbytes"] - found["measured_peak_nbytes"] <= MAX_UNUSED * found["planned_peak_nbytes"]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(64, 64), nn.Linear(64, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(torch.tanh(self.narrow(x))).square().mean()


def test_out_of_memory_names_the_action(cuda: Machine) -> None:
    """Somebody else takes the GPU: the error says which action, and what stood there; training goes on when it ends."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        plain, x = Wide(), cuda.put(torch.randn(2048, 64))
    model = chunkc.compile(copy.deepcopy(plain), cuda.hw(512 * MIB, GIB), dtype=torch.float32, backend="eager")
    plain = plain.to(cuda.torch_device)
    pairs = [
        (model, chunkc.AdamW(model.parameters(), **OPTIONS)),
        (plain, torch.optim.AdamW(plain.parameters(), **OPTIONS)),
    ]

    def train() -> None:
        for trained, optimizer in pairs:
            trained(x).backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MIB) / total)
    try:
        with pytest.raises(chunkc.DeviceMemoryError, match=r"`run +fwd\.\d+.*\n.*planned peak"):
            model(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    train()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().clone(), q.detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_deleted_model_gives_its_memory_back(machine: Machine) -> None:
    """Two models share a GPU; the second gets what the first leaves, and all of it when that is gone."""
    hw = machine.hw(96 * MIB, GIB)
    first = chunkc.compile(llama(), hw, dtype=torch.float32, backend="eager")
    first(input_ids=ids(machine), labels=ids(machine)).loss.backward()
    second = chunkc.compile(llama(), hw, dtype=torch.float32, backend="eager")
    with pytest.raises(chunkc.BudgetError):
        second(input_ids=ids(machine), labels=ids(machine))
    held = torch.cuda.memory_allocated() if machine.kind == "cuda" else 0
    arena_nbytes = chunkc.plan_of(first).layout.arena_nbytes
    del first
    gc.collect()
    if machine.kind == "cuda":
        assert held - torch.cuda.memory_allocated() >= arena_nbytes
    losses = [step(second, chunkc.AdamW(second.parameters(), lr=1e-4), ids(machine))]
    assert chunkc.stats(second)["budget_nbytes"] == 96 * MIB and losses[0] > 0


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 1024, (128,), generator=torch.Generator().manual_seed(index))


def test_forked_workers_change_nothing(machine: Machine) -> None:
    """Case 20: a DataLoader with forked workers beside a model whose homes a fork does not inherit."""
    losses = []
    for num_workers in (0, 2):
        model = chunkc.compile(llama(layers=2), machine.hw(32 * MIB, GIB), dtype=torch.float32, backend="eager")
        optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
        context = "fork" if num_workers else None
        loader = DataLoader(Rows(), batch_size=2, num_workers=num_workers, multiprocessing_context=context)
        losses.append([step(model, optimizer, machine.put(batch)) for _ in range(2) for batch in loader])
        assert chunkc.stats(model)["h2d_nbytes"] > 0
    assert losses[0] == losses[1] and len(set(losses[0])) == 6
