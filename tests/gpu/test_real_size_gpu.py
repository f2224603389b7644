"""A model of a real size on a GPU, against plain PyTorch: 1.3 billion parameters in 16 GiB, fewer on a stand-in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest
import torch
from machines import Machine
from models import Batch, Case, loss_of
from torch import nn
from training import Recipe, Trained, assert_close_elements, assert_same_gradients, to_host, train_plain_16
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc

pytestmark = pytest.mark.gpu
Note = Callable[[str, object], None]
MIB, GIB = 1 << 20, 1 << 30
RECIPE = Recipe(num_steps=5, lr=1e-4, eps=1e-4)
GRADIENT_TOLERANCE = 2.0**-7
LOSS_TOLERANCE = 2e-3
UPDATE_SHARE = 0.1
"""Of the largest change that training made to a tensor: a step that is dropped is a fifth of it."""
NEEDED_DEVICE_NBYTES, NEEDED_HOST_NBYTES = 48 * GIB, 80 * GIB


@dataclass(frozen=True, slots=True)
class Size:
    hidden: int
    layers: int
    vocabulary: int
    length: int
    device_nbytes: int
    host_nbytes: int

    def build(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            config = LlamaConfig(
                hidden_size=self.hidden, intermediate_size=self.hidden * 11 // 4, num_hidden_layers=self.layers,
                num_attention_heads=max(2, self.hidden // 128), num_key_value_heads=max(2, self.hidden // 128),
                vocab_size=self.vocabulary, max_position_embeddings=self.length,
            )  # fmt: skip
            return LlamaForCausalLM(config).train()

    def batches(self) -> list[Batch]:
        generator = torch.Generator().manual_seed(2)
        ids = [torch.randint(self.vocabulary, (2, self.length), generator=generator) for _ in range(2)]
        return [{"input_ids": tokens, "labels": tokens} for tokens in ids]


REAL = Size(2048, 24, 32000, 512, 16 * GIB, 64 * GIB)
SMALL = Size(64, 2, 128, 32, MIB, 64 * MIB)


def size_for(machine: Machine) -> Size:
    """The real size on a GPU with memory for plain PyTorch beside it; the small one on a stand-in."""
    if machine.kind != "cuda":
        return SMALL
    device_nbytes, host_nbytes = torch.cuda.mem_get_info()[0], psutil.virtual_memory().available
    if device_nbytes < NEEDED_DEVICE_NBYTES or host_nbytes < NEEDED_HOST_NBYTES:
        pytest.skip(
            f"runs where {NEEDED_DEVICE_NBYTES >> 30} GiB of device and {NEEDED_HOST_NBYTES >> 30} GiB of host memory "
            f"are free; here {device_nbytes >> 30} and {host_nbytes >> 30} GiB are"
        )
    return REAL


@contextmanager
def refusing_beyond(nbytes: int, machine: Machine) -> Iterator[None]:
    """On a GPU torch's allocator gives no more than ``nbytes`` less what stands outside of it."""
    if machine.kind != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    share = (nbytes - machine.context_nbytes) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def train(model: nn.Module, batches: list[Batch]) -> Trained:
    """Losses, first gradients and parameters; moments of this size would take minutes to read."""
    found = Trained()
    optimizer = chunkc.AdamW(model.parameters(), **RECIPE.options)
    for step in range(RECIPE.num_steps):
        loss = loss_of(model(**batches[step % len(batches)]))
        loss.backward()
        if step == 0:
            found.gradients = {n: to_host(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
    found.params = model.state_dict()
    return found


def test_five_steps_are_those_of_plain_pytorch(machine: Machine, note: Note) -> None:
    size = size_for(machine)
    case = Case("real size", size.build, size.batches)
    wanted = train_plain_16(case, RECIPE, machine=machine)
    make_hw = machine.named if size is REAL else machine.hw
    hw = make_hw(size.device_nbytes, size.host_nbytes)
    with refusing_beyond(size.device_nbytes, machine):
        model = chunkc.compile(size.build(), hw, dtype=torch.bfloat16, backend="eager")
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        found = train(model, machine.put(case.batches()))
        stats = chunkc.stats(model)
    note("losses and those of plain PyTorch", [found.losses, wanted.losses])
    note("stats", {name: value for name, value in stats.items() if "nbytes" in name})
    assert stats["model_data_nbytes"] > stats["budget_nbytes"] and stats["h2d_nbytes"] > 0
    assert stats["measured_peak_nbytes"] <= stats["planned_peak_nbytes"] <= stats["budget_nbytes"]
    for loss, other in zip(found.losses, wanted.losses, strict=True):
        assert abs(loss - other) <= LOSS_TOLERANCE * abs(other)
    assert found.losses[-1] < found.losses[0]
    assert_same_gradients(found.gradients, wanted.gradients, GRADIENT_TOLERANCE)
    for name, value in wanted.params.items():
        change = float((value - initial[name]).abs().max())
        assert_close_elements({name: found.params[name]}, {name: value}, UPDATE_SHARE * change, "parameters")
