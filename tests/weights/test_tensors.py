"""One named tensor of a compiled model at a time, read and written in every phase of training."""

import pytest
import torch
from small import PHASES, Small, twins_at
from torch import nn

import chunkc
from chunkc import ChunkcError
from chunkc.weights.tensors import ModelTensors


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_values_are_those_of_the_state_dict(phase: str, dtype: torch.dtype) -> None:
    model = twins_at(phase, dtype).model
    tensors, wanted = ModelTensors(model), model.state_dict()
    found = {entry.name: tensors.read(entry) for entry in tensors.entries}
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name
        found[name].zero_()
    assert all(torch.equal(tensors.read(e), wanted[e.name]) for e in tensors.entries), "what is read is a copy"


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_written_is_trained_on_with_the_moments_that_were_there(phase: str) -> None:
    twins, source = twins_at(phase), Small().state_dict()
    tensors = ModelTensors(twins.model)
    for entry in tensors.entries:
        tensors.write(entry, source[entry.name].double())
    twins.plain.load_state_dict(source)
    twins.check_params()
    twins.check_training()


@pytest.mark.parametrize("phase", ("staged", "settled"))
def test_a_write_sets_the_master_also_where_it_would_round_to_the_same(phase: str) -> None:
    """A state dict written back in 16 bits keeps the finer master; a written value is the value."""
    twins = twins_at(phase, torch.bfloat16)
    tensors = ModelTensors(twins.model)
    entry = tensors.entry("second.weight")
    coarse = tensors.read(entry).bfloat16()
    assert not torch.equal(coarse.float(), tensors.read(entry))
    tensors.write(entry, coarse)
    assert torch.equal(tensors.read(entry), coarse.float())
    assert torch.equal(twins.model.second.weight.detach().clone(), coarse)


@pytest.mark.parametrize("phase", ("staged", "settled"))
def test_a_write_is_rounded_to_the_dtype_handed_over_before_and_after_the_first_step(phase: str) -> None:
    """In a 16-bit model the fp32 master does not keep what the parameter could not hold."""
    model = chunkc.compile(Small().bfloat16(), "emulated-96k-64m", backend="eager")
    optimizer = chunkc.AdamW(model.parameters())
    if phase == "settled":
        model(torch.ones(4, 8, dtype=torch.bfloat16)).backward()
        optimizer.step()
    tensors = ModelTensors(model)
    fine = torch.linspace(0, 1, 256).view(16, 16)
    tensors.write(tensors.entry("second.weight"), fine)
    optimizer.zero_grad()
    model(torch.ones(4, 8, dtype=torch.bfloat16)).backward()
    index = model.second.weight.chunkc_index
    assert torch.equal(model.second.weight.chunkc_store.read_state(index)[2], fine.bfloat16().float())


def test_tied_parameters_are_one_entry() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    model[1].weight = model[0].weight
    chunkc.compile(model, "emulated-96k-64m", dtype=torch.float32, backend="eager")
    tensors = ModelTensors(model)
    assert tensors.entries[0].names == ("0.weight", "1.weight")
    assert tensors.entry("1.weight") is tensors.entries[0] and "2.running_mean" in tensors
    tensors.write(tensors.entry("1.weight"), torch.eye(8))
    tensors.write(tensors.entry("2.running_mean"), torch.arange(8))
    assert torch.equal(model[0].weight.detach().clone(), torch.eye(8))
    assert torch.equal(model[2].running_mean, torch.arange(8.0))
    part = ModelTensors(model[1])
    assert [entry.names for entry in part.entries] == [("weight",)]
    assert torch.equal(part.read(part.entry("weight")), torch.eye(8))


@pytest.mark.long
def test_models_without_chunks_and_wrong_shapes_are_refused() -> None:
    plain = Small()
    with pytest.raises(ChunkcError, match=r"this Small do not stand in one compiled model: call chunkc\.compile"):
        ModelTensors(plain)
    twins = twins_at("staged")
    with pytest.raises(ChunkcError, match="do not stand in one compiled model"):
        ModelTensors(nn.ModuleList([twins.model, plain]))
    with chunkc.full_params(twins.model), pytest.raises(ChunkcError, match="outside of"):
        ModelTensors(twins.model)
    tensors = ModelTensors(twins.model)
    with pytest.raises(ChunkcError, match=r"first\.bias has shape \(16,\), not \(1,\)"):
        tensors.write(tensors.entry("first.bias"), torch.zeros(1))
    twins.check_training()
