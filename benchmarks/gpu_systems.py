"""Systems that train the benchmark's models: chunkc, plain PyTorch, and other offloading systems.

Each makes a step over one batch and something that waits until everything it has launched is done. All compute in bf16
with parameters, gradients of the update and moments as its users run it; ``settings`` says how, in the result. Each is
made by ``SYSTEMS[name](shape, device, hw)``, where ``hw`` is the machine that chunkc is told and nobody else needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gpu_models import Batch, Gpt, Shape, initialise
from gpu_zero_offload import ZeroOffload, buckets_of

import chunkc
from chunkc.cost.rates import known_rates
from chunkc.cost.timeline import Timeline

LEARNING_RATE = 1e-4
UNMET_NORM = 1e4
"""A bound of the gradients' norm that no step reaches: none is clipped, and all that begin are committed."""
COMPILED_BLOCKS = "torch.compile(fullgraph=True, dynamic=False) of every block"


@dataclass(slots=True)
class System:
    """``step(batch)`` returns the loss as a tensor; ``finish()`` waits; ``facts()`` adds to the result."""

    step: Callable[[Batch], torch.Tensor]
    finish: Callable[[], object]
    settings: dict[str, Any]
    facts: Callable[[], dict[str, Any]] = field(default=dict)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def stepping(
    forward: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, device: torch.device, *, autocast: bool
) -> Callable[[Batch], torch.Tensor]:
    """The usual training step."""

    def step(batch: Batch) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = forward(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compile_blocks(model: Gpt) -> None:
    """Each by itself, in place."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, fullgraph=True, dynamic=False)


def name_only_rank() -> None:
    """The environment that torch.distributed and DeepSpeed want of a job of one process."""
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for name, value in {**job, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}.items():
        os.environ.setdefault(name, value)


def chunkc_system(
    shape: Shape, device: torch.device, hw: chunkc.Hardware, *, max_grad_norm: float | None = None
) -> System:
    """chunkc within the memory that ``hw`` names, by a plan for its rates, clipped or not."""
    model = chunkc.compile(shape.build(), hw, dtype=torch.bfloat16, fullgraph=True)
    initialise(model)
    optimizer = chunkc.AdamW(model.parameters(), lr=LEARNING_RATE, max_grad_norm=max_grad_norm)
    settings = {"hw": str(hw), "dtype": "bf16, fp32 master", "optimizer": "chunkc.AdamW"}
    settings["max_grad_norm"] = str(max_grad_norm)
    settings["compiled"] = "chunkc.compile(fullgraph=True), everything else by default"

    def facts() -> dict[str, Any]:
        plan = chunkc.plan_of(model)
        segments = {kind: len(plan.graph_segments(kind)) for kind in ("forward", "backward")}
        found = {
            "stats": chunkc.stats(model),
            "metrics": chunkc.metrics(model),
            "plan": plan.digest(),
            "num_segments": segments,
            "summary": str(plan),
        }
        found["stages_ms"] = {stage.name: round(stage.elapsed_ms) for stage in plan.stages}
        if known_rates(hw) is not None:
            found["simulated"] = simulated(chunkc.simulate(plan, hw))
        return found

    step = stepping(model, optimizer, device, autocast=False)
    return System(step, lambda: chunkc.stats(model), settings, facts)


def simulated(timeline: Timeline) -> dict[str, Any]:
    """The simulated step, and the share of it in which each stream is busy."""
    busy = {str(stream.stream): round(stream.busy_ms / timeline.step_ms, 4) for stream in timeline.streams}
    return {"step_ms": round(timeline.step_ms, 3), "busy_shares": busy, "overhead_ms": round(timeline.overhead_ms, 3)}


def plain_system(shape: Shape, device: torch.device, hw: chunkc.Hardware, *, compiled: bool) -> System:
    """PyTorch with everything on the device: fp32 parameters under autocast, fused AdamW."""
    model = shape.build().to_empty(device=device)
    model.head.weight = model.embed.weight
    initialise(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    settings = {"parameters": "fp32, autocast to bf16", "optimizer": "torch.optim.AdamW(fused=True)"}
    settings["compiled"] = "torch.compile(fullgraph=True, dynamic=False)" if compiled else "no"
    return System(stepping(forward, optimizer, device, autocast=True), lambda: synchronize(device), settings)


def fsdp2_system(shape: Shape, device: torch.device, hw: chunkc.Hardware) -> System:
    """FSDP2 on one rank with everything offloaded to pinned host memory between uses, blocks compiled."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    name_only_rank()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    mesh = dist.init_device_mesh(device.type, (1,))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    model = shape.build()
    compile_blocks(model)  # modules around them, so that the hooks of fully_shard stay outside of the graphs
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    initialise(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    settings = {
        "sharding": "fully_shard of every block and the model, world size 1, CPUOffloadPolicy(pin_memory=True)",
        "precision": "MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32), fp32 parameters",
        "optimizer": "torch.optim.AdamW(fused=True) on the CPU",
        "compiled": COMPILED_BLOCKS,
    }
    return System(stepping(model, optimizer, device, autocast=False), lambda: synchronize(device), settings)


def zero_offload_system(shape: Shape, device: torch.device, hw: chunkc.Hardware) -> System:
    """`gpu_zero_offload`; blocks are compiled one by one, so that gradients land while backward goes on."""
    model = shape.build().to_empty(device=device)
    model.head.weight = model.embed.weight
    initialise(model)
    model.bfloat16()
    optimizer = ZeroOffload(buckets_of(model, model.blocks), device, LEARNING_RATE)
    compile_blocks(model)
    settings = {
        "parameters": "bf16 on the device, fp32 on the host",
        "gradients": "bf16, copied to pinned host memory as they land",
        "optimizer": "torch.optim.AdamW(fused=True) on the host by blocks, after backward; copies back overlap",
        "compiled": COMPILED_BLOCKS,
    }

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return System(step, lambda: synchronize(device), settings)


def torchao_system(shape: Shape, device: torch.device, hw: chunkc.Hardware) -> System:
    """torchao's optimizer whose states and step are on the CPU; parameters stay on the device."""
    from torchao.optim import CPUOffloadOptimizer

    model = shape.build().to_empty(device=device)
    model.head.weight = model.embed.weight
    initialise(model)
    options = {"lr": LEARNING_RATE, "fused": True}
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, **options)
    forward = torch.compile(model, fullgraph=True, dynamic=False)
    settings = {
        "parameters": "fp32, autocast to bf16",
        "optimizer": "CPUOffloadOptimizer(torch.optim.AdamW, offload_gradients=True, fused=True)",
        "compiled": "torch.compile(fullgraph=True, dynamic=False)",
    }
    return System(stepping(forward, optimizer, device, autocast=True), lambda: synchronize(device), settings)


def deepspeed_system(shape: Shape, device: torch.device, hw: chunkc.Hardware) -> System:
    """DeepSpeed's ZeRO stage 3 with parameters and optimizer in pinned host memory."""
    import deepspeed

    name_only_rank()
    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Gpt(shape)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        initialise(model)
    engine, *_ = deepspeed.initialize(model=model, config=config)

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return System(step, lambda: synchronize(device), {"config": config, "compiled": "no"})


SYSTEMS: dict[str, Callable[[Shape, torch.device, chunkc.Hardware], System]] = {
    "chunkc": chunkc_system,
    "chunkc_clipped": partial(chunkc_system, max_grad_norm=UNMET_NORM),
    "eager": partial(plain_system, compiled=False),
    "compile": partial(plain_system, compiled=True),
    "zero_offload": zero_offload_system,
    "fsdp2": fsdp2_system,
    "torchao": torchao_system,
    "deepspeed": deepspeed_system,
}
PACKAGES = {"torchao": "torchao", "deepspeed": "deepspeed"}
"""What must be importable for a system beside torch."""
