"""The benchmark's ZeRO-Offload trains as torch's AdamW on fp32 parameters does, whose gradients are those in bf16."""

import torch
from gpu_models import Gpt, Shape, batches, initialise
from gpu_zero_offload import ZeroOffload, buckets_of
from torch import nn

DEVICE = torch.device("cpu")
LR = 1e-2


def test_five_steps_equal_masters_that_are_stepped_by_hand() -> None:
    """To the bit; a tied parameter gets the sum of its gradients, and gradients leave the device as they land."""
    shape = Shape(layers=2, hidden=64, heads=2, batch=2, length=32, vocabulary=128)
    torch.manual_seed(0)
    model, plain = Gpt(shape), Gpt(shape)
    initialise(model)
    plain.load_state_dict(model.state_dict())
    model.bfloat16(), plain.bfloat16()
    buckets = buckets_of(model, model.blocks)
    assert sum(p.numel() for params in buckets for p in params) == shape.num_params()
    ours = ZeroOffload(buckets, DEVICE, LR)
    masters = {name: nn.Parameter(p.detach().float()) for name, p in plain.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, fused=True)
    data = batches(shape, 2, DEVICE)
    for step in range(5):
        model(*data[step % 2]).backward()
        assert all(p.grad is None for p in model.parameters())
        ours.step()
        plain(*data[step % 2]).backward()
        for name, p in plain.named_parameters():
            masters[name].grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p.copy_(masters[name])
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q), (step, name)
